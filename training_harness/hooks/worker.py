"""Hooks in a DataLoader worker: one `fetch` record per batch, a hello and a farewell.

The worker loop is replaced in the training process by a `WorkerEntry`, a plain importable object:
a wrapped function would be pickled by its name and silently lose every spawned worker. In the
worker, the loop gets proxies for its two queues and its collate function; what passes through them
is untouched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from training_harness import session
from training_harness.hooks import stage_calls, stages
from training_harness.hooks.meter import FetchMeter, samples_in
from training_harness.hooks.patching import Hook
from training_harness.hooks.requests import Requests
from training_harness.records import MISSING_INT32, MISSING_INT64

WORKER_MODULE = "torch.utils.data._utils.worker"
_NEEDED = ("index_queue", "data_queue", "auto_collation", "collate_fn", "worker_id", "done_event")
_END_OF_STREAM = "_IterableDatasetStopIteration"
_NEXT_EPOCH = "_ResumeIteration"


class _Starting(threading.local):
    """Which loader and epoch the thread is creating an iterator for; inherited by a forked worker."""

    loader = MISSING_INT32
    epoch = MISSING_INT32


starting = _Starting()


class WorkerEntry:
    """Stands for the worker loop as the target of a worker process, under every start method."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original, updated=())
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a forked worker, which inherited `starting` from the thread that forked it."""
        return run_worker(self.original, starting.loader, starting.epoch, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SpawnedEntry, (self.original.__module__, starting.loader, starting.epoch, session.group)


class _SpawnedEntry:
    """A `WorkerEntry` in a spawned worker: it carries its loader, its epoch and the rank of the training along."""

    def __init__(self, module: str, loader: int, epoch: int, group: tuple[int, int] | None) -> None:
        self.module = module
        self.loader = loader
        self.epoch = epoch
        self.group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loop = importlib.import_module(self.module)._worker_loop
        original = loop.original if isinstance(loop, WorkerEntry) else loop
        try:
            session.start()
            session.group = self.group
            stage_calls.install_imported()
        except Exception as error:
            Hook("worker").fail(error)
        return run_worker(original, self.loader, self.epoch, args, kwargs)


def run_worker(
    original: Callable[..., Any], loader: int, epoch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the worker loop with recording queues; without them where anything is not as expected."""
    hook = Hook("fetch")
    recorder = None
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
        current = session.active
        if current is not None and current.identity.rank is None and session.group is not None:
            current.become_rank(*session.group)
        if current is not None and all(name in bound.arguments for name in _NEEDED):
            recorder = FetchRecorder(hook, current, loader, epoch, int(bound.arguments["worker_id"]))
            bound.arguments["index_queue"] = _IndexQueue(bound.arguments["index_queue"], recorder)
            bound.arguments["data_queue"] = _DataQueue(bound.arguments["data_queue"], recorder)
            bound.arguments["collate_fn"] = recorder.timed_collate(
                bound.arguments["collate_fn"], batched=bound.arguments["auto_collation"]
            )
            args, kwargs = bound.args, bound.kwargs
    except Exception as error:
        hook.fail(error)
    reason = "done"
    try:
        return original(*args, **kwargs)
    except BaseException as error:
        reason = type(error).__name__
        raise
    finally:
        if recorder is not None:
            recorder.farewell(reason)


class FetchRecorder:
    """Turns the passing of an index in and a batch out into one `fetch` record."""

    def __init__(self, hook: Hook, current: session.Session, loader: int, epoch: int, worker: int) -> None:
        self._hook = hook
        self._session = current
        self._loader = loader
        self._epoch = epoch
        self._worker = worker
        self._requests = Requests({"role": "worker", "loader": loader, "worker": worker}, unit="batches")
        self._parent_pid = os.getppid()
        self._meter = FetchMeter()
        self._started_ns = self._idle_since_ns = time.monotonic_ns()
        self._idle_ns = MISSING_INT64
        self._index = MISSING_INT64
        self._collate_ns = 0
        self._samples = MISSING_INT32
        current.events.append(
            "worker-start", loader=loader, epoch=epoch, worker=worker, parent_pid=self._parent_pid
        )

    def timed_collate(self, collate: Callable[..., Any], *, batched: bool) -> Callable[..., Any]:
        """`collate` with its time noted, and its number of samples if it is given a batch of them."""

        @functools.wraps(collate, updated=())
        def timed(samples: Any, *args: Any, **kwargs: Any) -> Any:
            begun_ns = time.monotonic_ns()
            batch = collate(samples, *args, **kwargs)
            self._collate_ns += time.monotonic_ns() - begun_ns
            if batched:
                try:
                    self._samples = samples_in(samples)
                except Exception as error:
                    self._hook.fail(error)
            return batch

        return timed

    def ready(self) -> None:
        """The worker looks for its first index: `worker_init_fn` has run, an iterable dataset has its iterator."""
        try:
            self._idle_since_ns = time.monotonic_ns()
            self._session.events.append(
                "worker-ready",
                loader=self._loader,
                epoch=self._epoch,
                worker=self._worker,
                setup_ns=self._idle_since_ns - self._started_ns,
            )
        except Exception as error:
            self._hook.fail(error)

    def idle(self) -> None:
        """Nothing to do: write what is held, which nobody may see for long otherwise."""
        try:
            self._session.flush()
        except Exception as error:
            self._hook.fail(error)

    def received(self, message: Any) -> None:
        """A message left the index queue: an index, the start of a new epoch, or the end.

        torchdata also sends an `_AckStartup`, which is none of these.
        """
        if not self._hook.active:
            return
        try:
            if type(message) is tuple:
                self._index = message[0]
                self._samples = MISSING_INT32
                self._collate_ns = 0
                self._idle_ns = time.monotonic_ns() - self._idle_since_ns
                self._meter.begin()
            elif type(message).__name__ == _NEXT_EPOCH:  # to a persistent worker
                self._epoch += 1
                self._idle_since_ns = time.monotonic_ns()
        except Exception as error:
            self._hook.fail(error)

    def sending(self, message: Any) -> None:
        """A batch is about to enter the result queue."""
        if not self._hook.active or self._index == MISSING_INT64:
            return
        try:
            if message[0] != self._index:
                return
            data = message[1]
            if type(data) is tuple and data:  # torchdata's (data, worker, state); a batch may be a tuple too
                data = data[0]
            if type(data).__name__ == _END_OF_STREAM:
                return
            wall_ns, *spent = self._meter.end()
            now_ns = time.monotonic_ns()
            stages.fetched(now_ns, self._loader, self._epoch, self._index, self._worker)
            self._session.fetch(
                now_ns,
                self._loader,
                self._epoch,
                self._index,
                self._worker,
                self._idle_ns,
                wall_ns - self._collate_ns,
                self._collate_ns,
                *spent,
                self._samples,
            )
            if now_ns >= self._requests.due_ns:
                now_ns = self._requests.serve(self._session, self._index)
            self._index = MISSING_INT64
            self._idle_since_ns = now_ns
        except Exception as error:
            self._hook.fail(error)

    def farewell(self, reason: str) -> None:
        """Say that the worker loop returned: what ends without this was killed."""
        try:
            self._requests.close()
            if reason == "done" and os.getppid() != self._parent_pid:
                reason = "parent-gone"
            self._session.close()
            self._session.events.append(
                "worker-exit",
                loader=self._loader,
                worker=self._worker,
                reason=reason,
                lost_count=self._session.lost_count,
            )
        except Exception as error:
            self._hook.fail(error)


class _IndexQueue:
    """The worker's index queue, seen through: `get` is timed, everything else is the queue's own."""

    def __init__(self, queue: Any, recorder: FetchRecorder) -> None:
        self._queue = queue
        self._recorder = recorder
        self._is_fresh = True

    def get(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_fresh:
            self._is_fresh = False
            self._recorder.ready()
        try:
            message = self._queue.get(*args, **kwargs)
        except queue.Empty:  # after some seconds without work the loop looks whether the training lives
            self._recorder.idle()
            raise
        self._recorder.received(message)
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _DataQueue:
    """The worker's result queue, seen through: the record is made before the batch enters."""

    def __init__(self, queue: Any, recorder: FetchRecorder) -> None:
        self._queue = queue
        self._sending = recorder.sending

    def put(self, message: Any, *args: Any, **kwargs: Any) -> Any:
        self._sending(message)
        return self._queue.put(message, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def is_worker() -> bool:
    """Return whether this process is a DataLoader worker: its modules are part of a fetch."""
    worker = sys.modules.get(WORKER_MODULE)
    return worker is not None and worker.get_worker_info() is not None


def install() -> Hook:
    """Replace the worker loop of torch's DataLoader.

    Raises:
        AttributeError: this torch has no such function.
    """
    hook = Hook("worker")
    hook.replace(sys.modules[WORKER_MODULE], "_worker_loop", WorkerEntry)
    return hook
