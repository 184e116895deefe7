"""Stacks of living processes, read from outside by py-spy without pausing them.

py-spy reads the interpreter's memory with process_vm_readv(2), which needs the rights of ptrace(2): the same user,
and the consent of Yama (Documentation/admin-guide/LSM/Yama.rst).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from collector.agent.samplers import procfs
from collector.agent.samplers.process_roles import EventTail, ProcessRoles, Role
from collector.agent.samplers.processes import ProcessTree
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.wait_targets import own_wait, wait_target
from collector.errors import one_line
from collector.findings import Locus
from collector.stacks import Stack, stacks_of
from collector.store import Run, of_this_boot
from training_harness.ptracer import ptrace_scope
from training_harness.records import ROLES

_TIMEOUT_SECONDS = 10
_NATIVE_TIMEOUT_SECONDS = 60
#: Waits whose target /proc may tell.
_WITH_TARGET = (
    *("waiting for a child", "waiting for a disk", "waiting for the network"),
    *("waiting for NFS", "waiting for a FUSE", "blocked on a file lock", "waiting for a pipe"),
)
_MISSING = "py-spy is not installed; install it with: pip install 'tidegauge[collector]'"
_NOT_ALLOWED = "reading another process's memory is not allowed here; "
#: kernel.yama.ptrace_scope -> what to do; the same without Yama, as in a container.
_REMEDIES = {
    1: "run as root, or set `sysctl kernel.yama.ptrace_scope=0` (it is 1: only its own collector reads a run)",
    2: "run as root, or with CAP_SYS_PTRACE (kernel.yama.ptrace_scope is 2)",
    3: "nothing helps until the next boot (kernel.yama.ptrace_scope is 3)",
}
_OTHER_REMEDY = "run as root, or with CAP_SYS_PTRACE (`docker run --cap-add=SYS_PTRACE`)"


class StackError(Exception):
    """The stacks of a process cannot be read; the message says why, with the remedy."""


def living(run: Run) -> dict[LocalProcess, Locus]:
    """Return the processes of a run that live on this host, without the collector, and their places in the run."""
    if not of_this_boot(run):
        return {}
    host = socket.gethostname()
    roles = ProcessRoles(host, lambda pid: procfs.start_ticks(procfs.PROC, pid))
    for event in EventTail(run.events_dir, host).read():
        roles.learn(event)
    command, collector = (run.manifest.get(name) for name in ("command", "collector"))
    named = {*roles} | ({LocalProcess.of(command)} if command else set())
    alive, _ = ProcessTree(procfs.PROC, collector["pid"] if collector else 0).update(named)
    return {process: locus(process, roles.role_of(process)) for process in sorted(alive)}


def locus(process: LocalProcess, role: Role) -> Locus:
    """Return the place of a process of this host in the run."""
    return Locus(role=ROLES[role.role], rank=role.rank, loader=role.loader, worker=role.worker, pid=process.pid)


def read_stacks(pid: int, locus: Locus, proc: str = procfs.PROC, *, native: bool = False) -> list[Stack]:
    """Return the stacks of a process's Python threads; takes some 20 ms and does not pause the process.

    With `native`, frames of C and C++ are among them; this takes seconds, and pauses the process for a part of one.

    Raises:
        StackError: they cannot be read.
    """
    dump = _dump(pid, native=native)
    threads = [thread["os_thread_id"] for thread in dump if thread.get("os_thread_id")]
    return stacks_of(dump, locus, {thread: wait_of(proc, pid, thread) for thread in threads})


def py_spy() -> str | None:
    """Return the path of py-spy: of this environment, else on PATH; None if there is none."""
    own = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(own) if os.access(own, os.X_OK) else shutil.which("py-spy")


def not_allowed(scope: int | None) -> str:
    """Return that stacks cannot be read for lack of rights, and the remedy under this `ptrace_scope`."""
    return _NOT_ALLOWED + _REMEDIES.get(scope or 0, _OTHER_REMEDY)


def _dump(pid: int, *, native: bool) -> list[dict[str, Any]]:
    program = py_spy()
    if program is None:
        raise StackError(_MISSING)
    option, seconds = ("--native", _NATIVE_TIMEOUT_SECONDS) if native else ("--nonblocking", _TIMEOUT_SECONDS)
    command = [program, "dump", "--json", option, "--pid", str(pid)]
    try:
        result = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise StackError(f"py-spy did not answer in {seconds} s") from None
    if result.returncode == 0:
        threads: list[dict[str, Any]] = json.loads(result.stdout)
        return threads
    message = result.stderr.decode(errors="replace")
    if "ermission" in message:
        raise StackError(not_allowed(ptrace_scope()))
    if "Failed to find python version" in message:
        raise StackError("it is not Python")
    raise StackError(one_line(message.strip().splitlines()[0] if message.strip() else "py-spy failed"))


def wait_of(proc: str, pid: int, thread: int) -> str | None:
    """Return what a thread waits for, with its target; None if /proc does not tell."""
    words = own_wait(proc, pid, thread)
    target = wait_target(proc, pid, thread) if (words or "").startswith(_WITH_TARGET) else None
    return f"{words} ({target})" if target else words
