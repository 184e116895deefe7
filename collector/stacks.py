"""Python stacks of a run's threads: what a thread does, which frames are the user's own, which stacks are alike.

Pure functions on values. `agent.samplers.stack_dumps` reads the stacks, `report.stack_listing` prints them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from collector.findings import Locus

_HOOK_PATH = re.compile(r"/training_harness/(?!jobs/)")
#: Folders of the standard library and of installed packages, in any environment, and of the hooks; sources of
#: Cython, whose paths begin in the folder that a package was built in.
_LIBRARY_PATH = re.compile(
    rf"/lib(64)?/python3(\.\d+)?/|/(site|dist)-packages/|{_HOOK_PATH.pattern}|^<|^$|\.p(yx|xi)$"
)
#: The part of a library's path that names its module.
_MODULE_PATH = re.compile(r".*(?:/python3(?:\.\d+)?|-packages)/(.+?)(?:/__init__)?\.py$")
#: A forked process keeps its parent's frames below the one that began its own work.
PROCESS_BEGIN = ("_bootstrap", "multiprocessing/process.py")
#: A function, and ends of the paths of its file.
Place = tuple[str, str | tuple[str, ...]]
_LOADER_PATHS = ("torch/utils/data/dataloader.py", "torchdata/stateful_dataloader/stateful_dataloader.py")
#: Functions in which training waits for a batch, a batch is made, and the sampler is asked.
WAIT: Place = ("_try_get_data", _LOADER_PATHS)
FETCH: Place = ("fetch", "torch/utils/data/_utils/fetch.py")
SAMPLER: Place = ("_next_index", _LOADER_PATHS)
_WORKER: Place = (
    "_worker_loop",
    ("torch/utils/data/_utils/worker.py", "torchdata/stateful_dataloader/worker.py"),
)
#: Activities of threads in data loading, in words.
WAITS_FOR_BATCH, MAKES_BATCH, WAITS_FOR_INDEX, FEEDS_QUEUE = (
    "waits for a batch",
    "makes a batch",
    "waits for an index",
    "feeds a queue",
)
_PINS_BATCHES, _SHARES_FILES = "pins batches", "shares file descriptors"
#: Activities of threads that only move what others put in the queues of multiprocessing.
HELPS_QUEUES = (FEEDS_QUEUE, _PINS_BATCHES, _SHARES_FILES)
#: Function, end of its file's path -> what a thread in it does; the first that occurs in the stack counts.
_ACTIVITIES: tuple[tuple[str, str | tuple[str, ...], str], ...] = (
    (*WAIT, WAITS_FOR_BATCH),
    (*FETCH, MAKES_BATCH),
    (*_WORKER, WAITS_FOR_INDEX),
    ("do_one_step", "torch/utils/data/_utils/pin_memory.py", _PINS_BATCHES),
    ("_feed", "multiprocessing/queues.py", FEEDS_QUEUE),
    ("_serve", "multiprocessing/resource_sharer.py", _SHARES_FILES),
)
#: A thread that waits for the time alone.
ASLEEP = "asleep"
#: Target of a wait for a pipe or socket that is the only one, without a timeout.
ONE_ENDLESS = "one descriptor, no timeout"
#: A pipe that its reader does not empty.
FULL_PIPE = "waiting for a full pipe"
AWAITS_CHILD = "waiting for a child process"
POLLS = "waiting for a pipe or socket"
#: A lock of threads, or anything else that a thread of the process is to do.
AT_FUTEX = "blocked on a lock (futex)"
#: Start of the name of a kernel function -> what a thread that sleeps in it waits for.
_WAIT_CHANNELS = (
    ("futex", AT_FUTEX),
    ("do_wait", AWAITS_CHILD),
    ("hrtimer_nanosleep", ASLEEP),
    ("pipe_write", FULL_PIPE),
    ("anon_pipe_write", FULL_PIPE),
    ("wait_for_partner", "waiting for a pipe (a FIFO whose other end is not open)"),
    ("pipe_", "waiting for a pipe"),
    ("anon_pipe_", "waiting for a pipe"),
    ("poll_", POLLS),
    ("do_poll", POLLS),
    ("do_select", POLLS),
    ("ep_poll", POLLS),
    ("do_epoll", POLLS),
    ("n_tty_read", "waiting for input at the terminal"),
    ("inet_csk_accept", "waiting for a connection"),
    ("unix_", "waiting for a local socket"),
    ("__skb_wait", "waiting for a socket"),
    ("sk_wait", "waiting for the network"),
    ("wait_woken", "waiting for the network"),
    ("tcp_", "waiting for the network"),
    ("locks_lock", "blocked on a file lock"),
    ("fcntl_setlk", "blocked on a file lock"),
    ("do_sigtimedwait", "waiting for a signal"),
    ("__do_sys_pause", "waiting for a signal"),
    ("sigsuspend", "waiting for a signal"),
    ("do_sem", "blocked on a semaphore"),
    ("request_wait_answer", "waiting for a FUSE file system"),
    ("fuse_", "waiting for a FUSE file system"),
    ("rpc_", "waiting for NFS"),
    ("nfs_", "waiting for NFS"),
)
#: Parts of paths of frames in which a rank waits for other ranks; DDP's backward pass waits for the gradients.
_COLLECTIVE_PATHS = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/graph.py")
#: The same of a launcher, which waits for its ranks as it should.
_LAUNCHER_PATHS = ("torch/distributed/elastic/", "torch/distributed/launcher/", "torch/distributed/run.py")
_TORCH_PATHS = ("/site-packages/torch/", "/dist-packages/torch/")
#: Begin of the words for waiting for any kind of lock.
AT_LOCK = "blocked on a"
#: A futex in memory that processes share, as of `multiprocessing.Lock`; nothing frees it when its holder ends.
AT_SHARED_LOCK = "blocked on a lock that processes share (futex)"
MAIN_THREAD = "MainThread"

#: Fields of a process in a `stacks` event that say its place in the run.
PLACE = ("role", "rank", "loader", "worker")
#: State of a process that a signal or a debugger has stopped.
SUSPENDED = "suspended (SIGSTOP or a debugger)"


class Frame(NamedTuple):
    """One frame: qualified name of the function, its file, and the line that it executes; 0 in native code."""

    function: str
    path: str
    line: int

    @property
    def is_own(self) -> bool:
        """True for the user's own file, not the standard library's, an installed package's or ours."""
        return self.line > 0 and _LIBRARY_PATH.search(self.path) is None

    @property
    def is_hook(self) -> bool:
        """True for a frame of ours, which only calls what it stands for."""
        return _HOOK_PATH.search(self.path) is not None

    @property
    def full_name(self) -> str:
        """Module and function, such as `re.split`; without the module where the path does not show it."""
        module = _MODULE_PATH.match(self.path)
        return f"{module[1].replace('/', '.')}.{self.function}" if module else self.function


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stack of one thread.

    Attributes:
        frames: innermost first; a forked process's begin with its own work.
        waits: what it waits for or does, as the kernel tells; None if the kernel does not.
    """

    locus: Locus
    thread: str
    frames: tuple[Frame, ...]
    waits: str | None

    @property
    def activity(self) -> str | None:
        """Part of the thread in data loading, in words; None if none shows."""
        for function, path, words in _ACTIVITIES:
            if any(is_in(frame, function, path) for frame in self.frames):
                return words
        return None

    def is_in(self, paths: Iterable[str]) -> bool:
        """Return whether a frame's path has one of these parts."""
        return any(path in frame.path for frame in self.frames for path in paths)

    @property
    def is_in_collective(self) -> bool:
        """True if it stands in a collective of torch.distributed, or in a backward pass."""
        return self.is_in(_COLLECTIVE_PATHS) and not self.is_in(_LAUNCHER_PATHS)

    @property
    def is_at_lock(self) -> bool:
        """True if it is blocked on a lock."""
        return (self.waits or "").startswith(AT_LOCK)

    @property
    def shows_pending_work(self) -> bool:
        """True if a training process or worker would not stand here by design, however long it does.

        It makes or awaits a batch, waits for other ranks, is suspended, or is blocked on a lock in the user's own
        code or in torch's. A server or a notebook idles in an event or a queue, with a library's innermost frame.
        """
        if self.thread != MAIN_THREAD or not self.frames:
            return self.waits == SUSPENDED
        is_blocked = self.is_at_lock and (self.frames[0].is_own or self.is_in(_TORCH_PATHS))
        is_at_work = self.activity in (WAITS_FOR_BATCH, MAKES_BATCH) or self.is_in_collective
        return is_at_work or is_blocked or self.waits == SUSPENDED


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Threads with equal frames, in the same state."""

    stacks: tuple[Stack, ...]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of each, innermost first."""
        return self.stacks[0].frames

    @property
    def has_own_frames(self) -> bool:
        """True if any frame is the user's own."""
        return any(frame.is_own for frame in self.frames)

    @property
    def waits_for_another(self) -> bool:
        """True if each waits for another process, as for a batch, an index or other ranks."""
        stack = self.stacks[0]
        return stack.activity in (WAITS_FOR_BATCH, WAITS_FOR_INDEX) or stack.is_in_collective


def stacks_of(dump: Iterable[Mapping[str, Any]], locus: Locus, waits: Mapping[int, str | None]) -> list[Stack]:
    """Return the stacks of one process.

    Args:
        dump: threads of `py-spy dump --json`, whose frames are innermost first.
        locus: the process.
        waits: kernel's id of a thread -> what it waits for.
    """
    return [
        Stack(
            locus=locus,
            thread=thread.get("thread_name") or f"thread {thread.get('os_thread_id') or thread['thread_id']}",
            frames=own_work(
                Frame(frame["name"], frame["filename"], 0 if frame.get("module") else frame["line"])
                for frame in thread["frames"]
            ),
            waits=waits.get(thread.get("os_thread_id") or -1),
        )
        for thread in dump
    ]


def stack_fields(stack: Stack) -> dict[str, Any]:
    """Return a stack in the form of a `stacks` event; a frame is a list of function, path and line."""
    return {"thread": stack.thread, "waits": stack.waits, "frames": [list(frame) for frame in stack.frames]}


def of_event(event: Mapping[str, Any]) -> list[Stack]:
    """Return the stacks that a `stacks` event holds."""
    return [
        from_fields(thread, Locus(pid=process["pid"], **{name: process.get(name) for name in PLACE}))
        for process in event["processes"]
        for thread in process["threads"]
    ]


def from_fields(fields: Mapping[str, Any], locus: Locus) -> Stack:
    """Return the stack that `stack_fields` wrote."""
    frames = tuple(Frame(*frame) for frame in fields["frames"])
    return Stack(locus=locus, thread=fields["thread"], frames=frames, waits=fields["waits"])


def group(stacks: Iterable[Stack]) -> list[StackGroup]:
    """Group equal stacks: the user's frames first, then who does not wait for another process, then the rarest."""
    groups: dict[tuple[object, ...], list[Stack]] = {}
    for stack in stacks:
        groups.setdefault((stack.frames, stack.waits), []).append(stack)
    found = [StackGroup(tuple(alike)) for alike in groups.values()]
    return sorted(found, key=lambda alike: (not alike.has_own_frames, alike.waits_for_another, len(alike.stacks)))


def wait_words(state: str, channel: str | None) -> str | None:
    """Return what a thread waits for.

    Args:
        state: its state in /proc/PID/task/TID/stat (proc(5)).
        channel: the kernel function that it sleeps in (/proc/PID/task/TID/wchan), None if the kernel hides it.
    """
    if state == "R":
        return "computing"
    if state in "Tt":
        return SUSPENDED
    known = next((words for start, words in _WAIT_CHANNELS if (channel or "").startswith(start)), None)
    if known is not None:
        return known
    if state == "D":
        return "waiting for a disk" + (f" ({channel})" if channel else "")
    return f"waiting in {channel}" if channel else None


def own_work(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the frames, innermost first, without the ones that a forked process has of its parent."""
    own: list[Frame] = []
    for frame in frames:
        own.append(frame)
        if is_in(frame, *PROCESS_BEGIN):
            break
    return tuple(own)


def is_in(frame: Frame, function: str, paths: str | tuple[str, ...]) -> bool:
    """Return whether a frame is in the function of this name, in a file whose path ends in one of these."""
    return frame.function.rpartition(".")[2] == function and frame.path.endswith(paths)


def folded(frames: Sequence[Frame]) -> list[Frame | int]:
    """Return the frames, with each row of library frames as their number; the innermost and native ones stay."""
    shown: list[Frame | int] = []
    for position, frame in enumerate(frames):
        if frame.is_own or position == 0 or not frame.line:
            shown.append(frame)
        elif shown and isinstance(shown[-1], int):
            shown[-1] += 1
        else:
            shown.append(1)
    return shown


def without_waiting(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames without those in which a training process or a worker waits for the other one."""
    for depth, frame in enumerate(frames):
        if is_in(frame, *FETCH):
            break
        if is_in(frame, *WAIT) or is_in(frame, *_WORKER):
            return frames[depth:]
    return frames


def fetch_part(frame: Frame, source: str) -> str | None:
    """Return the part of a fetch (a word of `WAIT_PARTS`) that the frame of the fetcher is in; None of another."""
    if not is_in(frame, *FETCH):
        return None
    return "collate" if "collate_fn" in source else "other"
