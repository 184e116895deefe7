"""Runs for the views."""

from functools import cache

import make_run as runs
import pytest
from streamlit.components.v2 import manifest_scanner

from app.runtime import refresh
from tests.recorded_runs import unpack


@pytest.fixture(autouse=True)
def wait_for_verdicts(monkeypatch):
    """Let pages wait for their verdict and read each run again, however busy the machine is."""
    refresh._content_slot.cache_clear()
    monkeypatch.setattr("app.runtime.verdicts.PATIENCE_SECONDS", 120)
    monkeypatch.setattr("app.runtime.drawing.PAINT_SECONDS", 0)


@pytest.fixture(scope="session", autouse=True)
def scan_packages_once():
    """Let Streamlit look through the installed packages for components once, not for each page."""
    once = cache(manifest_scanner.scan_component_manifests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", once)
        yield


@pytest.fixture(scope="session")
def homes(tmp_path_factory):
    """A home per state, each with one run."""
    scripts = (runs.HEALTHY, runs.KILLED, runs.SLOW_WORKER, runs.INLINE, runs.NO_SMAPS, runs.NO_DATA)
    homes = {script.name: tmp_path_factory.mktemp(script.name) for script in scripts}
    for script in scripts:
        runs.make_run(homes[script.name], script)
    homes["cuda"] = tmp_path_factory.mktemp("cuda")
    unpack("leak-to-the-end", homes["cuda"])
    return homes
