"""Session of this process: its identity and its journals, remade after a fork.

The run directory comes from `TIDEGAUGE_RUN_DIR`, which every child inherits; so a spawned worker, a
rank started by torchrun and a forked child all find the same run.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.layout import DISABLED_VARIABLE, RUN_DIR_VARIABLE
from training_harness.records import STREAMS
from training_harness.redaction import redact, redact_text

_TRACEBACK_CHARACTERS = 4000
#: Folders of installed packages, and of this one.
_INSTALLED_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)
_MESSAGE_CHARACTERS = 2000
#: Span in which the records of one stream are written together, in ns: a loop of shorter steps does not pay for a
#: `write(2)` in each, and a kill loses no more than the records of this span.
HOLD_NS = 5_000_000


class Session:
    """Identity of this process in a run, its event log and one writer per stream.

    Files are opened when the first record or event is written, so a process that records nothing
    leaves no trace.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.has_reported_attach = False
        self._write_as(Identity.of_this_process())
        self.process_started = False
        #: Turns the logged calls of the training loop into records, once there is a loop.
        self.before_flush: Callable[[], None] = lambda: None
        #: Records the deaths of workers at the end of the process, once there is a loader.
        self.before_farewell: Callable[[], None] = lambda: None

    def _write_as(self, identity: Identity) -> None:
        self.identity = identity
        self.events = EventLog(self.run_dir / "events", identity)
        journal = self.run_dir / "journal"
        self.writers = {
            name: JournalWriter(journal, stream, identity, events=self.events, hold_ns=HOLD_NS)
            for name, stream in STREAMS.items()
        }
        self.step = self.writers["step"].hold
        self.device_time = self.writers["device_time"].append
        self.device_memory = self.writers["device_memory"].append_all
        self.heap = self.writers["heap"].append
        self.optimizer = self.writers["optimizer"].append
        self.batch = self.writers["batch"].hold
        self.fetch = self.writers["fetch"].append
        self.stage = self.writers["stage"].append_all

    def become_rank(self, rank: int, world_size: int) -> None:
        """Write as this rank from now on; records on hold are written without it."""
        global group
        group = rank, world_size
        old_writers = self.writers
        for writer in old_writers.values():
            writer.close()
        self._write_as(dataclasses.replace(self.identity, rank=rank, world_size=world_size))
        for name, writer in old_writers.items():
            self.writers[name].lost_count = writer.lost_count

    def report_attach(self) -> None:
        """Record once that the hooks are in this process, whether or not it will train."""
        if not self.has_reported_attach:
            self.has_reported_attach = True
            _, limit = resource.getrlimit(resource.RLIMIT_CPU)  # there the kernel sends SIGKILL
            self.events.append(
                "process-attached",
                argv=redact(sys.orig_argv),
                parent_pid=os.getppid(),
                cpu_limit_seconds=None if limit == resource.RLIM_INFINITY else limit,
            )

    @property
    def lost_count(self) -> int:
        """Number of this process's records that could not be written."""
        return sum(writer.lost_count for writer in self.writers.values())

    def flush(self) -> None:
        """Write all logged calls and all records on hold."""
        self.before_flush()
        for writer in self.writers.values():
            writer.flush()

    def close(self) -> None:
        """Write all logged calls and all records on hold, close the journals and report losses."""
        self.before_flush()
        for writer in self.writers.values():
            writer.close()


#: Rank and world size in torch's process group, of this process or of the one that forked it.
group: tuple[int, int] | None = None
#: Session of this process; None when Tidegauge is off or the run directory is gone.
active: Session | None = None


def start(run_dir: Path | None = None) -> Session | None:
    """Begin, or return, this process's session; None when disabled or without a run directory."""
    global active
    if active is None and os.environ.get(DISABLED_VARIABLE) != "1":
        path = run_dir or os.environ.get(RUN_DIR_VARIABLE)
        if path:
            active = Session(Path(path))
    return active


def stop() -> None:
    """End the session: close the journals and write nothing more."""
    global active
    if active is not None:
        current, active = active, None
        current.close()


def record_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an uncaught exception as an event."""
    session = start()
    if session is None or kind is SystemExit:
        return
    try:
        session.events.append("exception", **_described(kind, error, trace))
    except Exception:  # torch's handler of SIGCHLD raises anywhere, once, when a worker was killed
        session.events.append("exception", **_described(kind, error, trace))


def record_thread_exception(args: threading.ExceptHookArgs) -> None:
    """Write the exception that ended a thread as an event."""
    session = start()
    if session is not None and args.exc_type is not SystemExit and args.exc_value is not None:
        name = args.thread.name if args.thread is not None else None
        described = _described(args.exc_type, args.exc_value, args.exc_traceback)
        session.events.append("thread-exception", thread=name, **described)


def record_exit_message(message: object, caller: FrameType) -> None:
    """Write the message, or the exit status other than 0, with which the main thread asks to exit as an event."""
    session = start()
    if session is not None and threading.current_thread() is threading.main_thread():
        site = line_of(caller.f_code, caller.f_lineno)
        # A message is printed, and a number is the exit status.
        status = message & 0xFF if isinstance(message, int) else None
        text = str(message) if status is None else f"exit status {status}"
        error = sys.exc_info()[1]
        handled = None
        if error is not None and not isinstance(error, SystemExit):
            handled = _without_middle(f"{type(error).__name__}: {message_of(error)}")
        fields = {"message": _without_middle(text), "status": status, "site": site, "handled": handled}
        session.events.append("exit-message", **fields)


def _described(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> dict[str, str | None]:
    text = "".join(traceback.format_exception(kind, error, trace))
    message, first = message_of(error), error
    while isinstance(first, BaseExceptionGroup):  # as of asyncio.TaskGroup, whose own message has no cause
        first = first.exceptions[0]
    if first is not error:
        message = f"{message}, first {type(first).__name__}: {message_of(first)}"
        trace = first.__traceback__ or trace
    return {
        "type": kind.__name__,
        "message": _without_middle(message),
        "site": site_of(trace),
        "traceback": text[-_TRACEBACK_CHARACTERS:],
    }


def message_of(error: BaseException) -> str:
    """Return the message of an error, or what `traceback` prints in its place if its `str()` raises."""
    for _ in range(2):  # torch's handler of SIGCHLD raises anywhere, once, when a worker was killed
        with suppress(Exception):
            return str(error)
    return "<exception str() failed>"


def _without_middle(message: str) -> str:
    """Return a message without the middle of a long one: if it quotes a traceback, the error comes last."""
    if len(message) <= _MESSAGE_CHARACTERS:
        return message
    half = _MESSAGE_CHARACTERS // 2
    message = redact_text(message)  # before a secret is cut in two
    _, line_break, last_lines = message[-half:].partition("\n")
    return f"{message[:half]}\n…\n{last_lines}" if line_break else message[:_MESSAGE_CHARACTERS]


def site_of(trace: TracebackType | None) -> str | None:
    """Return `file:line, in function` of the innermost frame in the user's own code, else of the innermost one."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
    user_frames = [(code, line) for code, line in frames if is_user_code(code.co_filename)]
    for code, line in (user_frames or frames)[-1:]:
        return line_of(code, line)
    return None


def line_of(code: CodeType, line: int) -> str:
    """Return `file:line, in function`."""
    return f"{code.co_filename}:{line}, in {code.co_name}"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code, from a frame on outwards; None if there is none."""
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_user_code(path: str) -> bool:
    """Return whether a source file is the user's: neither installed, nor of the standard library, nor generated.

    Cython gives paths in the folder that a package was built in, which do not show that it is installed.
    """
    is_installed = path.startswith((*_INSTALLED_FOLDERS, "<")) or path.endswith((".pyx", ".pxi"))
    return not is_installed and not any(
        f"{os.sep}{name}{os.sep}" in path for name in ("site-packages", "dist-packages")
    )


def _remake_after_fork() -> None:
    """Replace the session in a forked child: it is another process and must not write as its parent."""
    global active
    if active is not None:
        run_dir = active.run_dir
        try:
            for writer in active.writers.values():
                writer.disown()
            active = Session(run_dir)
        except Exception:  # fail open
            active = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remake_after_fork)


def torch_version() -> str | None:
    """Return the version of torch if this process has imported it; never import it."""
    torch = sys.modules.get("torch")
    return str(torch.__version__) if torch is not None and hasattr(torch, "__version__") else None
