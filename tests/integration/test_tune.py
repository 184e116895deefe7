"""`tidegauge tune` on real short trainings."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import TRAIN, bare_environment
from training_harness.layout import TRIAL_LOADER_VARIABLE

TUNE = [sys.executable, "-P", "-m", "collector", "tune"]


def training(*options: object) -> list[str]:
    return [sys.executable, str(TRAIN), "--row-ms", "2", "--step-ms", "2", *map(str, options)]


def test_trials_are_compared_with_what_was_predicted_and_ctrl_c_keeps_them(tmp_path):
    script = training("--num-workers", 1, "--rows", 100_000)
    options = ["--home", str(tmp_path), "--trial-seconds", "2", "--ceiling"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([*TUNE, *options, "--", *script], env=bare_environment(), **pipes)
    begun = (line for line in child.stderr if line.startswith("tidegauge: num_workers="))
    assert len(list(itertools.islice(begun, 2))) == 2  # one trial is over, the next begins
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    *rows, conclusion = out.splitlines()[1:]
    assert re.match(r"Fastest: DataLoader\(…, num_workers=\d|The script's own num_workers=1", conclusion)
    assert [row.split("  ")[0] for row in rows[:2]] == [
        "as it is (num_workers=1, prefetch_factor=2)",
        "perfect loader",
    ]
    assert len(rows) == 3
    assert rows[2].startswith("num_workers=")
    assert rows[2].count("batches/s") == 2  # predicted, and measured
    assert rows[2].count("MiB") == 2
    as_it_is, perfect = (float(row.split(" batches/s")[-2].split()[-1]) for row in rows[:2])
    assert perfect > as_it_is
    assert not [who for who in psutil.process_iter(["cmdline"]) if script[1:] == (who.info["cmdline"] or [])[1:]]


def test_a_training_that_fails_is_said_so_with_its_last_words(tmp_path):
    command = [*TUNE, "--home", str(tmp_path), "--", *training("--crash-at-step", 3)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=bare_environment())
    assert done.returncode == 1
    assert "the training failed" in done.stdout
    assert "RuntimeError: the loss is not a number" in done.stdout


@pytest.mark.parametrize(("asked", "used"), [("2,3", 2), ("two", 1)])
def test_the_loader_is_as_asked_or_as_the_script_says(attached, asked, used):
    options = ("--num-workers", 1, "--persistent", "--rows", 8, "--epochs", 1)
    run = attached(TRAIN, *options, environ={TRIAL_LOADER_VARIABLE: asked})
    assert run.done.returncode == 0, run.done.stderr
    assert json.loads(run.events("loader")["body"].iloc[0])["num_workers"] == used
    assert run.events("hook-disabled").empty == (used == 2)
