"""What is known of the DataLoaders of the training process: one `batch` record per batch.

Which worker made a batch is what DataLoader itself recorded when it dispatched the index, never
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
from training_harness.hooks import stages, worker
from training_harness.hooks.meter import FetchMeter
from training_harness.hooks.patching import Hook
from training_harness.hooks.progress import Progress
from training_harness.hooks.register import LoaderInfo, Register, is_iterable
from training_harness.hooks.steps import has_optimizer
from training_harness.records import INLINE_WORKER, MISSING_INT32, MISSING_INT64

#: id of an iterator -> what is known of it, as long as it lives. Not kept in the iterator itself: a look into its
#: `__dict__` makes CPython give it a real one, and then all that torch does with it is slower.
states: dict[int, IterState] = {}
_PAYLOAD_DEPTH = 4
_PAYLOAD_LEAVES = 64
#: The thread of a batch that becomes part of another one.
INNER = -1
#: What DataLoader knows of its own queues; an iterator without them costs the columns that come from there.
_BOOKS = ("_task_info", "_tasks_outstanding", "_rcvd_idx", "_send_idx")


class IterState:
    """What is known of one iterator's pass over its loader."""

    iterator: weakref.ref[Any]

    def __init__(self, info: LoaderInfo, loader: Any, begun_ns: int) -> None:
        self.info = info
        self.begun_ns = begun_ns
        self.inline = loader.num_workers == 0
        self.queued = not self.inline
        self.looked = self.inline
        self.in_order = getattr(loader, "in_order", True)
        #: What an iterable dataset yields, and whether its last batch is full, only it knows.
        self.countable = getattr(loader, "batch_sampler", None) is not None and not is_iterable(loader)
        #: Looking at a batch's tensors takes some 5 µs: of batches that follow each other closely one is weighed.
        self.weigh_at_ns = 0
        self.dead: set[int] = set()
        self.free_places: Callable[[], int] = _unknown
        self.all_places: int | None = None
        self.next_epoch()

    def next_epoch(self) -> None:
        """The iterator is new, or a persistent one was reset."""
        self.epoch = self.info.epochs
        self.info.epochs += 1
        self.samples: dict[int, int] = {}
        self.makers: dict[int, int] = {}
        self.popped_index = MISSING_INT64
        self.blocked_ns = 0
        self.yielded = 0


class LoaderHook(Hook):
    """The hook and what it remembers of the loaders of this process."""

    def __init__(self, progress: Progress) -> None:
        super().__init__("batch")
        self.progress = progress
        #: Iterator classes, and (class, name) of methods and books, that were seen to.
        self.known: set[Any] = set()
        #: Threads that make a batch themselves at this moment.
        self.fetching: set[int] = set()
        self._register: Register | None = None
        self._meters = threading.local()

    def begin(self, iterator: Any, loader: Any, begun_ns: int) -> None:
        """An iterator is being created, and has not started any worker."""
        current = session.start()
        if current is None or sys.modules[worker.WORKER_MODULE].get_worker_info() is not None:
            return  # a loader inside a worker's dataset is part of that worker's fetch
        self.progress.announce(current)
        self.progress.follow_batches(has_optimizer=has_optimizer())
        if self._register is None or self._register.session is not current:
            self._register = Register(current)
            current.before_farewell = self.note_last_deaths
        info = self._register.info(loader, iterator)
        state = IterState(info, loader, begun_ns)
        state.iterator = weakref.ref(iterator, functools.partial(_forget, id(iterator)))
        states[id(iterator)] = state
        worker.starting.loader, worker.starting.epoch = info.number, state.epoch

    def started(self, iterator: Any, *, first: bool) -> None:
        """A multi-process iterator has its workers, or a persistent one begins another epoch."""
        state, current = states.get(id(iterator)), session.active
        if state is None or current is None:
            return
        if not first:
            self.progress.tape.play()  # what is logged is of the epoch before
            state.next_epoch()
            state.begun_ns = time.monotonic_ns()
        current.events.append(
            "epoch-start",
            loader=state.info.number,
            epoch=state.epoch,
            worker_pids=[process.pid for process in getattr(iterator, "_workers", ())],
            begun_ns=state.begun_ns,
        )

    def popped(self, state: IterState, index: int, maker: int, blocked_ns: int) -> None:
        """A batch left the result queue; it may have to wait for its turn."""
        state.blocked_ns += blocked_ns
        state.makers[index] = maker

    def yielded(
        self,
        state: IterState,
        index: int,
        thread: int,
        times_ns: tuple[int, int],
        queue: tuple[int, int, int] | None,
        size_bytes: int,
    ) -> None:
        """A batch is on its way to who asked for it: hold its record.

        Args:
            state: of its iterator.
            index: of the batch.
            thread: that asked for it; `INNER` if it becomes part of another batch.
            times_ns: when it was asked for, and when it came.
            queue: then, tasks outstanding, tasks known and free places in the result queue, if there is one.
            size_bytes: of its tensors.
        """
        current = session.active
        if current is None:
            return
        begun_ns, now_ns = times_ns
        samples = state.samples.pop(index, MISSING_INT32)
        if queue is None:
            maker = INLINE_WORKER if state.inline else MISSING_INT32
            blocked_ns, outstanding, parked, ready = MISSING_INT64, MISSING_INT32, MISSING_INT32, MISSING_INT32
        else:
            maker = state.makers.pop(index, MISSING_INT32)
            outstanding, known, places = queue
            blocked_ns, parked = state.blocked_ns, known - outstanding
            ready = MISSING_INT32 if state.all_places is None else state.all_places - places
            state.blocked_ns = 0
            if thread != INNER:
                self.progress.asked(begun_ns, thread)
        if thread != INNER:
            self.progress.yielded(now_ns, thread, samples)
        made = state.info.number, state.epoch, index, maker
        waited_ns = now_ns - begun_ns
        current.batch((now_ns, *made, waited_ns, blocked_ns, outstanding, parked, ready, size_bytes, samples))

    def weigh(self, state: IterState, data: Any, now_ns: int) -> int:
        """The bytes of a batch's tensors, now and then."""
        state.weigh_at_ns = now_ns + session.HOLD_NS
        return payload_bytes(data)

    def fetched_inline(self, state: IterState, meter: FetchMeter) -> None:
        """A batch was made in the training process: its `fetch` record, without idle time."""
        self.fetching.discard(threading.get_ident())
        current = session.active
        if current is None:
            return
        wall_ns, *spent = meter.end()
        now_ns = meter.begun_ns + wall_ns
        stages.fetched(now_ns, state.info.number, state.epoch, state.yielded, INLINE_WORKER)
        current.fetch(
            now_ns,
            state.info.number,
            state.epoch,
            state.yielded,
            INLINE_WORKER,
            MISSING_INT64,
            wall_ns,
            MISSING_INT64,
            *spent,
            state.samples.get(state.yielded, MISSING_INT32),
        )

    def open_fetch(self, now_ns: int) -> FetchMeter | None:
        """A batch is about to be made in this thread: its meter, running."""
        if stages.waiting:  # those for the batch before: what this thread calls next is for the new one
            stages.used(now_ns)
        try:
            meter: FetchMeter | None = getattr(self._meters, "meter", None)
            if meter is None or meter.pid != os.getpid():
                meter = self._meters.meter = FetchMeter()
            self.fetching.add(threading.get_ident())
            meter.begin()
        except Exception as error:
            self.fail(error)
            return None
        return meter

    def note_deaths(self, iterator: Any) -> None:
        """Say which workers ended by a signal or an error; DataLoader only says that one did."""
        self._note_deaths(iterator, (None, 0))

    def note_late_deaths(self, iterator: Any) -> None:
        """The same once all have ended: those that hung were terminated by DataLoader itself."""
        self._note_deaths(iterator, (None, 0, -signal.SIGTERM))

    def note_last_deaths(self) -> None:
        """The same of iterators that whoever keeps them, or a traceback, holds until the process ends."""
        for state in list(states.values()):
            if self.active and (iterator := state.iterator()) is not None:
                try:
                    self.note_late_deaths(iterator)
                except Exception as error:
                    self.fail(error)

    def _note_deaths(self, iterator: Any, good: tuple[int | None, ...]) -> None:
        state, current = states.get(id(iterator)), session.active
        if state is None or current is None:
            return
        if self._register is None or self._register.session is not current:
            return  # a forked child's copy of the iterator: these are not its workers
        for worker_id, process in enumerate(getattr(iterator, "_workers", ())):
            exit_code = process.exitcode
            if exit_code in good or worker_id in state.dead:
                continue
            lost = [index for index, task in iterator._task_info.items() if task == (worker_id,)]
            current.events.append(
                "worker-died",
                loader=state.info.number,
                epoch=state.epoch,
                worker=worker_id,
                worker_pid=process.pid,
                exit_code=exit_code,
                last_index=min(lost, default=None),
            )
            state.dead.add(worker_id)  # not before: torch's signal handler may raise in between

    def look_for_books(self, iterator: Any, state: IterState) -> None:
        """Find out what an iterator with workers knows of its queues, once there are any."""
        state.looked = True
        missing = [name for name in _BOOKS if not hasattr(iterator, name)]
        state.free_places, state.all_places = _places(getattr(iterator, "_data_queue", None))
        if missing:
            state.queued = state.countable = False
            if (type(iterator), "books") in self.known:
                return
            self.known.add((type(iterator), "books"))
            error = f"{type(iterator).__name__} has no {missing[0]}"
            if session.active is not None:
                session.active.events.append("hook-disabled", hook="worker of a batch", error=error)


def _forget(number: int, _: object) -> None:
    states.pop(number, None)


def _places(queue: Any) -> tuple[Callable[[], int], int | None]:
    """What tells the free places of a result queue, and how many it has; None if that can't be known.

    A queue between processes counts them with a semaphore, which macOS cannot read (multiprocessing/queues.py); one
    between threads has as many as it wants, and `qsize` is asked for those that are taken.
    """
    try:
        semaphore, places = queue._sem._semlock, int(queue._maxsize)
        semaphore._get_value()
    except (AttributeError, NotImplementedError):
        if not hasattr(queue, "qsize"):
            return _unknown, None
        try:
            queue.qsize()
        except NotImplementedError:
            return _unknown, None
        return lambda: -queue.qsize(), 0
    return semaphore._get_value, places


def _unknown() -> int:
    return 0


def payload_bytes(data: Any) -> int:
    """Bytes of the tensors and arrays in a batch; missing when there are none, or too many to count.

    Only tensors and arrays are asked for their size: anything else is the user's, and may do anything. So may a
    container of the user's, which is read as the list, tuple or dict that it is.
    """
    kinds = _sized_types()
    total, found = 0, False
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
                found = True
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
    return total if found else MISSING_INT64


@functools.cache
def _sized_types() -> tuple[type[Any], ...]:
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    return (torch.Tensor, numpy.ndarray) if numpy is not None else (torch.Tensor,)
