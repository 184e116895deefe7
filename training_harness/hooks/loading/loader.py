"""DataLoaders of the training process: one `batch` record per batch.

The worker of a batch is the one that DataLoader itself recorded when it dispatched the index, never
`index mod num_workers`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from training_harness import session
from training_harness.hooks.loading import fetch_meter, worker
from training_harness.hooks.loading.errors import LoaderErrors
from training_harness.hooks.loading.fetch_meter import FetchCosts, FetchMeter
from training_harness.hooks.loading.loader_ids import NO_BATCH, LoaderInfo, LoaderRegistry, is_iterable
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import is_worker
from training_harness.hooks.training.step_phases import Progress
from training_harness.hooks.training.steps import has_optimizer
from training_harness.records import INLINE_WORKER, MISSING_INT32, MISSING_INT64

#: id of a live iterator -> its state. The state is not an attribute of the iterator: reading its `__dict__` makes
#: CPython give it a real one, and then every attribute access of torch's is slower.
states: dict[int, IterState] = {}
_PAYLOAD_DEPTH = 4
_PAYLOAD_LEAVES = 64
#: Costs of a fetch besides its wall time, where it was not metered.
_UNMETERED = FetchCosts(0)[1:]
#: Columns of a batch about its queue, where it has none.
_NO_QUEUE = MISSING_INT64, MISSING_INT32, MISSING_INT32, MISSING_INT32
#: Stand-in for the thread of a batch that becomes part of another batch.
NESTED = -1
#: DataLoader's fields about its queues; an iterator without them costs the columns that are read from there.
_QUEUE_FIELDS = ("_task_info", "_tasks_outstanding", "_rcvd_idx", "_send_idx")
#: Exit statuses that are no early end: while DataLoader stops its workers, and once it has stopped them.
STOPPING, STOPPED = (0,), (0, -signal.SIGTERM)


class IterState:
    """State of one iterator's pass over its loader."""

    iterator: weakref.ref[Any]

    def __init__(self, info: LoaderInfo, loader: Any, begun_ns: int) -> None:
        self.info = info
        self.begun_ns = begun_ns
        self.is_inline = loader.num_workers == 0
        self.has_queue = not self.is_inline
        self.is_probed = self.is_inline
        self.in_order = getattr(loader, "in_order", True)
        #: False for an iterable dataset: only the dataset itself knows the size of its batches.
        self.has_sample_counts = getattr(loader, "batch_sampler", None) is not None and not is_iterable(loader)
        #: Time of the next measurement of a payload. It takes some 5 µs, so a fast loop skips it for most batches.
        self.measure_at_ns = 0
        #: Time of the next metering of a fetch without workers, which takes some 10 µs.
        self.meter_at_ns = 0
        self.dead_workers: set[int] = set()
        self.have_workers_ended = False
        self.free_slots: Callable[[], int] = lambda: 0
        self.slots_count: int | None = None
        self.next_epoch()

    def next_epoch(self) -> None:
        """Begin an epoch: the iterator is new, or a persistent one was reset."""
        self.epoch = self.info.epochs
        self.info.epochs += 1
        self.samples: dict[int, int] = {}
        self.workers: dict[int, int] = {}
        self.popped_index = MISSING_INT64
        self.blocked_ns = 0
        self.yielded_count = 0
        self.has_ended = False

    def is_over(self) -> bool:
        """Return whether nothing iterates any more: `it = iter(DataLoader(...))` keeps the iterator of a pass."""
        iterator = self.iterator()
        try:
            return iterator is None or self.has_ended or self.yielded_count >= len(iterator)
        except Exception:  # a sampler without a length
            return False


class LoaderHook(Hook):
    """Hook on the loaders of this process, and their states."""

    def __init__(self, progress: Progress) -> None:
        super().__init__("batch")
        self.progress = progress
        #: Handled iterator classes, and (class, name) of handled methods and missing queue fields.
        self.patch_keys: set[Any] = set()
        #: Threads that are making a batch themselves.
        self.fetching: set[int] = set()
        #: Says why workers could not make such a batch; asked for the first one of a loader without workers.
        self.check_batch: Callable[[Any], str | None] | None = None
        self._registry: LoaderRegistry | None = None
        self._errors = LoaderErrors()
        #: Loaders whose batches a thread takes ahead of the training.
        self._ahead: set[int] = set()
        self._meters = threading.local()

    def on_iterator(self, iterator: Any, loader: Any, begun_ns: int) -> None:
        """Register an iterator that is being created, and has not started any worker."""
        current = session.start()
        if current is None or is_worker():
            return  # a loader inside a worker's dataset is part of that worker's fetch
        self.progress.announce(current)
        self.progress.follow_batches(has_optimizer=has_optimizer())
        info = self.registry(current).info(loader)
        state = IterState(info, loader, begun_ns)
        state.iterator = weakref.ref(iterator, functools.partial(_forget, id(iterator)))
        info.is_pass_over = state.is_over
        states[id(iterator)] = state
        worker.creation.loader, worker.creation.epoch = info.number, state.epoch

    def registry(self, current: session.Session) -> LoaderRegistry:
        """Return the numbers of the loaders of a session."""
        if self._registry is None or self._registry.session is not current:
            self._registry = LoaderRegistry(current)
            current.before_farewell = self.note_last_events
            self._errors, self._ahead = LoaderErrors(), set()
        return self._registry

    def on_epoch_start(self, iterator: Any, *, first: bool) -> None:
        """Record an epoch: a multi-process iterator has its workers, or a persistent one begins another epoch."""
        state, current = states.get(id(iterator)), session.active
        if state is None or current is None:
            return
        if not first:
            self.progress.announce(current)  # the iterator may be older than this session
            self.progress.follow_batches(has_optimizer=has_optimizer())
            state.next_epoch()
            state.begun_ns = time.monotonic_ns()
        current.events.append(
            "epoch-start",
            loader=state.info.number,
            epoch=state.epoch,
            worker_pids=[process.pid for process in getattr(iterator, "_workers", ())],
            begun_ns=state.begun_ns,
        )

    def on_epoch_ready(self, iterator: Any, begun_ns: int, now_ns: int) -> None:
        """Note that the loop has the iterator of an epoch, whose making started workers and drew indices."""
        thread = threading.get_ident()
        if id(iterator) in states and thread not in self.fetching:
            self.progress.count_wait(begun_ns, now_ns, thread)

    def on_workers_ended(self, iterator: Any, begun_ns: int) -> None:
        """Record how long the end of an iterator's workers took, and which of them had died."""
        state, current = states.get(id(iterator)), session.active
        if state is None or current is None or state.have_workers_ended or self._is_copy(current):
            return
        state.have_workers_ended = True
        self.note_deaths(iterator, STOPPED)
        self.progress.count_wait(begun_ns, time.monotonic_ns(), threading.get_ident())
        current.events.append("workers-ended", loader=state.info.number, epoch=state.epoch, begun_ns=begun_ns)

    def on_yield(
        self,
        state: IterState,
        batch: tuple[int, int, int],
        thread: int,
        times_ns: tuple[int, int],
        queue: tuple[int, int, int, int, int] | None,
        size_bytes: int,
    ) -> None:
        """Hold the record of a batch from a worker on its way to the loop.

        Args:
            state: state of its iterator.
            batch: its loader, epoch and index.
            thread: id of the thread that requested it; `NESTED` if it becomes part of another batch.
            times_ns: times of its request and of its arrival.
            queue: its worker, the time blocked on the result queue, and at its arrival outstanding tasks, all tasks
                and free slots of that queue; None without one.
            size_bytes: bytes of its tensors.
        """
        worker_id, details = MISSING_INT32, _NO_QUEUE
        if queue is not None:
            worker_id, blocked_ns, outstanding, tasks_count, free_count = queue
            ready = MISSING_INT32 if state.slots_count is None else state.slots_count - free_count
            details = blocked_ns, outstanding, tasks_count - outstanding, ready
            if thread != NESTED:
                self.progress.begin_wait(times_ns[0], thread)
        self._hold(
            (*batch, worker_id),
            state.samples.pop(batch[2], MISSING_INT32),
            thread,
            times_ns,
            (*details, size_bytes),
        )

    def on_inline_batch(
        self,
        state: IterState,
        batch: tuple[int, int, int],
        thread: int,
        times_ns: tuple[int, int],
        costs: FetchCosts | None,
        size_bytes: int,
    ) -> None:
        """Hold the `fetch` record, without idle time, and the `batch` record of a batch made in this process.

        The arguments are those of `on_yield`; `costs` are the costs of the fetch where it was metered.
        """
        begun_ns, now_ns = times_ns
        wall_ns, *spent = costs or (now_ns - begun_ns, *_UNMETERED)
        key, samples = (*batch, INLINE_WORKER), state.samples.pop(batch[2], MISSING_INT32)
        if session.active is not None:
            record = begun_ns + wall_ns, *key, MISSING_INT64, wall_ns, MISSING_INT64, *spent, samples
            session.active.writers["fetch"].hold(record)
        self.progress.begin_wait(begun_ns, thread)
        self._hold(key, samples, thread, times_ns, (*_NO_QUEUE, size_bytes))

    def _hold(
        self,
        key: tuple[int, int, int, int],
        samples: int,
        thread: int,
        times_ns: tuple[int, int],
        details: tuple[int, ...],
    ) -> None:
        begun_ns, now_ns = times_ns
        if session.active is not None:
            if thread != NESTED:
                self.progress.on_batch(now_ns, thread, samples)
                if key[0] not in self._ahead and self.progress.is_ahead(thread):
                    self._ahead.add(key[0])
                    session.active.events.append("loads-ahead", loader=key[0])
            session.active.batch((now_ns, *key, now_ns - begun_ns, *details, samples))

    def measure(self, state: IterState, data: Any, now_ns: int) -> int:
        """Return the bytes of a batch's tensors, and set the time of the next measurement."""
        state.measure_at_ns = now_ns + session.HOLD_NS
        if self.check_batch is not None and state.is_inline and state.info.batch_obstacle is NO_BATCH:
            state.info.batch_obstacle = self.check_batch(data)
        return payload_bytes(data)

    def begin_metering(self, state: IterState) -> FetchMeter:
        """Return a running meter for a batch that this thread is about to make; set the time of the next one."""
        meter: FetchMeter | None = getattr(self._meters, "meter", None)
        if meter is None or meter.pid != os.getpid():
            meter = self._meters.meter = FetchMeter()
        meter.begin()
        state.meter_at_ns = meter.begun_ns + fetch_meter.FULL_EVERY_NS
        return meter

    def note_error(self, state: IterState, error: BaseException) -> None:
        """Count an exception that `next()` raised, which the loop may catch, or note the end of the pass."""
        state.has_ended = isinstance(error, StopIteration)
        if session.active is not None:
            self._errors.note(session.active, state.info.number, error)

    def note_last_events(self) -> None:
        """Record counts of errors, and deaths for iterators that user code, or a traceback, holds until the end."""
        if session.active is not None:
            self.attempt(self._errors.flush, session.active)
        for state in list(states.values()):
            if (iterator := state.iterator()) is not None:
                self.attempt(self.note_deaths, iterator, STOPPED)

    def note_deaths(self, iterator: Any, normal: tuple[int, ...]) -> None:
        """Record workers that ended too early. Exit statuses in `normal` are DataLoader's own doing.

        Status 0, as by os._exit, is an early end if the worker owes a batch. Workers of an iterable dataset may end
        so: DataLoader asks them for batches beyond their end.
        """
        state, current = states.get(id(iterator)), session.active
        if state is None or current is None or self._is_copy(current):
            return
        for worker_id, process in enumerate(getattr(iterator, "_workers", ())):
            exit_code = process.exitcode
            if exit_code is None or exit_code in normal or worker_id in state.dead_workers:
                continue
            lost = [index for index, task in iterator._task_info.items() if task == (worker_id,)]
            if exit_code == 0 and (not lost or is_iterable(iterator)):
                continue
            current.events.append(
                "worker-died",
                loader=state.info.number,
                epoch=state.epoch,
                worker=worker_id,
                worker_pid=process.pid,
                exit_code=exit_code,
                last_index=min(lost, default=None),
            )
            state.dead_workers.add(worker_id)  # not before: torch's signal handler may raise in between

    def _is_copy(self, current: session.Session) -> bool:
        """Return whether this is a forked child with copies of iterators: their workers are not its own."""
        return self._registry is None or self._registry.session is not current

    def probe_queue(self, iterator: Any, state: IterState) -> None:
        """Find out which fields about its queues an iterator with workers has, once it has queues."""
        state.is_probed = True
        missing = [name for name in _QUEUE_FIELDS if not hasattr(iterator, name)]
        state.free_slots, state.slots_count = _slot_counter(getattr(iterator, "_data_queue", None))
        if missing:
            state.has_queue = state.has_sample_counts = False
            if (type(iterator), "queue fields") in self.patch_keys:
                return
            self.patch_keys.add((type(iterator), "queue fields"))
            error = f"{type(iterator).__name__} has no {missing[0]}"
            if session.active is not None:
                session.active.events.append("hook-disabled", hook="worker of a batch", error=error)


def _forget(number: int, _: object) -> None:
    states.pop(number, None)


def _slot_counter(queue: Any) -> tuple[Callable[[], int], int | None]:
    """Return a function that reads the free slots of a result queue, and the number of slots; None if unknown.

    A queue between processes counts them with a semaphore, which macOS cannot read (multiprocessing/queues.py). One
    between threads has no bound, so `qsize` is read instead: it counts the used slots.
    """
    try:
        semaphore, slots_count = queue._sem._semlock, int(queue._maxsize)
        semaphore._get_value()
    except (AttributeError, NotImplementedError):
        if not hasattr(queue, "qsize"):
            return lambda: 0, None
        try:
            queue.qsize()
        except NotImplementedError:
            return lambda: 0, None
        return lambda: -queue.qsize(), 0
    return semaphore._get_value, slots_count


def payload_bytes(data: Any) -> int:
    """Return the bytes of the tensors and arrays in a batch; missing when there are none, or too many to count.

    Only tensors and arrays are asked for their size: any other object is the user's and may run any code. So may a
    container class of the user's, which is therefore read by the methods of list, tuple or dict.
    """
    kinds = _sized_types()
    total, has_arrays = 0, False
    level: Iterable[Any] = (data,)
    for _ in range(_PAYLOAD_DEPTH):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if issubclass(kind, kinds):
                try:
                    total += item.nbytes
                except Exception:
                    return MISSING_INT64  # sparse tensors have no size in bytes
                has_arrays = True
            elif issubclass(kind, list):
                below.extend(list.__iter__(item))
            elif issubclass(kind, tuple):
                below.extend(tuple.__iter__(item))
            elif issubclass(kind, dict):
                below.extend(dict.values(item))
        if not below:
            break
        if len(below) > _PAYLOAD_LEAVES:
            return MISSING_INT64
        level = below
    return total if has_arrays else MISSING_INT64


@functools.cache
def _sized_types() -> tuple[type[Any], ...]:
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    return (torch.Tensor, numpy.ndarray) if numpy is not None else (torch.Tensor,)
