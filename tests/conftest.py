"""Fixtures that start real processes under the shim and read back what they recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pandas as pd
import pytest

from collector.store.lake.reader import read
from collector.store.runs.run import Run
from training_harness import layout

REPOSITORY = Path(__file__).resolve().parent.parent
SHIM = REPOSITORY / "training_harness" / "bootstrap"
TRAIN = REPOSITORY / "tests" / "scripts" / "train.py"
#: The interpreter of the scripts; `make versions` names those with other versions of torch.
PYTHON = os.environ.get("TIDEGAUGE_TEST_PYTHON", sys.executable)


T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """Return the value of `condition` as soon as it is true; an AssertionError names `what` if it never is."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)
    return value


def bare_environment() -> dict[str, str]:
    """This process's environment without anything of Tidegauge's."""
    return {key: value for key, value in os.environ.items() if not key.startswith("TIDEGAUGE")}


@dataclass(frozen=True)
class Attached:
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
def attached(home: Path) -> Iterator[Callable[..., Attached]]:
    """Runs a Python command under the shim, without a collector, and returns its run."""

    def start(
        *command: str | Path, environ: Mapping[str, str] | None = None, run_dir: Path | None = None
    ) -> Attached:
        directory = run_dir or layout.create_run(home, name="test", argv=[str(part) for part in command])
        done = subprocess.run(
            [PYTHON, *map(str, command)],
            env=bare_environment()
            | {layout.RUN_DIR_VARIABLE: str(directory), "PYTHONPATH": str(SHIM)}
            | dict(environ or {}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Attached(done, Run(directory))

    return start
