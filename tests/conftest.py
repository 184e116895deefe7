"""Fixtures that start real processes under the shim and read back what they recorded."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pandas as pd
import pytest
from hypothesis import settings
from rich.console import Console, RenderableType

from collector import cli
from collector.agent import launch, trial
from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.warm_python import WarmChild, WarmPython
from training_harness import layout

REPOSITORY = Path(__file__).resolve().parent.parent
SHIM = REPOSITORY / "training_harness" / "bootstrap"
TRAIN = REPOSITORY / "tests" / "scripts" / "train.py"
#: The interpreter of the scripts; `make versions` names those with other versions of torch.
PYTHON = os.environ.get("TIDEGAUGE_TEST_PYTHON", sys.executable)
WARM_PYTHON = WarmPython(PYTHON)

# An example takes as long as other programs leave it no core.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Processes that the tests start would inherit signals that nohup or a background job ignores.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

#: Files that take longest, those that wait between those that compute. If one of them began last, the other cores
#: would be idle at the end.
LONGEST_FIRST = (
    *("test_foreign_code", "test_jobs", "test_tune", "test_shared_store", "test_auto_workers", "test_golden"),
    *("test_verdicts", "test_live_dashboard"),
    *("test_pytest_plugin", "test_get_started", "test_hangs", "test_fail_open", "test_oom_checkpoints"),
    *("test_states", "test_missing_rank", "test_ended_runs", "test_kills", "test_loaders", "test_lines"),
    *("test_matrix", "test_views"),
    *("test_command_line", "test_rollups", "test_agent", "test_snapshot_requests", "test_two_nodes", "test_attach"),
    *("test_store_kill", "test_pipeline_stages", "test_store_reader", "test_store_ingest", "test_devices"),
    *("test_cuda_errors", "test_integrations", "test_python_api", "test_demo", "test_export", "test_parallel"),
    *("test_watch", "test_gpu_runs", "test_stalls"),
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test that runs alone if only those are asked for: to import all takes 10 s."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    return "pytest.mark.alone" not in collection_path.read_text() or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


T = TypeVar("T")


def render(table: RenderableType) -> str:
    """Return what the terminal shows, as text of 120 columns."""
    stream = io.StringIO()
    Console(file=stream, width=120).print(table)
    return stream.getvalue()


def wait_for(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """Return the value of `condition` as soon as it is true; an AssertionError names `what` if it never is."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)
    return value


def bare_environment() -> dict[str, str]:
    """Return this process's environment without Tidegauge's variables."""
    return {key: value for key, value in os.environ.items() if not key.startswith("TIDEGAUGE")}


def run_bare(script: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script without Tidegauge."""
    return WARM_PYTHON.run(script, *map(str, arguments), env=bare_environment(), timeout=120)


def tidegauge(home: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command line on a home in this process, which has loaded its modules."""
    argv = ["tidegauge", *map(str, words)]
    variables = bare_environment() | {layout.HOME_VARIABLE: str(home)} | environ
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return subprocess.CompletedProcess(argv, ended.value.code or 0, output.getvalue(), errors.getvalue())


def is_program(words: Sequence[str]) -> bool:
    """Return whether these words after `python` are a script or a module, without other options."""
    return words[0].endswith(".py") or words[0] == "-m" or words[:2] == ["-P", "-m"]


def begin(argv: list[str], **options: Any) -> WarmChild | subprocess.Popen[bytes]:
    """Begin a command in a warm Python, if it is a script or a module."""
    if argv[0] != PYTHON or not is_program(argv[1:]):
        return subprocess.Popen(argv, **options)
    outputs = [options[name].fileno() if name in options else at for at, name in ((1, "stdout"), (2, "stderr"))]
    return WARM_PYTHON.begin(
        *argv[1:], env=options["env"], outputs=outputs, process_group=options.get("process_group")
    )


@pytest.fixture
def under_tidegauge(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command line that starts a command, with the collector in this process; its output is that of both.

    A script or module begins in a warm Python.
    """

    def run(home: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with (
            mock.patch.object(launch, "subprocess", SimpleNamespace(Popen=begin)),
            mock.patch.object(trial, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": begin})),
        ):
            done = tidegauge(home, *words, **{"OMP_NUM_THREADS": "1", **environ})
        output, errors = capfd.readouterr()
        return subprocess.CompletedProcess(done.args, done.returncode, output + done.stdout, errors + done.stderr)

    return run


@dataclass(frozen=True)
class AttachedRun:
    """A finished script and the run that it left."""

    done: subprocess.CompletedProcess[str]
    run: Run

    def table(self, stream: str) -> pd.DataFrame:
        with read(self.run) as snapshot:
            return snapshot.query(f'SELECT * FROM "{stream}" ORDER BY time_ns')

    def events(self, kind: str) -> pd.DataFrame:
        with read(self.run) as snapshot:
            return snapshot.query("SELECT * FROM event WHERE kind = ? ORDER BY time_ns", [kind])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Tidegauge home, also that of child processes."""
    monkeypatch.setenv(layout.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run_attached(home: Path) -> Callable[..., AttachedRun]:
    """Run a Python command under the shim, without a collector, and return its run.

    A script or module begins in a warm Python, unless a new one is asked for; other options of Python need a new
    one.
    """

    def start(
        *command: str | Path,
        environ: Mapping[str, str] | None = None,
        run_dir: Path | None = None,
        in_new_python: bool = False,
    ) -> AttachedRun:
        words = [str(part) for part in command]
        directory = run_dir or layout.create_run(home, name="test", argv=words)
        env = bare_environment() | {layout.RUN_DIR_VARIABLE: str(directory), "PYTHONPATH": str(SHIM)}
        env |= environ or {}
        if in_new_python or not is_program(words):
            done = subprocess.run(
                [PYTHON, *words], env=env, capture_output=True, text=True, timeout=120, check=False
            )
        else:
            done = WARM_PYTHON.run(*words, env=env, timeout=120)
        return AttachedRun(done, Run(directory))

    return start
