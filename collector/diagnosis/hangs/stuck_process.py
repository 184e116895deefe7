"""Processes of a run as a series of stacks shows them: where each stands, what it waits for, whether it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath
from typing import Any, TypeAlias

import pandas as pd

from collector.diagnosis.loading.loaders import worker_slots
from collector.diagnosis.run.columns import SECOND_NS, floats, key_of
from collector.diagnosis.run.lifecycle import Lifecycle, signal_raised
from collector.diagnosis.run.processes import rank_of
from collector.findings import Evidence, Locus, fact
from collector.stacks import (
    ASLEEP,
    AT_LOCK,
    AT_SHARED_LOCK,
    FEEDS_QUEUE,
    HELPS_QUEUES,
    MAIN_THREAD,
    MAKES_BATCH,
    ONE_ENDLESS,
    POLLS,
    PROCESS_BEGIN,
    SUSPENDED,
    WAITS_FOR_INDEX,
    Frame,
    Place,
    Stack,
    from_fields,
    is_in,
)
from collector.store import ProcessKey
from collector.units import duration

#: Dumps of the stacks of one host that follow each other (`stacks` events), the newest last.
Series: TypeAlias = Sequence[Mapping[str, Any]]
#: A process that takes this share of a core is computing, not blocked.
_BUSY_RATIO = 0.5
_MOST_THREADS = 2  # of the threads of a process that a sentence names
#: Helpers are at work from this share on: on a machine with too few cores they get little.
_HELPERS_RATIO = 0.05
COLLECTIVE = "waiting in a collective"
AWAITS_POOL, AWAITS_QUEUE = "waiting for a process pool", "waiting for an item of a queue"
AWAITS_THREAD, AWAITS_TASK = "waiting for the end of a thread", "waiting for the result of a task"
#: The same of a queue of `multiprocessing`, which another process fills.
AWAITS_ITEM = f"{AWAITS_QUEUE} of another process"
#: A queue with a bound, and the same of `multiprocessing`, which another process empties.
AWAITS_ROOM = "waiting for room in a full queue"
AWAITS_ROOM_ELSEWHERE = f"{AWAITS_ROOM} to another process"
#: An event loop of asyncio always has one descriptor, by which other threads wake it.
AWAITS_LOOP = "waiting for an event of its asyncio loop"
AWAITS_THREADS = "waiting to end until its other threads end"
#: A Condition, Event, Semaphore or Barrier of `threading`: unlike a lock, it has no holder.
AWAITS_NOTICE = "waiting for a thread to wake it"
#: The same of `multiprocessing`, which another process ends.
AWAITS_PROCESS = "waiting for another process to wake it"
#: A lock or a semaphore of `multiprocessing`, by the library's code in the stack.
AWAITS_SHARED_LOCK = "blocked on a lock of multiprocessing"
#: Waits for a lock that processes share, by the stack and, where no such code is in it, as of `acquire()`, by the
#: kernel. Nothing frees the lock when the process that holds it ends.
SHARED_LOCKS = (AWAITS_SHARED_LOCK, AT_SHARED_LOCK)
#: Waits that only a thread of the same process can end.
_ENDED_BY_THREAD = (AWAITS_QUEUE, AWAITS_ROOM, AWAITS_TASK, AWAITS_NOTICE)
#: Waits for a thread that itself may wait for something slow.
_OF_THREADS = (*_ENDED_BY_THREAD, AWAITS_THREAD, AWAITS_THREADS)
#: A process of `multiprocessing` ends only when its queues have handed over all that it put.
AWAITS_TAKER = "waiting to end until someone takes what it put in a queue"
_ENDING = ("_exit_function", "multiprocessing/util.py")
_TRACKER_PATHS = ("multiprocessing/resource_tracker.py",)
_POOL_PATHS = ("multiprocessing/pool.py", "multiprocess/pool.py")
_QUEUE_PATHS = ("multiprocessing/queues.py", "multiprocess/queues.py")
_SYNCHRONIZE_PATHS = ("multiprocessing/synchronize.py", "multiprocess/synchronize.py")
#: A Condition at its own lock: it does not wait for a notice yet.
_AT_MUTEX: Place = ("__enter__", ("/threading.py",))
_RESULT: Place = ("result", ("/concurrent/futures/_base.py",))
_POOL_THREAD: Place = ("_worker", ("/concurrent/futures/thread.py",))
#: Function of the standard library, end of its file's path -> what a thread that is blocked in it waits for.
_AWAITED = (
    ("get", _POOL_PATHS, AWAITS_POOL),
    ("next", _POOL_PATHS, AWAITS_POOL),
    ("get", ("/queue.py",), AWAITS_QUEUE),
    ("get", _QUEUE_PATHS, AWAITS_ITEM),
    ("put", ("/queue.py",), AWAITS_ROOM),
    ("put", _QUEUE_PATHS, AWAITS_ROOM_ELSEWHERE),
    ("_shutdown", ("/threading.py",), AWAITS_THREADS),
    ("join", ("/threading.py",), AWAITS_THREAD),
    (*_RESULT, AWAITS_TASK),
    ("wait", _SYNCHRONIZE_PATHS, AWAITS_PROCESS),
    ("__enter__", _SYNCHRONIZE_PATHS, AWAITS_SHARED_LOCK),
    ("wait", ("/threading.py",), AWAITS_NOTICE),
    ("_run_once", ("asyncio/base_events.py",), AWAITS_LOOP),
)
#: Waits that nothing but another thread or a signal can end; they are no work.
STUCK_WAITS = (AT_LOCK, "suspended", "waiting for a child", COLLECTIVE)
#: Parts of paths of frames in phases that may take any time: a compilation, a debugger.
_PHASE_PATHS = ("torch/_dynamo/", "torch/_inductor/", "/pdb.py", "/bdb.py", "/debugpy/")
#: The same of operations on tensors, without `torch/multiprocessing/`.
_OPERATION_PATHS = ("torch/nn/", "torch/_tensor.py", "torch/functional.py", "torch/_ops.py", "torch/autograd/")
#: Part of the paths of frames in a pass of a model.
_PASS_PATHS = ("torch/nn/modules/module.py",)
#: The same for a notebook; between two cells it runs no code of its user.
_NOTEBOOK_PATHS = ("/ipykernel/kernelapp.py",)


@dataclass(frozen=True, slots=True)
class Process:
    """One process over the dumps of a series: its stacks in the last one, and what changed between the dumps.

    Attributes:
        name: for the middle of a sentence.
        parent_pid: its parent, None if it was not recorded.
        threads: stacks of its threads; none if they could not be read.
        is_still: True if its main thread stands in the same place in each dump.
        busy_ratio: CPU time over wall time between the dumps; None with a single dump.
        moved_seconds_ago: time since it, or a child of it, moved bytes; None if it did not in this silence.
        received_seconds_ago: the same of bytes of its TCP connections.
        unread_waits: what its main thread waits for, where its stacks could not be read; None if unknown.
        error: why its stacks could not be read; None if they were.
    """

    key: ProcessKey
    locus: Locus
    name: str
    parent_pid: int | None
    threads: tuple[Stack, ...]
    is_still: bool
    busy_ratio: float | None
    moved_seconds_ago: float | None = None
    received_seconds_ago: float | None = None
    unread_waits: str | None = None
    error: str | None = None

    @property
    def main(self) -> Stack | None:
        """The stack of the main thread."""
        return next((stack for stack in self.threads if stack.thread == MAIN_THREAD), None)

    @property
    def activity(self) -> str | None:
        """The part of the main thread in data loading."""
        return self.main.activity if self.main else None

    @property
    def feeder(self) -> Stack | None:
        """The thread that sends what the process put in a queue, a worker its batches, if it is stuck in that."""
        feeding = (stack for stack in self.threads if stack.activity == FEEDS_QUEUE)
        return next((one for one in feeding if one.frames and not one.frames[0].function.endswith("wait")), None)

    @property
    def _telling_stack(self) -> Stack | None:
        return self.feeder if self.activity == WAITS_FOR_INDEX else self.main

    @property
    def frame(self) -> Frame | None:
        """The innermost frame of the user's own, else the innermost of all."""
        stack = self._telling_stack
        if stack is None or not stack.frames:
            return None
        return next((frame for frame in stack.frames if frame.is_own), stack.frames[0])

    @property
    def where(self) -> str:
        """The end of a sentence: ` in load, dataset.py:41`; a library that sleeps is named before it."""
        if self.frame is None or self._telling_stack is None:
            return ""
        innermost = next((frame for frame in self._telling_stack.frames if not frame.is_hook), self.frame)
        place = f" in {_place_words(self.frame)}"
        is_in_library = self.waits == ASLEEP and innermost != self.frame
        return f" in {innermost.full_name}, called{place}" if is_in_library else place

    @property
    def stands_in_own_code(self) -> bool:
        """True if a frame is the user's own."""
        return self.frame is not None and self.frame.is_own

    @property
    def waits(self) -> str | None:
        """The thing that it waits for, or `computing`; None if the kernel does not tell."""
        if self.is_busy:
            return "computing"
        if self.is_suspended:
            return SUSPENDED
        stack = self._telling_stack
        return self.awaits or (stack.waits if stack else self.unread_waits)

    @property
    def awaits(self) -> str | None:
        """The thing that another thread or process of the program should deliver to its main thread, if any.

        A worker without an index has nothing to do: only its feeder may be stuck.
        """
        if self.main is None or self.activity == WAITS_FOR_INDEX:
            return None
        if self.feeder is not None and any(is_in(frame, *_ENDING) for frame in self.main.frames):
            return AWAITS_TAKER
        calls = [*takewhile(lambda frame: not frame.is_own, self.main.frames)]
        if any(is_in(frame, *_AT_MUTEX) for frame in calls):
            return None  # of a queue, say, which is neither full nor empty
        found = (words for name, paths, words in _AWAITED if any(is_in(frame, name, paths) for frame in calls))
        awaited = next(found, None)
        if awaited == AWAITS_POOL and any(
            is_in(frame, "worker", _POOL_PATHS) for stack in self.threads for frame in stack.frames
        ):
            return AWAITS_TASK  # a ThreadPool
        return AT_SHARED_LOCK if awaited is None and self.main.waits == AT_SHARED_LOCK else awaited

    @property
    def is_alone(self) -> bool:
        """True if it waits for what only a thread of its own can deliver, and has no other thread than helpers.

        The same holds for an event loop that has no connection, pipe, child or timer.
        """
        is_idle_loop = (
            self.awaits == AWAITS_LOOP and self.main is not None and ONE_ENDLESS in (self.main.waits or "")
        )
        return (self.awaits in _ENDED_BY_THREAD or is_idle_loop) and self.has_one_thread

    @property
    def has_one_thread(self) -> bool:
        """True if it has no other Python threads than helpers of queues."""
        return bool(self.threads) and all(stack.activity in HELPS_QUEUES for stack in self._others)

    @property
    def has_thread_at_work(self) -> bool:
        """True if the main thread is at a lock, or waits for a thread, and one in the user's code is at no lock."""
        at_work = (any(frame.is_own for frame in stack.frames) and not stack.is_at_lock for stack in self._others)
        return (self.is_at_lock or self.awaits in _OF_THREADS) and any(at_work)

    @property
    def has_taken_pool(self) -> bool:
        """True if each thread of its thread pools waits for the result of a task, so that none can run one."""
        at_work = [stack for stack in self._others if any(is_in(frame, *_POOL_THREAD) for frame in stack.frames)]
        waiting = [stack for stack in at_work if any(is_in(frame, *_RESULT) for frame in stack.frames)]
        return bool(at_work) and waiting == at_work

    @property
    def other_threads(self) -> str:
        """A sentence on the user's own lines in which its other threads stand, with a blank before it."""
        places = []
        for stack in self._others:
            frame = next((frame for frame in stack.frames if frame.is_own), None)
            if frame is not None:
                state = "" if stack.waits is None or stack.is_at_lock else f", {stack.waits},"
                places.append(f"{stack.thread}{state} stands in {_place_words(frame)}")
        return f" {' and '.join(places[:_MOST_THREADS])}." if places else ""

    @property
    def is_unread(self) -> bool:
        """True if only the kernel tells what it waits for."""
        return self.main is None and self.unread_waits is not None

    @property
    def _others(self) -> Iterator[Stack]:
        return (stack for stack in self.threads if stack.thread != MAIN_THREAD)

    def evidence(self, dumps_count: int, waits: str | None) -> list[Evidence]:
        """Return where it stands, what it waits for, and its share of a core."""
        window = f"{dumps_count} dumps of its stacks" if self.threads else "state in the kernel"
        values = {
            "stands_in": _place_words(self.frame) if self.frame is not None else None,
            "state": waits,
            "busy_ratio": None if self.busy_ratio is None else round(self.busy_ratio, 3),
            "last_moved_seconds": self.moved_seconds_ago,
        }
        return [fact(name, value, window, n=dumps_count) for name, value in values.items() if value is not None]

    @property
    def is_in_collective(self) -> bool:
        """True if the main thread stands in a collective of torch.distributed."""
        return self.main is not None and self.main.is_in_collective and not self.is_busy

    @property
    def is_at_lock(self) -> bool:
        """True if the main thread is blocked on a lock."""
        return self.main is not None and self.main.is_at_lock

    @property
    def computes_at_innermost(self) -> bool:
        """True if the main thread's innermost frame is the user's own, or torch's: it is amid an operation."""
        frames = self.main.frames if self.main else ()
        return bool(frames) and (frames[0].is_own or any(path in frames[0].path for path in _OPERATION_PATHS))

    @property
    def is_in_long_phase(self) -> bool:
        """True if the main thread compiles, is debugged, or waits for the user of a notebook."""
        if self.main is None:
            return False
        is_between_cells = self.main.is_in(_NOTEBOOK_PATHS) and not any(frame.is_own for frame in self.main.frames)
        return self.main.is_in(_PHASE_PATHS) or is_between_cells

    @property
    def is_evaluating(self) -> bool:
        """True if a training process computes in passes of a model and moves: without steps, it evaluates."""
        is_in_pass = self.main is not None and self.main.is_in(_PASS_PATHS)
        return self.locus.role != "worker" and is_in_pass and self.is_busy and not self.is_still

    @property
    def is_busy(self) -> bool:
        """True if it computes."""
        waits = self.main.waits if self.main else self.unread_waits
        return waits == "computing" or (self.busy_ratio is not None and self.busy_ratio > _BUSY_RATIO)

    @property
    def is_stuck(self) -> bool:
        """True if no progress shows: it is suspended, or stands in one place without computing."""
        return self.is_suspended or (self.is_still and not self.is_busy)

    @property
    def is_suspended(self) -> bool:
        """True if a signal has stopped it."""
        return SUSPENDED in (self.unread_waits, *(stack.waits for stack in self.threads))

    @property
    def is_at_work(self) -> bool:
        """True for a worker that makes a batch, or cannot: without stacks, one that does not poll its queue."""
        if self.is_suspended or self.activity == MAKES_BATCH:
            return True
        return self.is_unread and not (self.waits or "").startswith(POLLS)

    def transfer(self, within_seconds: float) -> str | None:
        """Return a sentence on bytes that it moved within this time, if it waits: then it is slow, and not stuck.

        A training process has threads that talk to other services all the time. So it must itself wait for data.
        A program that is asleep may read a little each time it wakes, as one that awaits the lock of a database.
        """
        waits_for_data = (self.waits or "").startswith("waiting for") and not self.is_in_collective
        if self.is_suspended or not (self.locus.role == "worker" or waits_for_data):
            return None
        received, moved = (
            math.inf if seconds is None else seconds
            for seconds in (self.received_seconds_ago, self.moved_seconds_ago)
        )
        if received < within_seconds:
            return f"It received or sent data within the last {duration(max(received, 1.0))}."
        if moved < within_seconds and self.waits != ASLEEP:
            return f"It read or wrote data within the last {duration(max(moved, 1.0))}."
        return None


def sampled_seconds_after(dump_ns: float, samples: pd.DataFrame) -> float:
    """Return the time from a dump to the newest of some samples in which a process lived; 0 without one."""
    newest_ns = floats(samples, "time_ns")[floats(samples, "alive") == 1].max(initial=dump_ns)
    return float(newest_ns - dump_ns) / SECOND_NS


def last_series(events: Series) -> Series:
    """Return the last three `stacks` events of one silence of a host, or fewer.

    They may be of two series, while the last one is being taken or where it was broken off.
    """
    last = events[-1]
    silent_seconds = max(
        last.get("idle_seconds") or 0.0, *(entry["silent_seconds"] for entry in last["silent"]), 0.0
    )
    return [event for event in events if last["time_ns"] - event["time_ns"] < silent_seconds * SECOND_NS][-3:]


def raised_elsewhere(life: Lifecycle, key: ProcessKey, stacks: Mapping[str, Any]) -> bool:
    """Return whether a process has raised an exception since, at another line than it stood in: it went on.

    The handler of a signal raises elsewhere, too, but its traceback shows the line that it interrupted.
    """
    error = life.exceptions.get(key)
    if error is None or signal_raised(error) or error["time_ns"] <= stacks["time_ns"]:
        return False
    threads = next(
        (one["threads"] for one in stacks["processes"] if (one["pid"], one["start_ticks"]) == key[1:]), ()
    )
    frames = (Frame(*frame) for one in threads if one["thread"] == MAIN_THREAD for frame in one["frames"])
    stood = next((frame for frame in frames if frame.is_own), None)
    if stood is None or str(error.get("site")).startswith(f"{stood.path}:{stood.line},"):
        return False
    return f'"{stood.path}", line {stood.line},' not in str(error.get("traceback"))


def processes_of(life: Lifecycle, series: Series) -> dict[ProcessKey, Process]:
    """Return the processes of a series, with their places in the run."""
    host = str(series[-1]["host"])
    dumps: dict[ProcessKey, list[Mapping[str, Any]]] = {}
    for event in series:
        for entry in event["processes"]:
            if key := key_of({**entry, "host": host}):
                dumps.setdefault(key, []).append({**entry, "time_ns": event["time_ns"]})
    slots = worker_slots(life.tables)
    found = {}
    for key, entries in dumps.items():
        # A dump can fail while the interpreter changes what is read.
        readable = [entry for entry in entries if entry["threads"]] or entries[-1:]
        entry, before = readable[-1], readable[:-1]
        first = readable[0] if entry["threads"] else entries[0]
        where = replace(life.locus(key), role=life.role(key) if life.mains else "main")
        threads = tuple(from_fields(thread, where) for thread in entry["threads"])
        if slot := slots.get(key[:2]):
            where = replace(
                where, rank=rank_of(life.tables, slot[0]), role="worker", loader=slot[1], worker=slot[2]
            )
        elif any(
            stack.thread == MAIN_THREAD and stack.activity in (MAKES_BATCH, WAITS_FOR_INDEX) for stack in threads
        ):
            where = replace(where, role="worker")
        threads = tuple(replace(stack, locus=where) for stack in threads)
        found[key] = Process(
            key=key,
            locus=where,
            name=_name(life, key, where),
            parent_pid=entry.get("parent_pid"),
            threads=threads,
            is_still=bool(before) and all(_place(dump) == _place(entry) for dump in before),
            busy_ratio=_busy_ratio(first, entry),
            moved_seconds_ago=entry.get("moved_seconds_ago"),
            received_seconds_ago=entry.get("received_seconds_ago"),
            unread_waits=entry.get("waits"),
            error=entry.get("error"),
        )
    return found


def _name(life: Lifecycle, key: ProcessKey, where: Locus) -> str:
    if where.worker is not None:
        return f"worker {where.worker} of loader {where.loader}"
    return f"a DataLoader worker (pid {key[1]})" if where.role == "worker" else life.name(key)


def _place_words(frame: Frame) -> str:
    return f"{frame.function}, {PurePath(frame.path).name}:{frame.line}"


def _place(entry: Mapping[str, Any]) -> Any:
    """Return where the main thread of a dump stands: its frames, each once.

    If a handler is blocked and its signal comes again and again, ever more calls of it lie above each other.
    """
    main = (thread for thread in entry["threads"] if thread["thread"] == MAIN_THREAD)
    return next(([*dict.fromkeys(map(tuple, thread["frames"]))] for thread in main), None)


def _busy_ratio(first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    wall_seconds = (last["time_ns"] - first["time_ns"]) / 1e9
    if wall_seconds <= 0 or None in (first["cpu_seconds"], last["cpu_seconds"]):
        return None
    return float((last["cpu_seconds"] - first["cpu_seconds"]) / wall_seconds)


def helpers_compute(series: Series) -> bool:
    """Return whether other processes of the run compute, such as a program that the training waits for.

    On a crowded machine such a process may get little of a core, but it is runnable whenever it is looked at.
    """
    if all(event.get("helpers_runnable_count") for event in series):
        return True
    wall_seconds = (series[-1]["time_ns"] - series[0]["time_ns"]) / 1e9
    used_seconds = series[-1]["helpers_cpu_seconds"] - series[0]["helpers_cpu_seconds"]
    return bool(wall_seconds > 0 and used_seconds / wall_seconds > _HELPERS_RATIO)


def has_children(parent: Process, processes: Iterable[Process]) -> bool:
    """Return whether a process has children that run code of its own: not workers, nor a helper of Python."""
    children = (one for one in processes if one.parent_pid == parent.key[1] and one.locus.role == "other")
    return any(one.main is None or not one.main.is_in(_TRACKER_PATHS) for one in children)


def stuck_child(parent: Process, processes: Iterable[Process]) -> Process | None:
    """Return a child, neither rank nor worker, that a process waits for while that child itself is stuck at a lock.

    A child that waits for its next task at the lock of a queue is idle, and stands in the library's code.
    """
    if not (parent.waits or "").startswith("waiting for"):
        return None
    children = (one for one in processes if one.parent_pid == parent.key[1] and one.locus.role == "other")
    stuck = (one for one in children if one.is_at_lock and one.is_stuck and one.moved_seconds_ago is None)
    return next((one for one in stuck if one.awaits == AWAITS_TAKER or one.computes_at_innermost), None)


def is_forked(life: Lifecycle, process: Process) -> bool:
    """Return whether `multiprocessing` forked a process: it began there, with the command line of its parent."""
    frames = process.main.frames if process.main else ()
    if not any(is_in(frame, *PROCESS_BEGIN) for frame in frames):
        return False
    parents = (key for key in life.programs if key[:2] == (process.key[0], process.parent_pid))
    return any(life.programs[key] == life.programs.get(process.key) for key in parents)


def who_holds_up(workers: Sequence[Process]) -> Process | None:
    """Return the worker that a training process waits for; None if none of them is at work."""
    at_work = [worker for worker in workers if worker.is_at_work]
    # A worker at a lock may wait for another worker at work, which holds it.
    at_work.sort(key=lambda worker: (not worker.is_suspended, worker.is_at_lock, not worker.is_stuck))
    return at_work[0] if at_work else next((worker for worker in workers if worker.feeder is not None), None)
