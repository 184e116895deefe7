"""Descriptions of a run's processes, and why hooks are absent, from command lines and environments.

The kernel shows both as they were when the program began (proc(5), cmdline and environ). A process that imported
torch with the hooks reports itself in a `process-attached` event; this module describes the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from collector.agent.samplers import procfs
from collector.agent.samplers.procfs import LocalProcess
from training_harness.layout import DISABLED_VARIABLE, RUN_DIR_VARIABLE
from training_harness.redaction import redact

#: Reasons for absent hooks, in the order in which they are checked.
NO_PYTHON, NO_RUN, OTHER_RUN, DISABLED, NO_SITE, ISOLATED, IGNORES, PYTHONPATH, NAMESPACE = (
    "no Python",
    "environment cleared",
    "another run",
    "disabled",
    "-S",
    "-I",
    "-E",
    "PYTHONPATH replaced",
    "PID namespace",
)
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_SHIM = os.path.join("training_harness", "bootstrap")
#: Options of Python that take the next word as their value, and those after which the program's own words begin.
_WITH_VALUE, _ENDS_OPTIONS = ("W", "X"), ("c", "m")
#: Library that each process maps that imported torch.
_TORCH = b"/libtorch_cpu.so"
_ARGUMENTS_AT_MOST, _CHARACTERS_AT_MOST = 40, 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A process as its own command line and environment describe it.

    Attributes:
        argv: command line of a Python program, cut short and without the values of names like secrets; only the
            name of any other program.
        is_python: whether it is a Python interpreter.
        obstacle: reason for absent hooks if Tidegauge is not installed for its interpreter; None without one.
    """

    argv: tuple[str, ...]
    is_python: bool
    obstacle: str | None


def read_program(proc: str, pid: int, run_dir: str | None = None) -> Program | None:
    """Describe a living process of the run in `run_dir`; None if it cannot be read."""
    argv, environ = procfs.read_command_line(proc, pid), read_environ(proc, pid)
    if not argv or environ is None:
        return None
    names = (os.path.basename(argv[0]), os.path.basename(_executable(proc, pid)))  # A program can change argv[0].
    is_python = any(_PYTHON.fullmatch(name) for name in names)
    # Any argument of another program may be a secret.
    words = redact(argv) if is_python else [os.path.basename(argv[0])]
    reason = obstacle(argv, environ, run_dir) if is_python else NO_PYTHON
    if reason is None and procfs.namespaces_count(proc, pid) > procfs.namespaces_count(proc, os.getpid()):
        reason = NAMESPACE
    return Program(
        argv=tuple(word[:_CHARACTERS_AT_MOST] for word in words[:_ARGUMENTS_AT_MOST]),
        is_python=is_python,
        obstacle=reason,
    )


def read_environ(proc: str, pid: int) -> dict[str, str] | None:
    """Return the environment with which a process began its program; None if it cannot be read."""
    variables = procfs.read_file(f"{proc}/{pid}/environ")
    if variables is None:
        return None
    pairs = (os.fsdecode(pair).partition("=") for pair in variables.split(b"\0") if pair)
    return {name: value for name, _, value in pairs}


def _executable(proc: str, pid: int) -> str:
    try:
        return os.readlink(f"{proc}/{pid}/exe")
    except OSError:
        return ""


def obstacle(argv: Sequence[str], environ: Mapping[str, str], run_dir: str | None = None) -> str | None:
    """Return why a Python process without an installed Tidegauge has no hooks; None if nothing prevents them."""
    if RUN_DIR_VARIABLE not in environ:
        return NO_RUN
    if run_dir not in (None, environ[RUN_DIR_VARIABLE]):
        return OTHER_RUN
    if environ.get(DISABLED_VARIABLE) == "1":
        return DISABLED
    options = _options(argv)
    for letter, reason in (("S", NO_SITE), ("I", ISOLATED), ("E", IGNORES)):
        if letter in options:
            return reason
    parts = environ.get("PYTHONPATH", "").split(os.pathsep)
    return None if any(part.endswith(_SHIM) for part in parts) else PYTHONPATH


def _options(argv: Sequence[str]) -> set[str]:
    """Return the one-letter options of the interpreter itself, not those of its program."""
    letters: set[str] = set()
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], start=1):
            if letter in _ENDS_OPTIONS:
                return letters
            if letter in _WITH_VALUE:
                if place == len(word) - 1:
                    next(words, None)
                break
            letters.add(letter)
    return letters


def has_torch(proc: str, pid: int) -> bool:
    """Return whether torch's library is mapped."""
    return _TORCH in (procfs.read_file(f"{proc}/{pid}/maps") or b"")


def find_left_running(run_dir: str, since_ticks: int) -> list[LocalProcess]:
    """Find the living processes of a run, none older than its command, whatever their parent is now."""
    variable = b"\0" + os.fsencode(f"{RUN_DIR_VARIABLE}={run_dir}") + b"\0"
    keys = []
    for pid in procfs.pids(procfs.PROC) - {os.getpid()}:
        stat = procfs.read_stat(procfs.PROC, pid)
        if stat is None or stat.has_ended or stat.start_ticks < since_ticks:
            continue
        if variable in b"\0" + (procfs.read_file(f"{procfs.PROC}/{pid}/environ") or b"") + b"\0":
            keys.append(LocalProcess(pid, stat.start_ticks))
    return keys


class ProgramLog:
    """Descriptions of a run's processes, for events: a tick after the first sight, and when torch is imported."""

    #: Most descriptions of a run: a dataset that starts a program per sample must not fill the event log.
    AT_MOST = 500
    #: Ticks after its first one at which a process is read: torch is imported within seconds, or never.
    _READ_AT_TICKS = (1, 2, 4, 8, 15)

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._ticks: dict[LocalProcess, int] = {}
        self._done: set[LocalProcess] = set()
        self._events_count = 0

    def update(self, alive: Iterable[LocalProcess]) -> list[dict[str, object]]:
        """Return the fields of the events that are due, of processes that no event has named as main or worker."""
        self._ticks = {key: self._ticks.get(key, -1) + 1 for key in alive}
        self._done &= self._ticks.keys()
        due = [key for key, ticks in self._ticks.items() if ticks in self._READ_AT_TICKS and key not in self._done]
        first = self._READ_AT_TICKS[0]
        return [fields for key in due for fields in self._describe(key, is_first=self._ticks[key] == first)]

    def _describe(self, key: LocalProcess, *, is_first: bool) -> list[dict[str, object]]:
        program = read_program(procfs.PROC, key.pid, self._run_dir) if self._events_count < self.AT_MOST else None
        if program is None:
            return []
        imports_torch = program.is_python and has_torch(procfs.PROC, key.pid)
        if imports_torch or not program.is_python:
            self._done.add(key)
        if not is_first and not imports_torch:
            return []
        self._events_count += 1
        return [
            {
                "process_pid": key.pid,
                "process_start_ticks": key.start_ticks,
                "argv": list(program.argv),
                "is_python": program.is_python,
                "has_torch": imports_torch,
                "obstacle": program.obstacle,
            }
        ]
