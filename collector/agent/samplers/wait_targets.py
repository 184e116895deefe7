"""The thing that a thread waits for: a remote address, a file, the holder of a file lock, a child process.

The kernel shows the system call that a thread is in (proc(5), /proc/PID/syscall) to those who may trace it. Only
texts of /proc are read: asking a file system that does not answer would hang the collector too.
"""

from __future__ import annotations

import os
import socket
import struct

from collector.agent.samplers import procfs
from collector.stacks import AT_SHARED_LOCK, AWAITS_CHILD, ONE_ENDLESS, wait_words
from training_harness.journal import stat_fields

#: Machine -> numbers of the system calls whose first argument is a descriptor: read, write, send, receive, accept,
#: connect, fsync, flock, fcntl and their like.
_OF_DESCRIPTOR = {
    "x86_64": frozenset({0, 1, 17, 18, 19, 20, 42, 43, 44, 45, 46, 47, 72, 73, 74, 75, 288}),
    "aarch64": frozenset({25, 32, 63, 64, 65, 66, 67, 68, 82, 83, 202, 203, 206, 207, 211, 212, 242}),
}
_STANDARD_INPUT = 0
#: Children that are named, each waited for by the one before.
_MOST_CHILDREN = 3
#: Begin of the words for a child that itself waits for something.
_HELD_UP = ("waiting for", "blocked")
#: Machine -> numbers of epoll_wait and epoll_pwait; their fourth argument is the timeout, -1 for none.
_OF_EVENTS = {"x86_64": frozenset({232, 281}), "aarch64": frozenset({22})}
_NO_TIMEOUT = 0xFFFFFFFF
#: Machine -> number of wait4; its first argument is the pid of the child.
_OF_CHILD = {"x86_64": frozenset({61}), "aarch64": frozenset({260})}
#: Machine -> number of futex; its first argument is the address of the lock.
_OF_FUTEX = {"x86_64": frozenset({202}), "aarch64": frozenset({98})}
#: Bit of the second argument of futex: only the threads of one process use the lock.
_FUTEX_PRIVATE_FLAG = 128


def own_wait(proc: str, pid: int, thread: int) -> str | None:
    """Return what a thread waits for in words, without its target; None if /proc does not tell."""
    directory = f"{proc}/{pid}/task/{thread}"
    stat, channel = procfs.read_file(f"{directory}/stat"), procfs.read_file(f"{directory}/wchan")
    if stat is None:
        return None
    name = (channel or b"").decode(errors="replace").strip("\0\n")
    if name.startswith("futex") and _is_in_shared_memory(proc, pid, thread):
        return AT_SHARED_LOCK
    return wait_words(stat_fields(stat)[0].decode(), None if name in ("", "0") else name)


def _is_in_shared_memory(proc: str, pid: int, thread: int) -> bool:
    """Return whether a thread waits at a futex in memory that processes share.

    A wait for the end of a thread lacks the private flag, too, but its futex is in the memory of one process.
    """
    number, arguments = _system_call(proc, pid, thread)
    if number not in _OF_FUTEX.get(os.uname().machine, ()) or len(arguments) < 2:
        return False
    address, operation = arguments[:2]
    if operation & _FUTEX_PRIVATE_FLAG:
        return False
    for line in (procfs.read_file(f"{proc}/{pid}/maps") or b"").splitlines():
        bounds, access = line.split(maxsplit=2)[:2]
        begin, _, end = bounds.partition(b"-")
        if int(begin, 16) <= address < int(end, 16):
            return access.endswith(b"s")
    return False


def _system_call(proc: str, pid: int, thread: int) -> tuple[int | None, list[int]]:
    """Return the number and the arguments of the system call that a thread is in (proc_pid_syscall(5))."""
    words = (procfs.read_file(f"{proc}/{pid}/task/{thread}/syscall") or b"").split()
    if len(words) < 2 or not words[0].isdigit():  # `running`, or `-1` outside of a system call
        return None, []
    return int(words[0]), [int(word, 16) for word in words[1:]]


def wait_target(proc: str, pid: int, thread: int) -> str | None:
    """Return the address, path, input or process that a thread waits for; None if /proc does not tell."""
    number, arguments = _system_call(proc, pid, thread)
    if number is None:
        return None
    argument, machine = arguments[0], os.uname().machine
    if number in _OF_CHILD.get(machine, ()):
        return _child(proc, argument)
    if number in _OF_EVENTS.get(machine, ()):
        listed = procfs.read_file(f"{proc}/{pid}/fdinfo/{argument}") or b""
        is_endless = arguments[3] & _NO_TIMEOUT == _NO_TIMEOUT
        return ONE_ENDLESS if is_endless and listed.count(b"tfd:") == 1 else None
    if number not in _OF_DESCRIPTOR.get(machine, ()):
        return None
    try:
        name = os.readlink(f"{proc}/{pid}/fd/{argument}")
    except OSError:
        return None
    if name.startswith("socket:["):
        return _remote_address(proc, pid, name.removeprefix("socket:[").rstrip("]"))
    if argument == _STANDARD_INPUT and name.startswith("pipe:["):
        return "standard input"
    if not name.startswith("/"):
        return None
    holder = _lock_holder(proc, pid)
    return f"{name}, held by process {holder}" if holder is not None else name


def _child(proc: str, pid: int, depth: int = _MOST_CHILDREN) -> str | None:
    """Return a child that is waited for, with what it waits for: a shell waits for its own child, say."""
    if not 0 < pid < 2**31:  # any child
        return None
    name = (procfs.read_file(f"{proc}/{pid}/comm") or b"").decode(errors="replace").strip()
    waits = own_wait(proc, pid, pid)
    words = f", which is {waits}" if waits and waits.startswith(_HELD_UP) else ""
    children = (procfs.read_file(f"{proc}/{pid}/task/{pid}/children") or b"").split()
    if waits == AWAITS_CHILD and len(children) == 1 and depth > 1:
        words += f" ({_child(proc, int(children[0]), depth - 1)})"
    return f"{name}, pid {pid}{words}" if name else f"pid {pid}{words}"


def _remote_address(proc: str, pid: int, inode: str) -> str | None:
    """Return address and port at the other end of a TCP connection (proc_pid_net(5))."""
    for table in ("tcp", "tcp6"):
        for line in (procfs.read_file(f"{proc}/{pid}/net/{table}") or b"").decode().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] == inode:
                address, _, port = fields[2].partition(":")
                return f"{_address(address)}:{int(port, 16)}"
    return None


def _address(text: str) -> str:
    """Return an address whose 32-bit words are printed in the byte order of the machine."""
    words = [int(text[begin : begin + 8], 16) for begin in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return socket.inet_ntop(socket.AF_INET, packed)
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]"


def _lock_holder(proc: str, pid: int) -> int | None:
    """Return the process that holds the file lock which another one waits for (proc_locks(5))."""
    holders: dict[str, int] = {}
    for line in (procfs.read_file(f"{proc}/locks") or b"").decode().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "->" and fields[5] == str(pid):
            return holders.get(fields[0])
        if len(fields) > 4 and fields[1] != "->" and fields[4].isdigit():
            holders[fields[0]] = int(fields[4])
    return None
