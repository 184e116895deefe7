"""A failure in Tidegauge does not change the training: same losses, same exit status, and one event."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.store.catalogue import find_run
from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.conftest import REPOSITORY, bare_environment
from training_harness import layout

SCRIPT = REPOSITORY / "tests" / "scripts" / "fail_open.py"
TIDEGAUGE = Path(sys.executable).with_name("tidegauge")
#: Function -> hook that is disabled and reported when it raises.
PRINCIPAL = {
    "LoaderHook.on_iterator": "batch",
    "LoaderHook.on_epoch_start": "batch",
    "LoaderHook.on_yield": "batch",
    "LoaderHook.on_inline_batch": "batch",
    "LoaderHook.note_deaths": "batch",
    "Progress.end": "step",
    "WorkerEntry.__init__": "worker",
    "FetchRecorder.__init__": "fetch",
    "FetchMeter.end": "fetch",
    "JournalWriter.append": "fetch",
}


@pytest.fixture(scope="module")
def user_project(tmp_path_factory) -> Path:
    """A directory with packages named like Tidegauge's, and a sitecustomize."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("collector", "app"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"whose = 'the user has a {name}'\n")
    (folder / "sitecustomize.py").write_text("import builtins\nbuiltins.greeting = 'of the user'\n")
    return folder


@pytest.fixture(scope="module")
def bare_run(user_project) -> subprocess.CompletedProcess[str]:
    """The odd process without Tidegauge; its third line holds the losses."""
    return subprocess.run(
        [sys.executable, SCRIPT, "odd"], cwd=user_project, capture_output=True, text=True, timeout=120, check=False,
        env=bare_environment() | {"PYTHONPATH": str(user_project)},
    )  # fmt: skip


def losses_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[2]


def test_any_failing_part_leaves_losses_equal_and_reports_once(bare_run, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "sabotage", tmp_path / "runs"], capture_output=True, text=True, timeout=200,
        env=bare_environment() | {layout.HOME_VARIABLE: str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each for each in attempts if each["losses"] != losses_of(bare_run) or each["error"]] == []
    disabled = {}
    for each in attempts:
        logs = (tmp_path / "runs" / each["run"]).glob("events/*.jsonl")
        events = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        disabled[each["name"]] = Counter((e["pid"], e["hook"]) for e in events if e["kind"] == "hook-disabled")
    assert {name: said for name, said in disabled.items() if any(count > 1 for count in said.values())} == {}
    assert disabled["nothing"] == {}
    hooks = {name: {hook for _, hook in said} for name, said in disabled.items()}
    assert {name: hook for name, hook in PRINCIPAL.items() if hook not in hooks[name]} == {}
    assert {name for name in hooks if name.startswith("torch lacks") and hooks[name]} == {
        f"torch lacks {name}"
        for name in ("__next__", "_worker_loop", "register_optimizer_step_pre_hook", "backward")
    }
    assert len(attempts) > 150
    for each in attempts:
        if each["name"].startswith("the clock") and "bounds" not in each["name"]:
            assert_the_run_can_be_read(Run(tmp_path / "runs" / each["run"]))


def assert_the_run_can_be_read(run: Run) -> None:
    """Eight steps with a batch each were recorded by that clock, and the rules cope with its times."""
    layout.write_manifest(
        run.path, {"schema": 1, "run_id": "clock", "name": "clock", "anchors": {}, "command": None}
    )
    with read(run) as snapshot:
        assert snapshot.problems == ()
        for stream in ("step", "batch", "fetch"):
            assert snapshot.query(f'SELECT count(*) AS n FROM "{stream}"').n[0] == 8
    diagnose(load_tables(run))


def test_odd_process_behaves_as_without_tidegauge(bare_run, user_project, tmp_path):
    done = subprocess.run(
        [TIDEGAUGE, "run", "--home", tmp_path, "--", sys.executable, SCRIPT, "odd"], cwd=user_project,
        env=bare_environment() | {"PYTHONPATH": str(user_project)}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert bare_run.returncode == done.returncode == 3, done.stderr
    assert done.stdout.startswith(bare_run.stdout), done.stdout
    assert "the user has a app" in bare_run.stdout
    run = find_run(tmp_path, "latest")
    with read(run) as snapshot:
        passes = snapshot.query("SELECT loader, epoch, count(*) AS n FROM batch GROUP BY ALL ORDER BY min(time_ns)")
        kinds = snapshot.query("SELECT kind, count(*) AS n FROM event GROUP BY kind").set_index("kind").n
        workers = snapshot.query('SELECT DISTINCT loader, worker FROM "fetch" WHERE worker >= 0')
    assert passes.n[:2_502].tolist() == [4, 4] + [1] * 2_500
    assert 2_502 < len(passes) <= 2_505, "os._exit may cost what came in the last 5 ms, but no whole loader"
    assert len(workers) == 2
    assert kinds["process-start"] == 1
    assert kinds["loader"] <= 1000
    assert "hook-disabled" not in kinds
    assert "process-exit" not in kinds


def test_isolated_interpreter_trains_unharmed_and_is_recorded(bare_run, tmp_path, under_tidegauge):
    done = under_tidegauge(tmp_path, "run", "--", sys.executable, "-I", SCRIPT, "losses")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == losses_of(bare_run)
    with read(find_run(tmp_path, "latest")) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM step").n[0] > 0
    shutil.rmtree(tmp_path)
