"""Who this process is, and its journals: one session per process, remade after a fork.

The run directory comes from `TIDEGAUGE_RUN_DIR`, which every child inherits; so a spawned worker, a
rank started by torchrun and a forked child all find the same run.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.layout import DISABLED_VARIABLE, RUN_DIR_VARIABLE, redacted
from training_harness.records import STREAMS

_TRACEBACK_CHARACTERS = 4000
#: Folders of what is installed, and of this package.
_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)
_MESSAGE_CHARACTERS = 2000
#: Records of one stream that come closer together than this are written together: a loop of shorter steps does
#: not pay for a `write(2)` in each, and a kill costs it no more than the records of this span.
HOLD_NS = 5_000_000


class Session:
    """This process's identity in a run, its event log and one writer per stream.

    Files are opened when the first record or event is written, so a process that has nothing to say
    leaves no trace.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.is_attached_said = False
        self._write_as(Identity.of_this_process())
        self.process_started = False
        #: Turns what the training loop has logged into records, once there is one.
        self.before_flush: Callable[[], None] = _nothing
        #: Says what is known of the workers by the end of the process, once there is a loader.
        self.before_farewell: Callable[[], None] = _nothing

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
        self.batch = self.writers["batch"].hold
        self.fetch = self.writers["fetch"].append
        self.stage = self.writers["stage"].append_all

    def become_rank(self, rank: int, world_size: int) -> None:
        """Write as this rank from now on; what was held so far is written as before."""
        global group
        group = rank, world_size
        before = self.writers
        for writer in before.values():
            writer.close()
        self._write_as(dataclasses.replace(self.identity, rank=rank, world_size=world_size))
        for name, writer in before.items():
            self.writers[name].lost_count = writer.lost_count

    def say_attached(self) -> None:
        """Say once that the hooks are in this process, whether or not it will train."""
        if not self.is_attached_said:
            self.is_attached_said = True
            self.events.append("process-attached", argv=redacted(sys.orig_argv), parent_pid=os.getppid())

    @property
    def lost_count(self) -> int:
        """Records of this process that could not be written."""
        return sum(writer.lost_count for writer in self.writers.values())

    def flush(self) -> None:
        """Write what is logged or held."""
        self.before_flush()
        for writer in self.writers.values():
            writer.flush()

    def close(self) -> None:
        """Write what is logged or held, close the journals and tell of losses; who is used again opens another."""
        self.before_flush()
        for writer in self.writers.values():
            writer.close()


def _nothing() -> None:
    """No training loop or loader was met in this process."""


#: Rank and world size of the process group that this process, or the one that forked it, was found in.
group: tuple[int, int] | None = None
#: The session of this process; None when Tidegauge is off or the run directory is gone.
active: Session | None = None


def start(run_dir: Path | None = None) -> Session | None:
    """Begin, or return, this process's session; None when disabled or without a run directory."""
    global active
    if active is None and os.environ.get(DISABLED_VARIABLE) != "1":
        named = run_dir or os.environ.get(RUN_DIR_VARIABLE)
        if named:
            active = Session(Path(named))
    return active


def stop() -> None:
    """End the session: journals are closed, nothing more is written."""
    global active
    if active is not None:
        ended, active = active, None
        ended.close()


def record_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an exception that nobody caught as an event."""
    session = start()
    if session is None or kind is SystemExit:
        return
    text = "".join(traceback.format_exception(kind, error, trace))
    session.events.append(
        "exception",
        type=kind.__name__,
        message=str(error)[:_MESSAGE_CHARACTERS],
        site=_site(trace),
        traceback=text[-_TRACEBACK_CHARACTERS:],
    )


def _site(trace: TracebackType | None) -> str | None:
    """Return `file:line, in function` of the innermost frame in the user's own code, else of the innermost one."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
    own = [(code, line) for code, line in frames if is_own(code.co_filename)]
    for code, line in (own or frames)[-1:]:
        return f"{code.co_filename}:{line}, in {code.co_name}"
    return None


def is_own(path: str) -> bool:
    """Return whether a source file is the user's: neither installed, nor of the standard library, nor generated."""
    return not path.startswith((*_INSTALLED, "<")) and not any(
        f"{os.sep}{name}{os.sep}" in path for name in ("site-packages", "dist-packages")
    )


def _remake_after_fork() -> None:
    """A forked child is another process: it must not write as its parent."""
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
    """The version of torch if this process has imported it; never imports it."""
    torch = sys.modules.get("torch")
    return str(torch.__version__) if torch is not None and hasattr(torch, "__version__") else None
