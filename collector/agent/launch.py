"""Start the command of `tidegauge run`; it is a direct child, and the shim installs its hooks.

The command begins before the modules that follow it are imported: it waits for nothing of the collector's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from collector.agent.problems import say
from collector.errors import TidegaugeError
from collector.store import Run
from training_harness import layout, ptracer

if TYPE_CHECKING:
    from collector.agent.live.outlets import Outlets

DEFAULT_INTERVAL_SECONDS = 1.0
INTERVAL_BOUNDS_SECONDS = (0.05, 60.0)
#: Exit statuses of a shell.
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128

#: Signals passed on to the command, such as those with which batch systems announce a time limit.
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
    """The end of a command.

    Attributes:
        run: None if the command ran without Tidegauge (disabled, or the home cannot be written), or not at all.
        exit_status: the exit code to pass on: the command's own, or 128+n after signal n.
        is_stored: False if the store on the network did not take all records, so it cannot be queried either.
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
    outlets: Outlets | None = None,
) -> RunOutcome:
    """Run a command under Tidegauge and follow it to its end.

    Args:
        argv: the command and its arguments.
        home: Tidegauge home; created if missing.
        name: name of the run; by default that of the script or program.
        tags: recorded in the manifest.
        interval_seconds: time between two samples.
        outlets: live metrics, alerts and investigations of the run.

    Returns:
        The run and the exit code to pass on; 126 or 127 if the command cannot be started.

    Raises:
        TidegaugeError: the interval is out of bounds, or a run has the given id already.
    """
    check_interval(interval_seconds)
    run = None
    if os.environ.get(layout.DISABLED_VARIABLE) != "1":
        run = _create_run(argv, home=home, name=name or default_name(argv), tags=tags or {})
    environ = child_environment(os.environ, run.path, home) if run else dict(os.environ)
    with _SignalForwarder() as signals:
        try:
            # Descriptors are inherited as from a shell; Python's own are close-on-exec.
            child = subprocess.Popen(list(argv), env=environ, close_fds=False)
        except OSError as error:
            return _fail_to_start(argv[0], error, run)
        signals.forward_to(child)
        is_stored = True
        if run is None:
            child.wait()
        else:
            is_stored = _follow(run, child, interval_seconds, outlets) or not run.awaits_store
    status = child.wait()
    exit_status = EXIT_SIGNAL_BASE - status if status < 0 else status
    return RunOutcome(run=run, exit_status=exit_status, is_stored=is_stored)


def check_interval(seconds: float) -> None:
    """Check the interval between two samples.

    Raises:
        TidegaugeError: it is out of bounds.
    """
    low, high = INTERVAL_BOUNDS_SECONDS
    if not low <= seconds <= high:
        raise TidegaugeError(f"the interval {seconds:g} s is not between {low:g} and {high:g} s")


def default_name(argv: Sequence[str]) -> str:
    """Return the default name of a run: its script or module, else its program."""
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
    """Return the environment of the command: it names run and collector, and `PYTHONPATH` begins with the shim.

    The user's own search path stays as it is, since an empty part of it means the current directory.
    """
    shim = str(Path(layout.__file__).parent / "bootstrap")
    user_path, visible = environ.get("PYTHONPATH", ""), layout.visible_devices(environ)
    rest = [part for part in user_path.split(os.pathsep) if part != shim] if user_path else []
    inherited = {
        name: value for name, value in environ.items() if name != layout.RUN_ID_VARIABLE
    }  # This run uses it.
    return inherited | {
        layout.RUN_DIR_VARIABLE: str(run_dir.absolute()),
        layout.HOME_VARIABLE: str(home.absolute()),
        ptracer.COLLECTOR_VARIABLE: ptracer.process_name(os.getpid()),
        layout.RUN_DEVICES_VARIABLE: layout.ALL_DEVICES if visible is None else visible,
        "PYTHONPATH": os.pathsep.join([shim, *rest]),
    }


def _create_run(argv: Sequence[str], *, home: Path, name: str, tags: Mapping[str, str]) -> Run | None:
    try:
        return Run(layout.create_run(home, name=name, argv=argv, tags=tags))
    except FileExistsError as error:
        raise TidegaugeError(
            f"{error.strerror} in {home}: give another --run-id; if the job can restart, add the number of its "
            "attempt"
        ) from None
    except ValueError as error:
        raise TidegaugeError(str(error)) from None
    except OSError as error:
        say(
            f"cannot write in {home} ({error.strerror or error}): the command runs without Tidegauge. "
            f"Give --home or {layout.HOME_VARIABLE} a directory that can be written"
        )
        return None


def _fail_to_start(program: str, error: OSError, run: Run | None) -> RunOutcome:
    missing = isinstance(error, FileNotFoundError) and shutil.which(program) is None
    exit_status = EXIT_NOT_FOUND if missing else EXIT_NOT_EXECUTABLE
    say(f"{program}: command not found" if missing else f"{program}: cannot be executed ({error.strerror})")
    if run is not None:  # Nothing ran: a typo must not become the latest run.
        shutil.rmtree(run.path, ignore_errors=True)
    return RunOutcome(run=None, exit_status=exit_status)


def _follow(run: Run, child: subprocess.Popen[bytes], interval_seconds: float, outlets: Outlets | None) -> bool:
    """Follow the child to its end and return whether all records are stored; wait for it if the collector fails."""
    try:
        # Imported here: the command begins meanwhile.
        from collector.agent.child import follow_child

        return follow_child(run, child, interval_seconds, outlets)
    except Exception as error:  # noqa: BLE001 - fail open: the command goes on unfollowed
        say(f"the collector stopped ({type(error).__name__}: {error}): the command and its journals go on")
        child.wait()
    return False


class _SignalForwarder:
    """The forwarder of signals: those of `_FORWARDED` go on to the command; Ctrl-C is left to it.

    It installs handlers, not SIG_IGN: a handler is reset when the command starts, an ignored signal would stay
    ignored there. A signal that this process ignores already (nohup) stays ignored in both.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._pending: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalForwarder:
        for number in (*_FORWARDED, *_FROM_TERMINAL):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handler = self._forward if number in _FORWARDED else (lambda *_: None)
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, child: subprocess.Popen[bytes]) -> None:
        """Send the signals that came so far to this child, and later ones as they come."""
        self._child = child
        for number in self._pending:
            child.send_signal(number)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._child is None:
            self._pending.append(number)
        else:
            self._child.send_signal(number)
