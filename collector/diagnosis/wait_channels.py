"""Classify what a thread waits for, by the kernel function in which it waits (/proc/PID/wchan).

The collector notes it at each tick, for the main thread of each process, in which workers fetch. This tells a read
from a lock, a sleep or a child process by where the workers wait. How many bytes they read does not tell: those may
have come from the page cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_MIN_WAITS = 4  # samples of a waiting thread
_MOSTLY = 0.5
#: What a wait is for, by how the name of the kernel function begins; the first that fits counts.
_CHANNELS = (
    ("child", ("do_wait", "kernel_wait", "wait_consider", "__do_sys_wait")),
    ("sleep", ("hrtimer_nanosleep", "do_nanosleep", "common_nsleep", "__x64_sys_clock_nano")),
    (
        "lock",
        (
            "futex",
            "do_futex",
            "fcntl_setlk",
            "flock_lock",
            "posix_lock",
            "locks_",
            "do_semtimedop",
            "rwsem",
            "down_",
        ),
    ),
    ("pipe", ("pipe_", "anon_pipe", "fifo_pipe", "wait_for_partner")),
    (
        "network",
        ("sk_wait", "inet", "tcp", "udp", "wait_woken", "skb_", "__skb", "unix_", "sock_", "vsock", "rds_"),
    ),
    ("service", ("poll_schedule", "do_poll", "do_sys_poll", "ep_poll", "do_epoll", "do_select", "io_cqring")),
    (
        "storage",
        (
            *("io_schedule", "folio_wait", "wait_on_page", "filemap", "bit_wait", "blk", "__bio", "submit_bio"),
            *("blkdev", "nfs", "rpc_wait", "fuse", "request_wait_answer", "p9_", "v9fs", "ceph", "netfs", "cifs"),
            *("smb", "wait_for_response", "cl_", "ll_", "ext4", "xfs", "btrfs", "jbd2", "__lock_page", "do_swap"),
            *("iomap", "zfs", "cv_wait", "dio_", "__iomap"),
        ),
    ),
)
#: Waits for data, and each wait in words.
READS = ("storage", "pipe", "network")
WAITS = {
    "storage": "they read from storage",
    "pipe": "they read from a pipe",
    "network": "they read from the network",
    "lock": "they wait for a lock",
    "sleep": "they sleep (time.sleep or the like)",
    "child": "they wait for a child process",
    "service": "they wait for another process or a network service",
}


def mostly(channels: Iterable[object]) -> str | None:
    """Return a key of `WAITS`; empty where the waits are for several things, None where too few were sampled.

    Args:
        channels: the kernel functions in which samples found the threads.
    """
    kinds = Counter(_kind(str(channel)) for channel in channels if channel)
    count = kinds.total()
    if count < _MIN_WAITS:
        return None
    reads = {kind: kinds[kind] for kind in READS}
    if sum(reads.values()) >= _MOSTLY * count:
        return max(reads, key=reads.__getitem__)
    largest, times = kinds.most_common(1)[0]
    return largest if largest in WAITS and times >= _MOSTLY * count else ""


def _kind(channel: str) -> str:
    return next((kind for kind, begins in _CHANNELS if channel.startswith(begins)), "other")
