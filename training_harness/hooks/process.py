"""The process that the hooks are in: a worker or a training process, and the events at its start and exit."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import traceback
from typing import Any

from training_harness import session
from training_harness.hooks.accelerators import built_for
from training_harness.hooks.stages import stages
from training_harness.redaction import redact

WORKER_MODULE = "torch.utils.data._utils.worker"
#: Method of multiprocessing's `BaseProcess` that runs a child.
_RUNS_CHILD = "_bootstrap"
_printed_error: BaseException | None = None


def announce(current: session.Session, capabilities: dict[str, bool]) -> None:
    """Record once that this process trains, and arrange for the farewell, which a kill prevents."""
    if current.process_started:
        return
    current.process_started = True
    _find_rank(current)
    current.events.append(
        "process-start",
        argv=redact(sys.orig_argv),
        python=sys.version.split()[0],
        torch=session.torch_version(),
        accelerator=built_for(sys.modules.get("torch")),
        local_rank=current.identity.local_rank,
        world_size=current.identity.world_size,
        attempt=current.identity.attempt,
        parent_pid=os.getppid(),
        capabilities=capabilities,
    )
    if multiprocessing.parent_process() is None:
        atexit.register(farewell, current)
    else:  # a child of multiprocessing leaves through os._exit, after its finalizers
        multiprocessing.util.Finalize(None, _farewell_of_child, (current,), exitpriority=0)
        if sys.version_info >= (3, 13):
            _keep_printed_error()


def _find_rank(current: session.Session) -> None:
    """Take the rank from torch's process group where the launcher did not put it into the environment."""
    distributed = sys.modules.get("torch.distributed")
    if current.identity.rank is None and distributed is not None:
        try:
            if distributed.is_available() and distributed.is_initialized():
                current.become_rank(distributed.get_rank(), distributed.get_world_size())
        except Exception:
            pass


def error_of_child() -> BaseException | None:
    """Return the exception that ends this child of multiprocessing, which prints it without calling sys.excepthook.

    The finalizers run while it is handled; from Python 3.13 on they run later (multiprocessing/process.py). A
    forked child also inherits an exception that its parent handles.
    """
    error = _printed_error if _printed_error is not None else sys.exc_info()[1]
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and trace.tb_frame.f_code.co_name == _RUNS_CHILD else None


def _keep_printed_error() -> None:
    """Keep the exception that multiprocessing prints in this child until its finalizers run."""
    original = traceback.print_exc

    def print_exc(*args: Any, **options: Any) -> None:
        global _printed_error
        if sys._getframe(1).f_code.co_name == _RUNS_CHILD:
            _printed_error = sys.exc_info()[1]
        original(*args, **options)

    traceback.print_exc = print_exc


def _farewell_of_child(begun: session.Session) -> None:
    global _printed_error
    try:
        error = error_of_child()
        if error is not None and session.active is begun:
            session.record_exception(type(error), error, error.__traceback__)
    except Exception:
        pass
    farewell(begun)
    _printed_error = None  # it holds the frames of the script


def farewell(begun: session.Session | None, *, detached: bool = False) -> None:
    """Record that this process leaves the run normally: at its exit, or when it detaches and goes on."""
    current = session.active
    if current is None or current is not begun:  # a forked child that runs its parent's exit handlers
        return
    if not (current.process_started or detached):  # that a process detached ends the run, trained or not
        return
    try:
        current.before_farewell()
        stages.flush()
        current.close()
        current.events.append("process-exit", lost_count=current.lost_count, detached=detached)
    except Exception:
        pass


def is_worker() -> bool:
    """Return whether this process is a DataLoader worker: its modules are part of a fetch."""
    worker = sys.modules.get(WORKER_MODULE)
    return worker is not None and worker.get_worker_info() is not None
