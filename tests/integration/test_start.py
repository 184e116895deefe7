"""The start of a run: the command begins before the collector is ready, and whatever becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.test_imports import HEAVY

#: Runs the command line; `at_import` is called as soon as the collector's loop is to be imported.
MAIN = """
import sys, time
from pathlib import Path

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "collector.agent.loop":
            at_import()

sys.meta_path.insert(0, Finder)
from collector.cli import main
main()
"""


def start(tmp_path: Path, at_import: str, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGAUGE_")}
    code = f"def at_import():\n    {at_import}\n{MAIN}"
    words = [sys.executable, "-P", "-c", code, "run", "--home", str(tmp_path / "home"), "--", *command]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)


def test_command_begins_before_the_collector_is_loaded(tmp_path):
    begun = tmp_path / "begun"
    await_command = f"while not Path({str(begun)!r}).exists(): time.sleep(0.01)"
    done = start(tmp_path, await_command, "touch", str(begun))
    assert (done.returncode, done.stdout) == (0, "")
    assert "finished, exit status 0" in done.stderr


def test_command_begins_before_heavy_modules_are_loaded(tmp_path):
    done = start(tmp_path, "print(*sys.modules, flush=True)", "true")
    assert done.returncode == 0
    loaded = set(done.stdout.split())
    assert "collector.agent.launch" in loaded
    assert loaded.isdisjoint(HEAVY | {"http.client", "ssl", "collector.agent.live", "collector.diagnosis"})


def test_command_keeps_its_exit_status_if_the_collector_cannot_be_loaded(tmp_path):
    done = start(tmp_path, "raise ImportError('damaged')", "sh", "-c", "echo trained; exit 3")
    assert (done.returncode, done.stdout) == (3, "trained\n")
    assert "the collector stopped (ImportError: damaged): the command and its journals go on" in done.stderr
