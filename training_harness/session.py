"""Who this process is, and its journals: one session per process, remade after a fork.

The run directory comes from `TIDEGAUGE_RUN_DIR`, which every child inherits; so a spawned worker, a
rank started by torchrun and a forked child all find the same run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.layout import DISABLED_VARIABLE, RUN_DIR_VARIABLE
from training_harness.records import STREAMS

_TRACEBACK_CHARACTERS = 4000
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
        self.identity = Identity.of_this_process()
        self.events = EventLog(run_dir / "events", self.identity)
        journal = run_dir / "journal"
        self.writers = {
            name: JournalWriter(journal, stream, self.identity, events=self.events, hold_ns=HOLD_NS)
            for name, stream in STREAMS.items()
        }
        self.step = self.writers["step"].hold
        self.device_time = self.writers["device_time"].append
        self.device_memory = self.writers["device_memory"].append_all
        self.batch = self.writers["batch"].hold
        self.fetch = self.writers["fetch"].append
        self.stage = self.writers["stage"].append_all
        self.process_started = False
        #: Turns what the training loop has logged into records, once there is one.
        self.before_flush: Callable[[], None] = _nothing
        #: Says what is known of the workers by the end of the process, once there is a loader.
        self.before_farewell: Callable[[], None] = _nothing

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
        traceback=text[-_TRACEBACK_CHARACTERS:],
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
