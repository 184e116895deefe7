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
from collections.abc import Callable, Iterable
from typing import Any

from training_harness import session
from training_harness.hooks import stages, worker
from training_harness.hooks.meter import FetchMeter
from training_harness.hooks.patching import Hook
from training_harness.hooks.phases import OTHER, WAIT
from training_harness.hooks.progress import BATCH, Progress
from training_harness.hooks.register import LoaderInfo, Register, is_iterable
from training_harness.hooks.steps import follow_batches
from training_harness.records import INLINE_WORKER, MISSING_INT32, MISSING_INT64

#: The attribute of an iterator that holds its `IterState`.
STATE = "_tidegauge"
_PAYLOAD_DEPTH = 4
_PAYLOAD_LEAVES = 64
#: What DataLoader knows of its own queues; an iterator without them costs the columns that come from there.
_BOOKS = ("_task_info", "_tasks_outstanding", "_rcvd_idx", "_send_idx")


class IterState:
    """What is known of one iterator's pass over its loader."""

    def __init__(self, info: LoaderInfo, loader: Any, begun_ns: int) -> None:
        self.info = info
        self.begun_ns = begun_ns
        self.inline = loader.num_workers == 0
        self.queued = not self.inline
        self.in_order = getattr(loader, "in_order", True)
        #: What an iterable dataset yields, and whether its last batch is full, only it knows.
        self.countable = loader.batch_sampler is not None and not is_iterable(loader)
        #: Looking at a batch's tensors takes some 5 µs: of batches that follow each other closely one is weighed.
        self.weigh_at_ns = 0
        self.dead: set[int] = set()
        self.queue_size: Callable[[], int] = _unknown_size
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
        follow_batches(self.progress)
        if self._register is None or self._register.session is not current:
            self._register = Register(current)
        info = self._register.info(loader, iterator)
        state = IterState(info, loader, begun_ns)
        iterator.__dict__[STATE] = state
        worker.starting.loader, worker.starting.epoch = info.number, state.epoch

    def started(self, iterator: Any, *, first: bool) -> None:
        """A multi-process iterator has its workers, or a persistent one begins another epoch."""
        state, current = iterator.__dict__.get(STATE), session.active
        if state is None or current is None:
            return
        if not first:
            state.next_epoch()
            state.begun_ns = time.monotonic_ns()
        current.events.append(
            "epoch-start",
            loader=state.info.number,
            epoch=state.epoch,
            worker_pids=[process.pid for process in getattr(iterator, "_workers", ())],
            begun_ns=state.begun_ns,
        )

    def asked(self, now_ns: int, *, inline: bool) -> None:
        """The training loop asks for a batch, and so is done with the one before."""
        progress, current = self.progress, session.active
        if progress.requests.due_ns == 0 and current is not None:
            now_ns = progress.requests.expire(current, progress.step)
        if progress.thread in (0, threading.get_ident()):  # no thread that loads ahead
            progress.log((OTHER, now_ns))
        if progress.ended_by == BATCH and progress.batches and current is not None:
            progress.gauge(current)
            progress.end(current, now_ns)
        # With `inline`, what this thread calls next is for the making of a batch.
        if stages.waiting and (inline or now_ns >= stages.due_ns):
            stages.used(now_ns)

    def yielded(self, iterator: Any, state: IterState, data: Any, begun_ns: int, now_ns: int, inner: bool) -> None:
        """A batch is on its way to the training loop, or to what makes one there (`inner`): write its record."""
        current = session.active
        if current is None:
            return
        if not state.yielded and state.queued:
            self._look_for_books(current, iterator, state)
        if not state.queued:
            maker = INLINE_WORKER if state.inline else MISSING_INT32
            index, samples = state.yielded, state.samples.get(maker, MISSING_INT32)
            outstanding = parked = ready = MISSING_INT32
            blocked_ns = MISSING_INT64
        else:
            index = iterator._rcvd_idx - 1 if state.in_order else state.popped_index
            maker = state.makers.pop(index, MISSING_INT32)
            samples = state.samples.pop(index, MISSING_INT32)
            outstanding = iterator._tasks_outstanding
            parked = len(iterator._task_info) - outstanding
            ready = state.queue_size()
            blocked_ns = state.blocked_ns
            state.blocked_ns = 0
        size_bytes = MISSING_INT64
        if now_ns >= state.weigh_at_ns:
            state.weigh_at_ns = now_ns + session.HOLD_NS
            size_bytes = payload_bytes(data)
        state.yielded += 1
        if not inner:
            stages.here.tally.batch = state.info.number, state.epoch, index
            progress = self.progress
            progress.batches += 1
            progress.samples += samples
            if progress.thread in (0, threading.get_ident()):
                progress.log((WAIT, now_ns))
        waited_ns = now_ns - begun_ns
        made = state.info.number, state.epoch, index, maker
        current.batch((now_ns, *made, waited_ns, blocked_ns, outstanding, parked, ready, size_bytes, samples))
        if now_ns >= self.progress.due_ns:
            self.progress.write(current, now_ns)

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
            state.samples.get(-1, MISSING_INT32),
        )

    def open_fetch(self) -> FetchMeter | None:
        """A batch is about to be made in this thread: its meter, running."""
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

    def _note_deaths(self, iterator: Any, good: tuple[int | None, ...]) -> None:
        state, current = iterator.__dict__.get(STATE), session.active
        if state is None or current is None:
            return
        if self._register is None or self._register.session is not current:
            return  # a forked child's copy of the iterator: these are not its workers
        for worker_id, process in enumerate(getattr(iterator, "_workers", ())):
            exit_code = process.exitcode
            if exit_code in good or worker_id in state.dead:
                continue
            state.dead.add(worker_id)
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

    def _look_for_books(self, current: session.Session, iterator: Any, state: IterState) -> None:
        missing = [name for name in _BOOKS if not hasattr(iterator, name)]
        try:
            state.queue_size = iterator._data_queue.qsize
            state.queue_size()
        except (NotImplementedError, AttributeError):  # macOS has no sem_getvalue
            state.queue_size = _unknown_size
        if missing:
            state.queued = state.countable = False
            if (type(iterator), "books") in self.known:
                return
            self.known.add((type(iterator), "books"))
            current.events.append(
                "hook-disabled", hook="worker of a batch", error=f"{type(iterator).__name__} has no {missing[0]}"
            )


def _unknown_size() -> int:
    return MISSING_INT32


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
