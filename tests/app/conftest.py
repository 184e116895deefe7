"""Runs for the views."""

import make_run as runs
import pytest

from app import panel


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Pages are looked at with their verdict, however busy the machine is, and read by each test itself."""
    panel._pictures.clear()
    monkeypatch.setattr("app.judging.PATIENCE_SECONDS", 120)
    monkeypatch.setattr("app.picture.PAINT_SECONDS", 0)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A home per state, each with one run."""
    scripts = (runs.HEALTHY, runs.CUDA, runs.KILLED, runs.SLOW_WORKER, runs.INLINE, runs.NO_SMAPS, runs.NO_DATA)
    homes = {script.name: tmp_path_factory.mktemp(script.name) for script in scripts}
    for script in scripts:
        runs.make_run(homes[script.name], script)
    return homes
