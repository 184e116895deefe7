"""A thread that waits is shown with what it waits for: real system calls of real threads and processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading

import pytest

from collector.agent.samplers.wait_targets import own_wait, wait_target
from collector.stacks import AT_SHARED_LOCK, FULL_PIPE, ONE_ENDLESS
from tests.conftest import wait_for

PID = os.getpid()
IN_LOCK = "import fcntl, sys; f = open(sys.argv[1], 'a'); print(flush=True); fcntl.{}(f, fcntl.LOCK_EX)"

PRINT = "print('x' * 1_000_000)"
IN_FULL_PIPE = f"""import subprocess, sys
c = subprocess.Popen([sys.executable, "-c", {PRINT!r}], stdout=-1); print(c.pid, flush=True); c.wait()"""
UNDER_A_SHELL = """import subprocess; c = subprocess.Popen(["sh", "-c", "head -c 99999 /dev/zero; :"], stdout=-1)
print(c.pid, flush=True); c.wait()"""
IN_WAIT = "import subprocess; c = subprocess.Popen(['cat'], stdin=-1); print(c.pid, flush=True); c.wait()"


@pytest.fixture
def thread():
    """Start a function in a thread and return the thread's id for the kernel; it must end by itself."""
    threads = []

    def start(function):
        threads.append(threading.Thread(target=function))
        threads[-1].start()
        return threads[-1].native_id

    yield start
    for one in threads:
        one.join()


@pytest.mark.parametrize(
    ("family", "host", "shown"), [("INET", "127.0.0.1", "127.0.0.1"), ("INET6", "::1", "[::1]")]
)
def test_the_other_end_of_a_connection(thread, family, host, shown):
    try:
        server = socket.create_server((host, 0), family=getattr(socket, f"AF_{family}"))
    except OSError:
        pytest.skip(f"no {family} here")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        connection, _ = server.accept()
        with connection:
            receiver = thread(lambda: client.recv(1))
            port = server.getsockname()[1]
            assert wait_for(lambda: wait_target("/proc", PID, receiver), "an address") == f"{shown}:{port}"
            connection.send(b"x")


@pytest.mark.parametrize(
    ("program", "waits"),
    [
        (IN_WAIT, "cat, pid {}, which is waiting for a pipe"),
        (IN_FULL_PIPE, FULL_PIPE),
        (UNDER_A_SHELL, "sh, pid {}, which is waiting for a child process (head, pid"),
        (UNDER_A_SHELL, FULL_PIPE),
    ],
)
def test_the_child_process_that_is_waited_for_with_its_own_wait(program, waits):
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        try:
            words = waits.format(pid)
            wait_for(lambda: words in (wait_target("/proc", parent.pid, parent.pid) or ""), "the child's wait")
        finally:
            os.kill(pid, 9)


def test_the_standard_input_that_nobody_writes():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as asking:
        try:
            wait_for(lambda: wait_target("/proc", asking.pid, asking.pid) == "standard input", "the input")
        finally:
            asking.communicate("\n")


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_the_holder_of_a_file_lock(tmp_path, kind):
    path = tmp_path / "lock"
    with path.open("w") as file:
        lock = getattr(fcntl, kind)
        lock(file, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-c", IN_LOCK.format(kind), path], stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            shown = wait_for(lambda: wait_target("/proc", other.pid, other.pid), "a lock")
            assert shown == f"{path}, held by process {PID}"
            assert own_wait("/proc", other.pid, other.pid) == "blocked on a file lock"
            lock(file, fcntl.LOCK_UN)


def test_a_thread_that_waits_for_no_descriptor_has_no_target(thread):
    event = threading.Event()
    sleeper = thread(event.wait)
    assert wait_target("/proc", PID, sleeper) is None
    event.set()


@pytest.mark.parametrize(("way", "shown"), [("idle", ONE_ENDLESS), ("timer", None), ("pipe", None)])
def test_an_event_loop_is_shown_that_nothing_but_a_thread_can_wake(thread, way, shown):
    loop = asyncio.new_event_loop()
    if way == "timer":
        loop.call_later(60, print)
    reader, writer = os.pipe()
    if way == "pipe":
        loop.add_reader(reader, print)

    def run():
        with contextlib.closing(loop):
            loop.run_forever()

    running = thread(run)
    wait_for(lambda: own_wait("/proc", PID, running) == "waiting for a pipe or socket", "the loop")
    assert wait_target("/proc", PID, running) == shown
    loop.call_soon_threadsafe(loop.stop)
    wait_for(loop.is_closed, "the end of the loop")
    os.close(writer)
    os.close(reader)


def test_a_process_that_may_not_be_read_has_no_target(tmp_path):
    assert wait_target(str(tmp_path), 1, 1) is None


@pytest.mark.parametrize("module", ["multiprocessing", "threading"])
def test_a_lock_that_processes_share_is_told_from_one_of_threads(module):
    """`acquire` is native code, so no frame shows whose lock it is."""
    command = [sys.executable, "-c", f"import {module}; lock = {module}.Lock(); lock.acquire(); lock.acquire()"]
    with subprocess.Popen(command) as child:
        words = wait_for(
            lambda: (found := own_wait("/proc", child.pid, child.pid) or "").startswith("blocked") and found,
            "a process at a lock",
        )
        child.kill()
    assert words == (AT_SHARED_LOCK if module == "multiprocessing" else "blocked on a lock (futex)")
