"""`tidegauge run`: the command as a direct child under the shim, and a collector that follows it.

The command comes first. It has this process's terminal, streams and process group, so that it runs
as it would without Tidegauge and outlives this process; nothing that fails here may stop it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from collector.agent.loop import (
    DEFAULT_INTERVAL_SECONDS,
    Agent,
    follow,
    manifest_process,
    update_manifest,
)
from collector.agent.procfs import ProcessKey
from collector.errors import TidegaugeError
from collector.store.runs import Run
from training_harness import layout
from training_harness.journal import start_ticks
from training_harness.layout import (
    ALL_DEVICES,
    DISABLED_VARIABLE,
    HOME_VARIABLE,
    RUN_DEVICES_VARIABLE,
    RUN_DIR_VARIABLE,
    RUN_ID_VARIABLE,
    create_run,
)

if TYPE_CHECKING:
    from collector.agent.outlets import Outlets

INTERVAL_BOUNDS_SECONDS = (0.05, 60.0)
#: As a shell has it.
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128

#: Whoever sends one of these to this process means the command: batch systems announce a limit so.
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGCONT,
)
#: The terminal sends these to the command itself.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How it ended.

    Attributes:
        run: None if the command ran without Tidegauge (switched off, or the home can't be written), or not at all.
        exit_status: the exit code to pass on: the command's own, or 128+n after signal n.
        is_stored: False if the store on the network did not take all records, and so can't be asked either.

    """

    run: Run | None
    exit_status: int
    is_stored: bool = True


def run_command(
    argv: Sequence[str],
    *,
    home: Path,
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
    on_ready: Callable[[Run], None] | None = None,
    outlets: Outlets | None = None,
) -> RunOutcome:
    """Run a command under Tidegauge and follow it to its end.

    Args:
        argv: the command and its arguments.
        home: Tidegauge home; created if need be.
        name: of the run; by default that of the script or program.
        tags: kept in the manifest.
        interval_seconds: between two samples.
        on_ready: called with the run once the command has started.
        outlets: what is told of the run while it goes on.

    Returns:
        The run and the exit code to pass on; 126 or 127 if the command cannot be started.

    Raises:
        TidegaugeError: the interval is out of bounds, or there is a run of the given id.

    """
    check_interval(interval_seconds)
    run = None
    if os.environ.get(DISABLED_VARIABLE) != "1":
        run = _create_run(argv, home=home, name=name or default_name(argv), tags=tags or {})
    environ = child_environment(os.environ, run.path, home) if run else dict(os.environ)
    with _Signals() as signals:
        try:
            # Descriptors are inherited as from a shell; Python's own are close-on-exec.
            child = subprocess.Popen(list(argv), env=environ, close_fds=False)
        except OSError as error:
            return _not_started(argv[0], error, run)
        signals.hand_on_to(child)
        is_stored = True
        if run is None:
            child.wait()
        else:
            is_stored = _follow_child(run, child, interval_seconds, on_ready, outlets) or not run.is_shared
    return RunOutcome(run=run, exit_status=_exit_code(child.wait()), is_stored=is_stored)


def check_interval(seconds: float) -> float:
    """The interval between two samples, if it can be had.

    Raises:
        TidegaugeError: it is out of bounds.

    """
    low, high = INTERVAL_BOUNDS_SECONDS
    if not low <= seconds <= high:
        raise TidegaugeError(f"the interval {seconds:g} s is not between {low:g} and {high:g} s")
    return seconds


def default_name(argv: Sequence[str]) -> str:
    """The name of a run that was given none: its script or module, else its program."""
    words = list(argv[1:])
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return Path(word).stem
        if word == "-m" and index + 1 < len(words):
            module = words[index + 1]
            if not module.startswith("torch.distributed"):
                return module
    return Path(argv[0]).name


def child_environment(environ: Mapping[str, str], run_dir: Path, home: Path) -> dict[str, str]:
    """The environment of the command: the run it belongs to, and the shim before all else.

    The user's own search path stays as it is: an empty part of it means the current directory.
    """
    shim = str(Path(layout.__file__).parent / "bootstrap")
    own = environ.get("PYTHONPATH", "")
    rest = [part for part in own.split(os.pathsep) if part != shim] if own else []
    return {
        **{name: value for name, value in environ.items() if name != RUN_ID_VARIABLE},  # which is in use now
        RUN_DIR_VARIABLE: str(run_dir.absolute()),
        HOME_VARIABLE: str(home.absolute()),
        RUN_DEVICES_VARIABLE: environ.get("CUDA_VISIBLE_DEVICES", ALL_DEVICES),
        "PYTHONPATH": os.pathsep.join([shim, *rest]),
    }


def _create_run(argv: Sequence[str], *, home: Path, name: str, tags: Mapping[str, str]) -> Run | None:
    try:
        return Run(create_run(home, name=name, argv=argv, tags=tags))
    except FileExistsError as error:
        raise TidegaugeError(
            f"{error.strerror} in {home}: give another --run-id; where a job may be started again, with the number "
            "of its attempt"
        ) from None
    except ValueError as error:
        raise TidegaugeError(str(error)) from None
    except OSError as error:
        _say(
            f"cannot write in {home} ({error.strerror or error}): the command runs without Tidegauge. "
            f"Give --home or {HOME_VARIABLE} a directory that can be written"
        )
        return None


def _not_started(program: str, error: OSError, run: Run | None) -> RunOutcome:
    missing = isinstance(error, FileNotFoundError) and shutil.which(program) is None
    exit_status = EXIT_NOT_FOUND if missing else EXIT_NOT_EXECUTABLE
    _say(f"{program}: command not found" if missing else f"{program}: cannot be executed ({error.strerror})")
    if run is not None:  # nothing ran: a typo must not become the latest run
        shutil.rmtree(run.path, ignore_errors=True)
    return RunOutcome(run=None, exit_status=exit_status)


def _follow_child(
    run: Run,
    child: subprocess.Popen[bytes],
    interval_seconds: float,
    on_ready: Callable[[Run], None] | None,
    outlets: Outlets | None,
) -> bool:
    """Collect until the child has ended and the run is closed; whatever fails, the child is waited for.

    Returns:
        Whether all is stored.

    """
    try:
        command = ProcessKey(child.pid, start_ticks(child.pid))
        if outlets is not None:
            outlets.begin(run)
        agent = Agent(run, command=command, is_parent=True, outlets=outlets)
        with suppress(OSError, ValueError):
            update_manifest(run, collector=manifest_process(agent.key), command=manifest_process(command))
        if on_ready is not None:
            on_ready(run)
        with _end_of(child) as ended:
            follow(agent, _saying_once(agent, ended), interval_seconds=interval_seconds)
        exit_status = child.wait()
        with suppress(OSError, ValueError):
            update_manifest(run, end_time_ns=time.monotonic_ns(), exit_status=exit_status)
        agent.command_ended(exit_status)
        if agent.finish():
            return True
        why = agent.why or "the store does not answer"
        _say(f"{why}; records wait here: `tidegauge collect {run.run_id}` stores them once it can")
    except Exception as error:  # noqa: BLE001 - fail open: the command goes on unfollowed
        _say(f"the collector stopped ({type(error).__name__}: {error}): the command goes on, its journals too")
        child.wait()
    return False


def _saying_once(agent: Agent, ended: Callable[[float], bool]) -> Callable[[float], bool]:
    """The same function, which on its way tells of the first time that the store takes no records."""
    reasons: list[str] = []

    def wait(seconds: float) -> bool:
        if agent.why and not reasons:
            reasons.append(agent.why)
            _say(f"{agent.why}; the training goes on, and its records wait here until it can")
        return ended(seconds)

    return wait


@contextmanager
def _end_of(child: subprocess.Popen[bytes]) -> Iterator[Callable[[float], bool]]:
    """A function that waits up to so many seconds, but no longer than the child lives: has it ended?"""

    def wait(seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        return child.poll() is not None

    def wait_for_descriptor(seconds: float) -> bool:
        poller.poll(seconds * 1000)
        return child.poll() is not None

    try:
        descriptor = os.pidfd_open(child.pid)
    except OSError:  # a kernel before 5.3, or a sandbox
        yield wait
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    try:
        yield wait_for_descriptor
    finally:
        os.close(descriptor)


class _Signals:
    """Ctrl-C is the command's affair; the signals of `_FORWARDED` are handed on to it.

    Handlers, not SIG_IGN: a handler is reset when the command starts, an ignored signal would stay
    ignored in it. What this process was told to ignore (nohup) stays ignored in both.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._pending: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (*_FORWARDED, *_FROM_TERMINAL):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handler = self._hand_on if number in _FORWARDED else _leave_to_the_command
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_on_to(self, child: subprocess.Popen[bytes]) -> None:
        """From now on signals go to this child, those that came too early first."""
        self._child = child
        for number in self._pending:
            child.send_signal(number)

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        if self._child is None:
            self._pending.append(number)
        else:
            self._child.send_signal(number)


def _leave_to_the_command(_number: int, _frame: FrameType | None) -> None:
    pass


def _exit_code(status: int) -> int:
    return EXIT_SIGNAL_BASE - status if status < 0 else status


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"tidegauge: {text}\n")
        sys.stderr.flush()
