"""Hooks in a DataLoader worker: one `fetch` record per batch, and events at its start and exit.

The worker loop is replaced in the training process by a `WorkerEntry`, a plain importable object:
a wrapped function would be pickled by its name and silently lose every spawned worker. In the
worker, the loop gets proxies for its two queues and its collate function; they pass everything on
unchanged.
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

from training_harness import ptracer, session
from training_harness.hooks.heap import EVERY_NS, HeapGauge
from training_harness.hooks.loading.fetch_meter import FetchMeter, samples_in
from training_harness.hooks.on_request.requests import Requests
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import WORKER_MODULE
from training_harness.hooks.stages import stage_calls, stages
from training_harness.records import MISSING_INT32, MISSING_INT64

_REQUIRED_ARGUMENTS = ("index_queue", "data_queue", "auto_collation", "collate_fn", "worker_id", "done_event")
_END_OF_STREAM = "_IterableDatasetStopIteration"
_NEXT_EPOCH = "_ResumeIteration"


class _Creation(threading.local):
    """Loader and epoch for which this thread is creating an iterator; a forked worker inherits them."""

    loader = MISSING_INT32
    epoch = MISSING_INT32


creation = _Creation()


class WorkerEntry:
    """Replacement for the worker loop as the target of a worker process, under every start method."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original, updated=())
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop in a forked worker, which inherited `creation` from the thread that forked it."""
        return run_worker(self.original, creation.loader, creation.epoch, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SpawnedEntry, (self.original.__module__, creation.loader, creation.epoch, session.group)


class _SpawnedEntry:
    """A `WorkerEntry` in a spawned worker: it carries its loader, its epoch and the rank of the training."""

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
    """Run the worker loop with recording queues, or without them if anything is not as expected."""
    hook = Hook("fetch")
    recorder = None
    ptracer.allow_collector()  # a forked process has not inherited it
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
        current = session.active
        if current is not None and current.identity.rank is None and session.group is not None:
            current.become_rank(*session.group)
        if current is not None and all(name in bound.arguments for name in _REQUIRED_ARGUMENTS):
            recorder = FetchRecorder(hook, current, loader, epoch, int(bound.arguments["worker_id"]))
            bound.arguments["index_queue"] = _IndexQueue(bound.arguments["index_queue"], recorder, hook, current)
            bound.arguments["data_queue"] = _DataQueue(bound.arguments["data_queue"], recorder)
            bound.arguments["collate_fn"] = recorder.time_collate(
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
    """Recorder that makes one `fetch` record of an index that comes in and the batch that goes out."""

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
        self._heap = HeapGauge(first_ns=self._started_ns + EVERY_NS)
        self._heap_hook = Hook("heap")
        self._idle_ns = MISSING_INT64
        self._index = MISSING_INT64
        self._collate_ns = 0
        self._samples = MISSING_INT32
        current.events.append(
            "worker-start", loader=loader, epoch=epoch, worker=worker, parent_pid=self._parent_pid
        )

    def time_collate(self, collate: Callable[..., Any], *, batched: bool) -> Callable[..., Any]:
        """Wrap `collate` to note its time, and the number of samples if it gets a batch of them."""

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

    def on_ready(self) -> None:
        """Record that the worker is ready: `worker_init_fn` has run, and an iterable dataset has its iterator."""
        self._idle_since_ns = time.monotonic_ns()
        self._session.events.append(
            "worker-ready",
            loader=self._loader,
            epoch=self._epoch,
            worker=self._worker,
            setup_ns=self._idle_since_ns - self._started_ns,
        )

    def on_message(self, message: Any) -> None:
        """Handle a message from the index queue: an index, the start of a new epoch, or the end.

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

    def on_result(self, message: Any) -> None:
        """Record a batch that is about to enter the result queue."""
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
            stages.write_fetch_stages(now_ns, self._loader, self._epoch, self._index, self._worker)
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
            if now_ns >= self._heap.due_ns:
                self._heap_hook.attempt(self._heap.record, self._session)
                now_ns = time.monotonic_ns()
            if now_ns >= self._requests.due_ns:
                now_ns = self._requests.serve(self._session, self._index)
            self._index = MISSING_INT64
            self._idle_since_ns = now_ns
        except Exception as error:
            self._hook.fail(error)

    def farewell(self, reason: str) -> None:
        """Record that the worker loop returned: a worker without this event was killed."""
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
    """Proxy of the worker's index queue that reports each message from `get`."""

    def __init__(self, queue: Any, recorder: FetchRecorder, hook: Hook, current: session.Session) -> None:
        self._queue = queue
        self._recorder = recorder
        self._hook = hook
        self._flush = current.flush
        self._is_first_get = True

    def get(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first_get:
            self._is_first_get = False
            self._hook.attempt(self._recorder.on_ready)
        try:
            message = self._queue.get(*args, **kwargs)
        except queue.Empty:  # after some seconds without work the loop checks whether the training lives
            self._hook.attempt(self._flush)  # the records on hold could otherwise stay unwritten for long
            raise
        self._recorder.on_message(message)
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _DataQueue:
    """Proxy of the worker's result queue that records each batch before it enters."""

    def __init__(self, queue: Any, recorder: FetchRecorder) -> None:
        self._queue = queue
        self._on_result = recorder.on_result

    def put(self, message: Any, *args: Any, **kwargs: Any) -> Any:
        self._on_result(message)
        return self._queue.put(message, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def install() -> Hook:
    """Replace the worker loop of torch's DataLoader."""
    hook = Hook("worker")
    hook.replace(sys.modules[WORKER_MODULE], "_worker_loop", WorkerEntry)
    return hook
