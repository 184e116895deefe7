"""The start and the end of a short run: what the command waits for, and what is started besides it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from collector.store import Run, read
from tests.unit.test_imports import HEAVY

#: Runs the command line; `at_import` is called as soon as this module is to be imported.
MAIN = """
import sys, time
from pathlib import Path

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            at_import()

sys.meta_path.insert(0, Finder)
from collector.cli import main
main()
"""


#: Statement that prints the program of each process that starts from now on.
TELL_PROGRAMS = """sys.addaudithook(
        lambda name, values: name == "subprocess.Popen" and print(Path(str(values[0])).name, flush=True))"""


def start(
    tmp_path: Path, at_import: str, *command: str, module: str = "collector.agent.loop"
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGAUGE_")}
    code = f"def at_import():\n    {at_import}\n{MAIN.replace('{module}', module)}"
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


def test_short_run_starts_no_interpreter_and_all_its_records_are_stored(tmp_path):
    done = start(tmp_path, TELL_PROGRAMS, "true")
    assert done.returncode == 0
    assert set(done.stdout.split()) <= {"git"}, done.stdout
    (path,) = (tmp_path / "home" / "runs").iterdir()
    shutil.rmtree(path / "journal")
    with read(Run(path)) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM process")["n"].iloc[0] >= 1
        kinds = set(snapshot.query("SELECT kind FROM event")["kind"])
    assert kinds >= {"collector-start", "command-exit", "collector-stop"}


def test_command_keeps_its_exit_status_if_the_collector_cannot_be_loaded(tmp_path):
    done = start(tmp_path, "raise ImportError('damaged')", "sh", "-c", "echo trained; exit 3")
    assert (done.returncode, done.stdout) == (3, "trained\n")
    assert "the collector stopped (ImportError: damaged): the command and its journals go on" in done.stderr


def test_card_appears_though_a_scheduler_repeats_its_sigterm(tmp_path):
    repeat = "import os; os.kill(os.getpid(), 15)"
    done = start(tmp_path, repeat, "sh", "-c", "kill -TERM $$", module="collector.diagnosis.verdict")
    assert done.returncode == 143, done.stderr
    assert "killed, signal 15 (SIGTERM)" in done.stderr


def test_one_sigterm_ends_a_slow_verdict_on_a_command_that_ended_by_itself(tmp_path):
    done = start(tmp_path, "import os; os.kill(os.getpid(), 15)", "true", module="collector.diagnosis.verdict")
    assert done.returncode == -15, done.stderr
    assert "finished" not in done.stderr
