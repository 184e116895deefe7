"""Code that was not written for Tidegauge: no DataLoader, no optimizer, a PYTHONPATH of its own, own processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from collector.store.catalogue import find_run
from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.conftest import PYTHON, SHIM, TRAIN, bare_environment, run_bare, tidegauge, wait_for
from training_harness import layout

SCRIPT = TRAIN.with_name("foreign.py")


@pytest.fixture
def record(home, under_tidegauge):
    """Run a command under Tidegauge."""
    return lambda *command: under_tidegauge(home, "run", "--interval", "0.2", "--", *command)


@pytest.fixture
def run_and_report(home, record):
    """The output of a command under Tidegauge with the card, and its report."""

    def run(*command: object) -> tuple[str, dict]:
        done = record(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr, report(home)

    return run


def report(home: Path) -> dict:
    return json.loads(tidegauge(home, "report", "--format", "json").stdout)


def findings(reported: dict, kind: str) -> list[dict]:
    return [finding for finding in reported["findings"] if finding["kind"] == kind]


def test_leak_is_found_without_dataloader_and_optimizer(run_and_report):
    output, reported = run_and_report(sys.executable, SCRIPT, "written_by_hand", 14, 1024)
    passes = int(output.split()[0])
    assert (reported["run"]["step_unit"], reported["run"]["steps"]) == ("forward pass", passes)
    (leak,) = findings(reported, "main-heap-leak")
    assert leak["severity"] == "warning"
    assert leak["since_step"] is not None
    assert leak["rate"]["low"] > 10 * 2**20
    assert reported["summary"]["data_wait_ratio"] is None
    assert "no DataLoader seen" in output
    assert "No training was seen" not in output


def test_loop_without_a_leak_has_no_warning(run_and_report):
    _, reported = run_and_report(sys.executable, SCRIPT, "written_by_hand", 8, 0)
    assert [finding for finding in reported["findings"] if finding["severity"] != "info"] == []


def test_warnings_of_torch_name_the_same_lines_as_without_tidegauge(run_attached):
    bare, run = run_bare(SCRIPT, "warned_by_torch"), run_attached(SCRIPT, "warned_by_torch")
    places, expected = (re.findall(r"^(\S+:\d+): UserWarning", done.stderr, re.M) for done in (run.done, bare))
    assert len(run.table("batch")) == 6
    assert sum("foreign.py" in place for place in expected) == 2, "one for each loader"
    assert places == expected


def test_hand_written_updates_without_a_module_are_known_to_train(run_attached):
    run = run_attached(SCRIPT, "without_a_module", 10)
    assert run.done.returncode == 0, run.done.stderr
    assert len(run.events("backward-pass")) == 1


@pytest.mark.parametrize("count", [40])
def test_forward_passes_of_the_outermost_module_are_counted(run_attached, count):
    run = run_attached(SCRIPT, "passes_of_nested_modules", count)
    assert run.done.returncode == 0, run.done.stderr
    steps = run.table("step")
    assert count - 1 <= steps["step"].max() + 1 - 5 <= count
    assert run.events("hook-disabled").empty


def test_compiled_model_gives_the_same_output_and_is_counted(run_attached):
    run = run_attached(SCRIPT, "compiled", 20, in_new_python=True)
    bare = run_bare(SCRIPT, "compiled", 20)
    assert bare.returncode == 0, bare.stderr
    assert (run.done.returncode, run.done.stdout) == (0, bare.stdout), run.done.stderr
    assert run.table("step")["step"].max() + 1 == 20
    assert run.events("hook-disabled").empty


@pytest.mark.parametrize("case", ["odd_calls", "closes_descriptors"])
def test_hooks_survive_odd_calls_and_closed_descriptors(run_attached, tmp_path, case):
    folder = () if case == "odd_calls" else (tmp_path,)
    run = run_attached(SCRIPT, case, *folder)
    bare = run_bare(SCRIPT, case, *folder)
    assert bare.returncode == 0, bare.stderr
    assert (run.done.returncode, run.done.stdout) == (0, bare.stdout), run.done.stderr
    assert run.events("hook-disabled").empty
    assert run.table("step")["step"].max() + 1 == {"odd_calls": 11, "closes_descriptors": 40}[case]


def test_time_outside_the_step_is_measured(run_and_report):
    _, reported = run_and_report(sys.executable, SCRIPT, "own_batches", 100)
    assert reported["run"]["steps"] == 100
    assert reported["run"]["step_unit"] == "optimizer step"
    outside = reported["summary"]["outside_step"]
    assert outside["seconds"] >= 0.02
    assert outside["ratio"] > 0.5
    assert outside["cpu_ratio"] < 0.5, "it sleeps"


def test_hooks_survive_a_launch_line_that_drops_pythonpath(home, run_and_report, tmp_path):
    launches = ("env PYTHONPATH=. {0}", "{0} -E", "{0} -I", "env -u PYTHONPATH {0}")
    script = tmp_path / "launch.sh"
    script.write_text("".join(f"{line.format(sys.executable)} {SCRIPT} only_batches 20\n" for line in launches))
    run_and_report("sh", "-e", script)
    with read(find_run(home, "latest")) as snapshot:
        batches = snapshot.query("SELECT count(*) AS n FROM batch GROUP BY pid")
    assert batches.n.tolist() == [20] * len(launches)


def test_report_explains_why_nothing_could_attach(run_and_report, tmp_path, monkeypatch):
    """Without site-packages torch must be found otherwise; then no file of Tidegauge runs at start-up."""
    packages = Path(layout.__file__).parents[1], *map(Path, filter(os.path.isdir, sys.path))
    path = os.pathsep.join(map(str, packages))
    command = f"import sys; sys.path[:0] = {path!r}.split({os.pathsep!r}); import torch, time; time.sleep(2)"
    monkeypatch.chdir(tmp_path)
    _, reported = run_and_report(sys.executable, "-S", "-c", command)
    (found,) = findings(reported, "cannot-tell")
    assert "started with -S" in found["summary"]
    assert "Leave -S out" in found["advice"][0]["text"]


def test_report_says_that_no_training_was_seen(run_and_report):
    _, reported = run_and_report(sys.executable, "-c", "import torch, time; time.sleep(1)")
    (found,) = findings(reported, "cannot-tell")
    assert "attached to process" in found["summary"]
    _, reported = run_and_report("sleep", "3")
    (found,) = findings(reported, "cannot-tell")
    assert "none of its processes is Python" in found["summary"]


def test_steps_of_children_count_and_not_the_parents_evaluation(run_and_report):
    _, reported = run_and_report(sys.executable, SCRIPT, "children_train_and_the_parent_evaluates")
    assert (reported["run"]["steps"], reported["run"]["step_unit"]) == (80, "optimizer step")
    assert [finding for finding in reported["findings"] if finding["severity"] != "info"] == []


def test_ranks_of_a_process_group_need_no_environment(run_and_report):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, reported = run_and_report(sys.executable, SCRIPT, "ranks_without_environment", port)
    assert reported["run"]["steps"] == 20, "ranks step together"
    assert {finding["locus"].get("rank") for finding in findings(reported, "compute-bound")} == {0, 1}


def test_fetches_that_compute_in_children_are_not_io_bound(run_and_report):
    _, reported = run_and_report(sys.executable, SCRIPT, "samples_from_children")
    (slow,) = findings(reported, "workers-too-slow")
    assert slow.get("limited_by") != "io"
    ratio = {each["name"]: each["value"] for each in slow["evidence"]}["fetch_children_cpu_ratio"]
    assert ratio > 0.1, "on a busy machine they wait for a core"


def test_crash_finding_and_loader_event_name_their_lines(home, record):
    done = record(sys.executable, SCRIPT, "raises_in_colour")
    assert done.returncode == 1
    (crash,) = findings(report(home), "crashed")
    assert "foreign.py:" in crash["summary"]
    assert "in raises_in_colour: the loss is nan" in crash["summary"]
    run = Run(next((home / "runs").iterdir()))
    found = [json.loads(line) for log in run.events_dir.iterdir() for line in log.read_text().splitlines()]
    (loader,) = [event for event in found if event["kind"] == "loader"]
    assert (Path(loader["file"]).name, loader["variable"]) == ("foreign.py", "train_loader")


def test_crash_finding_names_the_line_in_the_worker(home, record):
    assert record(sys.executable, SCRIPT, "raises_in_a_worker").returncode == 1
    (crash,) = findings(report(home), "crashed")
    assert "ended with ValueError at foreign.py:" in crash["summary"]
    assert "in __getitem__: row 20 is empty" in crash["summary"]


def test_training_left_in_the_background_is_reported_as_running(home, run_and_report, tmp_path):
    script = tmp_path / "background.sh"
    script.write_text(
        f"{sys.executable} {SCRIPT} written_by_hand 15 0 > /dev/null 2>&1 & echo $! > {tmp_path}/pid\n"
    )
    output, _ = run_and_report("bash", script)
    assert "still runs" in output
    assert "running, exit status 0" in output
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid), "the end of the training")
    assert report(home)["run"]["status"] == "finished"


def test_helper_that_outlives_the_training_leaves_the_run_finished(home, run_and_report, tmp_path):
    script = tmp_path / "with_helper.sh"
    helper = f"{sys.executable} -c 'import time; time.sleep(120)' > /dev/null 2>&1 & echo $! > {tmp_path}/pid"
    script.write_text(f"{helper}\n{sys.executable} {SCRIPT} own_batches 20\n")
    try:
        output, reported = run_and_report("sh", script)
        later = report(home)
        os.kill(int((tmp_path / "pid").read_text()), 0)  # it runs still
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    assert "finished, exit status 0" in output
    assert "still runs" in output
    assert reported["run"]["status"] == "finished"
    assert later["run"]["duration_seconds"] == reported["run"]["duration_seconds"]


def test_interrupted_watch_reports_a_running_process(home):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch = subprocess.Popen(
            [sys.executable, "-P", "-m", "collector", "watch", str(process.pid), "--interval", "0.2"],
            stderr=subprocess.PIPE,
            text=True,
            env=bare_environment() | {layout.HOME_VARIABLE: str(home)},
        )
        wait_for(lambda: list(home.glob("runs/*/journal/*.process.*")), "a sample")
        watch.send_signal(signal.SIGINT)
        card = watch.communicate(timeout=60)[1]
        assert "running when the watch ended" in card
        assert "finished" not in card
        process.kill()


def test_notebook_gets_its_verdict_when_it_detaches(home):
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "detaches"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=bare_environment() | {layout.HOME_VARIABLE: str(home)},
    ) as notebook:
        run_dir = Path(notebook.stdout.readline().strip())
        log = run_dir / "collector.log"
        wait_for(lambda: log.exists() and "finished, 20 steps" in log.read_text(), "the verdict")
        assert notebook.poll() is None
        notebook.kill()


def test_modules_of_the_script_with_standard_names_stay_its_own(run_attached, tmp_path):
    for name in ("resource", "tracemalloc"):
        (tmp_path / f"{name}.py").write_text(f"print('the script has its own {name}')\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.utils.data\n"
        "print(sum(float(batch.sum()) for batch in torch.utils.data.DataLoader(torch.ones(40), batch_size=4)))\n"
        "import resource, tracemalloc\n"
    )
    bare = run_bare_in_new_python(script)
    assert bare.stdout.count("its own") == 2
    run = run_attached(script, in_new_python=True)
    assert (run.done.returncode, run.done.stdout, run.done.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert len(run.table("batch")) == 10
    assert run.events("hook-disabled").empty


def test_the_shim_imports_no_module_that_a_script_could_have_too(tmp_path):
    code = "import os, sys; before = set(sys.modules); import sitecustomize; print(*set(sys.modules) - before)"
    environ = bare_environment() | {"PYTHONPATH": str(SHIM), layout.RUN_DIR_VARIABLE: str(tmp_path)}
    done = subprocess.run([PYTHON, "-S", "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"__future__", "_tidegauge_shim", "sitecustomize"}


def test_the_command_runs_beside_modules_with_standard_names_on_pythonpath(tmp_path):
    for name in ("resource", "queue", "rich"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the standard module')\n")
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    environ = bare_environment() | {"PYTHONPATH": ".", layout.HOME_VARIABLE: str(tmp_path / "home")}
    command = [sys.executable, "-P", "-m", "training_harness.command", "run", "--", sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "finished, exit status 0" in done.stderr


def run_bare_in_new_python(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script without Tidegauge, whose modules are not imported yet."""
    return subprocess.run(
        [PYTHON, script], env=bare_environment(), capture_output=True, text=True, timeout=120, check=False
    )
