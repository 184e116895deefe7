"""`tidegauge tune` on real short trainings."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import TRAIN, bare_environment, wait_for
from training_harness.layout import TRIAL_LOADER_VARIABLE

TUNE = [sys.executable, "-P", "-m", "collector", "tune"]


def training(*options: object) -> list[str]:
    """Return a training; for a prediction its rows take longer, since a busy machine wakes a sleeper late."""
    return [sys.executable, str(TRAIN), "--row-ms", "2", "--step-ms", "2", *map(str, options)]


def test_ctrl_c_prints_finished_trials_and_their_predictions(tmp_path):
    script = training("--num-workers", 1, "--rows", 100_000, "--row-ms", 5)
    options = ["--home", str(tmp_path), "--trial-seconds", "3", "--ceiling"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([*TUNE, *options, "--", *script], env=bare_environment(), **pipes)
    begun = (line for line in child.stderr if line.startswith("tidegauge: num_workers="))
    assert len(list(itertools.islice(begun, 2))) == 2  # one trial is over, the next begins
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    *table, conclusion = out.splitlines()
    rows = table[2:]
    assert max(map(len, table)) <= 80
    assert re.match(r"Fastest, within 5%: DataLoader\(…, num_workers=\d|The script's own num_workers=1", conclusion)
    assert [row.split("  ")[0] for row in rows[:2]] == ["as it is: 1 x 2", "perfect loader"]
    (trial,) = [row for row in rows if re.match(r"\d+ x \d", row)]
    assert re.match(r"\d+ x \d  +\S+ \(\S+-\S+\)  +[\d.]+  +[+-]\d+%  +\d+%  +[\d.]+ MiB  +[\d.]+ MiB$", trial)
    as_it_is, perfect = (float(re.search(r"([\d.]+) +\S+ +\d+%", row)[1]) for row in rows[:2])
    assert perfect > as_it_is
    assert not [who for who in psutil.process_iter(["cmdline"]) if script[1:] == (who.info["cmdline"] or [])[1:]]


def test_killed_tune_ends_its_trial(tmp_path):
    script = training("--rows", 100_000, "--num-workers", 1)
    command = [*TUNE, "--home", str(tmp_path), "--", "/bin/sh", "-c", f"{shlex.join(script)}; true"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=bare_environment())
    wait_for(lambda: [*tmp_path.glob("runs/*/journal/*.batch.*")], "the trial's first batch")
    family = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    assert not psutil.wait_procs(family, timeout=30)[1]


def test_failing_training_is_reported_with_its_error(tmp_path, under_tidegauge):
    done = under_tidegauge(tmp_path, "tune", "--", *training("--crash-at-step", 3))
    assert done.returncode == 1
    assert "the training failed" in done.stdout
    assert "RuntimeError: the loss is not a number" in done.stdout


def train_killed_with(workers, tmp_path):
    """Return the command of a training with one worker that SIGKILL ends where it has that many or more."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, runpy, signal, sys, torch.utils.data as data\n"
        "original = data.DataLoader.__iter__\n"
        "def iterate(loader):\n"
        f"    for number, batch in enumerate(original(loader)):\n"
        f"        if number == 40 and loader.num_workers >= {workers}:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield batch\n"
        "data.DataLoader.__iter__ = iterate\n"
        f"sys.argv[0] = {str(TRAIN)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = ["--row-ms", 2, "--step-ms", 2, "--num-workers", 1, "--rows", 100_000]
    return [sys.executable, str(script), *map(str, options)]


@pytest.fixture
def tune_briefly(tmp_path, under_tidegauge):
    """Tunes a command in two short trials."""
    options = ("--trial-seconds", 2, "--trials", 2)
    return lambda command: under_tidegauge(tmp_path, "tune", *options, "--", *command)


def test_a_killed_trial_does_not_fit_and_is_named(tmp_path, tune_briefly):
    done = tune_briefly(train_killed_with(2, tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "does not fit" in line]
    assert lines
    for setting, words in (line.split(": ", 1) for line in lines):
        assert re.fullmatch(r"num_workers=[2-9]\d*, prefetch_factor=\d", setting)
        assert words == (
            "does not fit: the training was killed by SIGKILL, which the kernel sends when memory runs out"
        )


def test_a_setting_of_the_script_that_does_not_fit_fails_and_fewer_workers_are_tried(tmp_path, tune_briefly):
    done = tune_briefly(train_killed_with(1, tmp_path))
    assert done.returncode == 1
    assert "as it is (num_workers=1, prefetch_factor=2): does not fit: the training was killed" in done.stdout
    assert "Fastest, within 5%: DataLoader(…, num_workers=0)." in done.stdout
    assert "off" not in done.stdout.splitlines()[1]  # nothing was predicted


def test_tune_prints_json_for_programs(tmp_path, under_tidegauge):
    options = ("--trial-seconds", 8, "--trials", 1, "--format", "json")
    script = training("--num-workers", 1, "--rows", 100_000, "--row-ms", 15)
    done = under_tidegauge(tmp_path, "tune", *options, "--", *script)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["schema"] == 1
    first, second = printed["trials"]
    assert first["title"] == "as it is"
    assert first["setting"] == {"num_workers": 1, "prefetch_factor": 2, "in_order": True}
    assert second["predicted"], done.stderr
    assert second["predicted"]["low"] < second["predicted"]["batches_per_second"] < second["predicted"]["high"]
    for trial in (first, second):
        assert trial["failure"] is None
        assert trial["fits"]
        assert trial["measured"]["memory_bytes"] > 0
    assert first["predicted"]["memory_bytes"] == pytest.approx(first["measured"]["memory_bytes"])


def test_trial_settings_apply_to_stateful_loaders(run_attached, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "print(sum(batch.sum() for batch in StatefulDataLoader(list(range(8)), batch_size=2)))\n"
    )
    run = run_attached(script, environ={TRIAL_LOADER_VARIABLE: "2,3"})
    assert run.done.stdout == "tensor(28)\n", run.done.stderr
    assert set(run.table("batch")["worker"]) == {0, 1}


def test_trial_batch_size_applies_unless_the_batch_sampler_is_custom(run_attached, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.data import BatchSampler, DataLoader, SequentialSampler\n"
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "class Own(BatchSampler): pass\n"
        "rows = list(range(24))\n"
        "of_torch, own = (kind(SequentialSampler(rows), 3, False) for kind in (BatchSampler, Own))\n"
        "for loader in (DataLoader(rows, batch_size=2), StatefulDataLoader(rows, batch_size=4),\n"
        "               DataLoader(rows, batch_sampler=of_torch), DataLoader(rows, batch_sampler=own)):\n"
        "    print(len(next(iter(loader))))\n"
    )
    run = run_attached(script, environ={TRIAL_LOADER_VARIABLE: "batch*2"})
    assert run.done.stdout.split() == ["4", "8", "6", "3"], run.done.stderr
    assert "its batch_sampler, Own, makes the batches" in run.events("hook-disabled")["body"].iloc[0]


def test_tune_tries_batch_sizes(tmp_path, under_tidegauge):
    script = training("--rows", 100_000, "--row-ms", 0)
    options = ("--batch-size", "--trial-seconds", 2, "--trials", 1, "--effective-batch", 64)
    done = under_tidegauge(tmp_path, "tune", *options, "--", *script)
    assert done.returncode == 0, done.stderr
    table, printed = done.stdout.splitlines()[2:4], done.stdout.splitlines()[4:]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [row.split()[0] for row in table] == ["4", "16"]
    assert all(re.search(r"\d MiB", row) for row in table)
    assert printed[0].startswith("Fastest, within 5%: batch_size=")
    assert re.match(r"For an effective batch of 64: batch_size=\d+, \d+ steps? accumulated\.", printed[-1])
