"""Programs on simulated CUDA devices, under `tidegauge run`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.conftest import bare_environment
from tests.cuda_sim import simulator

PROGRAMS = Path(__file__).parent / "programs"
TIDEGAUGE = (sys.executable, "-P", "-m", "collector")

if not simulator.has_cuda():  # `make test-cuda` has an environment of its own
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True)
class Watched:
    """A finished program, its report and its run."""

    done: subprocess.CompletedProcess[str]
    report: dict[str, Any]
    run: Run

    def findings(self, kind: str) -> list[dict[str, Any]]:
        return [finding for finding in self.report["findings"] if finding["kind"] == kind]

    @property
    def warned(self) -> set[str]:
        return {finding["kind"] for finding in self.report["findings"] if finding["severity"] != "info"}

    @property
    def failed_hooks(self) -> list[str]:
        """Return the report's summaries of hooks that failed."""
        return [each["summary"] for each in self.findings("cannot-tell") if "hook_error" in evidence(each)]

    def table(self, stream: str) -> pd.DataFrame:
        with read(self.run) as session:
            return session.query(f'SELECT * FROM "{stream}" ORDER BY time_ns')


def evidence(finding: dict[str, Any]) -> dict[str, Any]:
    """Return name -> value."""
    return {each["name"]: each["value"] for each in finding["evidence"]}


@pytest.fixture(scope="session")
def libraries() -> Path:
    return simulator.build(Path(sys.prefix) / "cuda_sim")


@pytest.fixture
def devices(libraries: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """Gives the environment of programs that share new devices."""
    names = []

    def make(memory: str = "2G", count: int = 1, **environ: str) -> dict[str, str]:
        made = simulator.environment(libraries, memory=memory, devices=count, base=bare_environment())
        names.append(made["CUDA_SIM_NAME"])
        return made | environ

    yield make
    for name in names:
        simulator.remove_registry(name)


@pytest.fixture
def watched(tmp_path: Path, devices) -> Callable[..., Watched]:
    """Runs a program of `programs/`, or any command, under `tidegauge run`."""

    def start(
        *command: str, options: tuple[str, ...] = (), environ: dict[str, str] | None = None, **of_devices: Any
    ) -> Watched:
        environ = environ or devices(**of_devices)
        home = ["--home", str(tmp_path / "home")]
        argv = [sys.executable, str(PROGRAMS / command[0]), *command[1:]] if command[0].endswith(".py") else command
        done = subprocess.run(
            [*TIDEGAUGE, "run", *home, *options, "--", *argv],
            env=environ,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        told = subprocess.run(
            [*TIDEGAUGE, "report", *home, "--format", "json"],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        (folder,) = (tmp_path / "home" / "runs").iterdir()
        return Watched(done, json.loads(told.stdout), Run(folder))

    return start
