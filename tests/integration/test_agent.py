"""The collector with real processes: what a command and a user notice of it, and what it leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from collector.store.catalogue import list_runs
from collector.store.lake.reader import read
from tests.conftest import TRAIN, wait_for
from training_harness import layout
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_OTHER, ROLE_WORKER

MIB = 2**20
LAUNCHER = """
import sys
from pathlib import Path
from collector.agent.launch import run_command
outcome = run_command(
    sys.argv[2:], home=Path(sys.argv[1]), name="t", tags={"a": "b"}, interval_seconds=0.1
)
sys.exit(outcome.exit_status)
"""
COLLECTOR = """
import sys
from pathlib import Path
from collector.agent.loop import collect
from collector.store.runs.run import Run
collect(Run(Path(sys.argv[1])), interval_seconds=0.1)
"""


def launcher(home, *command):
    return [sys.executable, "-P", "-c", LAUNCHER, str(home), *map(str, command)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("TIDEGAUGE_")]:
        monkeypatch.delenv(name)
    return tmp_path / "home"


@pytest.fixture
def start_process():
    """Start a launcher with pipes; kill it at the end of the test if it is still alive."""
    with contextlib.ExitStack() as stack:

        def start(argv, **options):
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                **options,
            )
            stack.enter_context(process)
            stack.callback(kill_group, process.pid)
            return process

        yield start


def followed_run(home):
    """Return the run of a launcher once its collector has begun."""
    (run,) = wait_for(lambda: [run for run in list_runs(home) if run.manifest["collector"]], "a run")
    return run


def kill_group(pid):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_to_end(home, *command, **options):
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False, **options}
    return subprocess.run(launcher(home, *command), **options)


def only_run(home):
    [run] = list_runs(home)
    return run


def table(run, stream):
    with read(run) as snapshot:
        return snapshot.query(f"SELECT * FROM {stream} ORDER BY time_ns")


def events(run, kind):
    with read(run) as snapshot:
        bodies = snapshot.query("SELECT body FROM event WHERE kind = ? ORDER BY time_ns", [kind])["body"]
    return [json.loads(body) for body in bodies]


def last_sample(run, pid):
    processes = table(run, "process")
    return processes[processes.process_pid == pid].iloc[-1]


@pytest.mark.parametrize(
    ("script", "exit_code", "exit_status"),
    [("exit 3", 3, 3), ("kill -KILL $$", 137, -9)],
)
def test_exit_status_is_that_of_the_command(home, script, exit_code, exit_status):
    done = run_to_end(home, "sh", "-c", script)

    assert done.returncode == exit_code
    run = only_run(home)
    manifest = run.manifest
    assert manifest["exit_status"] == exit_status
    assert manifest["end_time_ns"] > manifest["anchors"][manifest["host"]]["time_ns"]
    command = manifest["command"]
    [ended] = events(run, "command-exit")
    assert (ended["command_pid"], ended["exit_status"]) == (command["pid"], exit_status)
    last = last_sample(run, command["pid"])
    assert (last.process_start_ticks, last.alive, last.exit_status) == (command["start_ticks"], 0, exit_status)
    assert [one["resumed"] for one in events(run, "collector-start")] == [False]
    assert len(events(run, "collector-stop")) == 1


def test_command_without_permission_exits_with_126(home, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o600)
    done = run_to_end(home, script)

    assert done.returncode == 126
    assert done.stderr == f"tidegauge: {script}: cannot be executed (Permission denied)\n"
    assert list_runs(home) == []


def test_command_inherits_the_standard_streams(home):
    done = run_to_end(home, "sh", "-c", "cat; echo problem >&2", input="through and through")

    assert done.stdout == "through and through"
    assert "problem" in done.stderr


def test_command_sees_its_run_directory_and_its_own_pythonpath(home):
    script = "import os, sys; print(os.environ['TIDEGAUGE_RUN_DIR']); print('/of/the/user' in sys.path)"
    done = run_to_end(home, sys.executable, "-c", script, env={**os.environ, "PYTHONPATH": "/of/the/user"})

    assert done.stdout.splitlines() == [str(only_run(home).path), "True"]


def test_empty_entry_of_pythonpath_is_still_the_current_directory(home, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").write_text("import beside; print(beside.NAME)")
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    environ = {**os.environ, "PYTHONPATH": ":/foo"}
    done = run_to_end(home, sys.executable, "tools/train.py", env=environ, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, "found\n")


def test_command_runs_with_one_warning_if_home_is_not_writable(tmp_path, home):
    tmp_path.joinpath("file").touch()
    done = run_to_end(tmp_path / "file/home", "sh", "-c", "echo ran; exit 5")

    assert (done.returncode, done.stdout) == (5, "ran\n")
    [warning] = done.stderr.splitlines()
    assert "cannot write in" in warning
    assert "TIDEGAUGE_HOME" in warning


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs can't be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_command_runs_with_one_warning_on_a_full_disk(small_disk, home):
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
        filler.write(bytes(2 * MIB))
    done = run_to_end(small_disk / "home", "sh", "-c", "echo ran; exit 5")

    assert (done.returncode, done.stdout) == (5, "ran\n")
    [warning] = done.stderr.splitlines()
    assert "No space left on device" in warning


def test_disk_that_fills_up_does_not_harm_the_command(small_disk, home):
    script = f"dd if=/dev/zero of={small_disk}/filler bs=64k 2>/dev/null; sleep 0.5; echo ran; exit 5"
    done = run_to_end(small_disk / "home", "sh", "-c", script)

    assert (done.returncode, done.stdout) == (5, "ran\n")
    assert "Traceback" not in done.stderr


def test_failing_ingest_keeps_journals_and_reports_once(home, start_process):
    process = start_process(launcher(home, "sh", "-c", "read line; exit 6"))
    run = followed_run(home)
    (run.path / "lake.sqlite").mkdir(exist_ok=True)
    process.communicate("go on\n", timeout=60)

    assert process.returncode == 6
    log = "".join(path.read_text() for path in run.events_dir.iterdir())
    problems = [json.loads(line) for line in log.splitlines() if "collector-problem" in line]
    assert [one["part"] for one in problems] == ["ingest"]
    assert list(run.journal_dir.glob("*.process.*.journal"))


TREE = """
import subprocess, sys
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
sys.stdin.readline()
child.kill()
child.wait()
"""


def test_process_tree_is_sampled_and_orphans_are_not_awaited(home, start_process):
    process = start_process(launcher(home, sys.executable, "-c", TREE))
    run = followed_run(home)
    child, grandchild = map(int, process.stdout.readline().split())
    wait_for_sample_of(run, grandchild)
    process.stdin.write("end\n")
    process.stdin.flush()
    # The orphan holds the pipes: wait for the launcher, not for their end.
    assert process.wait(timeout=60) == 0

    processes = table(run, "process")
    manifest = run.manifest
    roles = dict(zip(processes.process_pid, processes.role, strict=True))
    assert roles[child] == roles[grandchild] == ROLE_OTHER
    assert roles[manifest["collector"]["pid"]] == ROLE_COLLECTOR
    assert last_sample(run, child).alive == 0
    assert last_sample(run, grandchild).alive == 1
    sampled = processes[(processes.process_pid == grandchild) & processes.pss_bytes.notna()]
    assert (sampled.pss_bytes <= sampled.rss_bytes).all()
    assert (sampled.private_dirty_bytes <= sampled.uss_bytes).all()
    assert (table(run, "host").memory_available_bytes > 0).all()
    assert (table(run, "agent").cpu_ns > 0).all()


def wait_for_sample_of(run, pid):
    wait_for(lambda: (table(run, "process").process_pid == pid).any(), f"a sample of process {pid}")


TRAINING = """
import os, sys, time
from pathlib import Path
from training_harness.journal import EventLog, Identity, start_ticks
run = Path(os.environ["TIDEGAUGE_RUN_DIR"])
log = EventLog(run / "events", Identity.of_this_process())
worker = os.fork()
if worker == 0:
    time.sleep(600)
log.append("process-start", argv=[])
log.append("epoch-start", loader=2, epoch=0, worker_pids=[worker])
print(worker, flush=True)
sys.stdin.readline()
os.kill(worker, 9)
os.waitpid(worker, 0)
"""


def test_processes_have_the_roles_that_events_give_them(home, start_process):
    process = start_process(launcher(home, sys.executable, "-c", TRAINING))
    run = followed_run(home)
    worker = int(process.stdout.readline())
    wait_for(lambda: (table(run, "process").role == ROLE_WORKER).any(), "a sample of the worker")
    process.communicate("end\n", timeout=60)

    assert last_sample(run, run.manifest["command"]["pid"]).role == ROLE_MAIN
    last = last_sample(run, worker)
    assert (last.role, last.loader, last.worker, last.alive) == (ROLE_WORKER, 2, 0, 0)


INTERRUPTED = """
import signal
try:
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(9)
"""


def test_ctrl_c_reaches_the_command_and_closes_the_run(home, start_process):
    process = start_process(launcher(home, sys.executable, "-c", INTERRUPTED))
    run = followed_run(home)
    assert process.stdout.readline() == "True\n"
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)

    assert (process.returncode, output) == (9, "interrupted\n")
    assert "Traceback" not in errors
    assert run.manifest["exit_status"] == 9
    assert len(events(run, "collector-stop")) == 1


def test_signals_are_forwarded_to_the_command(home, start_process):
    names = ("HUP", "USR1", "USR2", "XCPU", "TERM")
    traps = "; ".join(f"trap 'echo {name}' {name}" for name in names[:-1])
    script = f"{traps}; trap 'echo TERM; exit 8' TERM; echo ready; while :; do sleep 0.05; done"
    process = start_process(launcher(home, "sh", "-c", script))
    assert process.stdout.readline() == "ready\n"
    for name in names:
        process.send_signal(signal.Signals[f"SIG{name}"])
        assert process.stdout.readline() == f"{name}\n"
    assert process.wait(timeout=60) == 8


def test_command_survives_a_killed_collector_and_the_run_resumes(home, start_process):
    process = start_process(launcher(home, "sh", "-c", "echo ready; read line; echo $line; read line"))
    run = followed_run(home)
    assert process.stdout.readline() == "ready\n"
    command = run.manifest["command"]["pid"]
    wait_for_sample_of(run, command)
    process.kill()
    process.wait()
    process.stdin.write("still here\n")
    process.stdin.flush()
    assert process.stdout.readline() == "still here\n"
    before = len(table(run, "process"))

    resumed = start_process([sys.executable, "-P", "-c", COLLECTOR, str(run.path)])
    while len(table(run, "process")) == before:
        pass
    process.stdin.write("end\n")
    process.stdin.flush()
    _, errors = resumed.communicate(timeout=60)

    assert (resumed.returncode, errors) == (0, "")
    assert [one["resumed"] for one in events(run, "collector-start")] == [False, True]
    assert len(events(run, "collector-stop")) == 1
    assert last_sample(run, command).alive == 0
    manifest = run.manifest
    assert manifest["collector"]["pid"] == resumed.pid
    assert manifest["end_time_ns"] is not None
    assert manifest["exit_status"] is None
    with read(run) as snapshot:
        doubled = snapshot.query(
            "SELECT count(*) AS n FROM process GROUP BY time_ns, pid, process_pid HAVING count(*) > 1"
        )
    assert doubled.empty


def test_finished_run_can_be_collected_again(home):
    run_to_end(home, "sh", "-c", "exit 3")
    run = only_run(home)
    steps = len(table(run, "host"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", COLLECTOR, str(run.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stderr == ""
    assert run.manifest["exit_status"] == 3
    assert len(table(run, "host")) >= steps


def test_run_that_ended_before_its_collector_has_its_recorded_end(run_attached):
    attached = run_attached(TRAIN)
    run, end = attached.run, attached.events("process-exit").iloc[0]
    command = {"host": end["host"], "pid": int(end["pid"]), "start_ticks": int(end["start_ticks"])}
    layout.write_manifest(run.path, {**run.manifest, "command": command})
    subprocess.run([sys.executable, "-P", "-c", COLLECTOR, str(run.path)], timeout=60, check=True)
    assert run.manifest["end_time_ns"] == end["time_ns"]


def test_process_that_samples_loads_no_table_libraries(home):
    """Their memory would be taken from the training; the verdicts and ingests of other processes need them."""
    program = "import os, time; time.sleep(2.5); print(open(f'/proc/{os.getppid()}/maps').read())"
    command = [sys.executable, "-P", "-m", "collector", "run", "--home", str(home), "--on-finding", "true"]
    run = subprocess.run(
        [*command, "--", sys.executable, "-c", program], check=True, capture_output=True, text=True
    )

    loaded = {part for line in run.stdout.splitlines() for part in line.split("/")}
    assert any(part.startswith("python") for part in loaded)
    assert loaded.isdisjoint({"numpy", "pandas", "pyarrow", "scipy", "duckdb", "_duckdb", "rich"})
