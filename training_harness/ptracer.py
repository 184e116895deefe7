"""Permission for the collector to read this process's stacks, where the kernel's Yama module restricts ptrace(2).

With `ptrace_scope` 1, the default of Ubuntu and Debian, only ancestors of a process may read its memory. py-spy is
the collector's child, so each process names the collector with prctl(PR_SET_PTRACER). Then the collector and its
descendants may read it, and no other process (Documentation/admin-guide/LSM/Yama.rst, security/yama/yama_lsm.c).
The permission ends with either process. A process has one such name, and the kernel does not show it. So the shim
gives it before any other code runs, and code that names another process later has its way.

The shim loads this file by itself. It imports built-in modules alone, and where Yama asks for it the C part of
ctypes.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # what the shim imports would be missing where the script has its own of that name
if TYPE_CHECKING:
    from collections.abc import Callable

#: Environment variable with the collector's pid and start time, `<pid>.<start_ticks>`.
COLLECTOR_VARIABLE = "TIDEGAUGE_COLLECTOR"
#: Value of kernel.yama.ptrace_scope with which a process can name its tracer.
RESTRICTED = 1
_PR_SET_PTRACER = 0x59616D61


def ptrace_scope(proc: str = "/proc") -> int | None:
    """Return kernel.yama.ptrace_scope; None without Yama."""
    try:
        with open(f"{proc}/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def process_name(pid: int, proc: str = "/proc") -> str:
    """Return `<pid>.<start_ticks>` of a process.

    Raises:
        OSError: there is no such process.
    """
    with open(f"{proc}/{pid}/stat", "rb") as file:
        return f"{pid}.{int(file.read().rpartition(b') ')[2].split()[19])}"


def allow_collector(proc: str = "/proc", prctl: Callable[..., int] | None = None) -> None:
    """Let the collector of this run, and no other process, read this one. Never raises.

    Nothing happens without Yama, or if the collector has ended or is in another pid namespace.
    """
    try:
        collector = os.environ.get(COLLECTOR_VARIABLE)
        if collector is None or ptrace_scope(proc) != RESTRICTED:
            return
        pid = int(collector.partition(".")[0])
        if process_name(pid, proc) != collector:
            return
        (prctl or _prctl)(_PR_SET_PTRACER, pid, 0, 0, 0)
    except Exception:
        pass


def _prctl(*arguments: int) -> int:
    """Call prctl(2)."""
    import _ctypes

    program = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None is the program itself
    return int(_ctypes.call_function(_ctypes.dlsym(program, "prctl"), arguments))
