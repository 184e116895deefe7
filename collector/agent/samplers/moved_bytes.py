"""Bytes that a process has moved so far: they show that a long wait is a slow transfer of data, not a hang.

/proc/PID/io counts what a process reads and writes: files, pipes and, in some libraries, sockets. It does not count
recv(2) and send(2), by which Python uses sockets. The kernel counts the bytes of each TCP connection, and tells
them over a netlink socket (sock_diag(7)), as `ss -i` asks it. No rights beyond those of the user are needed.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from collector.agent.samplers import procfs

#: NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, and NLM_F_REQUEST | NLM_F_DUMP (linux/netlink.h, linux/sock_diag.h).
_PROTOCOL, _BY_FAMILY, _DUMP = 4, 20, 0x301
_DONE, _ERROR = 3, 2
#: INET_DIAG_INFO (linux/inet_diag.h): the attribute with `struct tcp_info`, and the bit that asks for it.
_INFO = 2
#: TCP_ESTABLISHED, TCP_FIN_WAIT1, TCP_FIN_WAIT2 and TCP_CLOSE_WAIT: bits of the states in which data moves.
_STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_REQUEST = struct.Struct("=BBBxI48x")
#: Size of `struct inet_diag_msg`, the offset of its inode, and that of `tcpi_bytes_acked` in `struct tcp_info`;
#: `tcpi_bytes_received` follows it.
_MESSAGE_BYTES, _INODE_OFFSET, _MOVED_OFFSET = 72, 68, 120
_ANSWER_BYTES = 1 << 16
_TIMEOUT_SECONDS = 0.5
#: Fields of /proc/PID/io: by system calls, and from storage, which page faults of mapped files read too.
_COUNTERS = (b"rchar:", b"wchar:", b"read_bytes:")
#: Most descriptors of a process that are looked at.
_MOST_DESCRIPTORS = 1024


class Moved(NamedTuple):
    """Bytes that a process has moved so far: read and written, and received and sent by its TCP connections."""

    file_bytes: int = 0
    tcp_bytes: int = 0

    def plus(self, other: Moved) -> Moved:
        """Return the bytes of two processes."""
        return Moved(self.file_bytes + other.file_bytes, self.tcp_bytes + other.tcp_bytes)


def moved_bytes(proc: str, pid: int, tcp: Mapping[str, int], inherited: Collection[str] = ()) -> Moved | None:
    """Return the bytes that a process has moved so far; `tcp` are those of all connections (`tcp_moved`).

    A connection that is closed takes its count with it, so the count may fall. None if /proc does not tell.
    `inherited` are sockets that it shares with its parent, whose bytes are the parent's.
    """
    text = procfs.read_file(f"{proc}/{pid}/io")
    if text is None:
        return None
    counts = (procfs.field(b"\n" + text, name) for name in _COUNTERS)
    own = sockets(proc, pid).difference(inherited) if tcp else ()
    return Moved(sum(count or 0 for count in counts), sum(tcp.get(name, 0) for name in own))


def sockets(proc: str, pid: int) -> set[str]:
    """Return the inodes of a process's sockets, as text."""
    found = set()
    try:
        with os.scandir(f"{proc}/{pid}/fd") as entries:
            for entry in islice(entries, _MOST_DESCRIPTORS):
                with suppress(OSError):  # closed meanwhile
                    name = os.readlink(entry.path)
                    if name.startswith("socket:["):
                        found.add(name[len("socket:[") : -1])
    except OSError:
        pass
    return found


def tcp_moved() -> dict[str, int]:
    """Return inode -> bytes received and sent, of each TCP connection here; empty if the kernel does not tell."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _PROTOCOL) as link:
            link.settimeout(_TIMEOUT_SECONDS)
            found: dict[str, int] = {}
            for family in (socket.AF_INET, socket.AF_INET6):
                request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
                link.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, family, 0) + request)
                found |= dict(_answers(link))
            return found
    except (OSError, struct.error):
        return {}


def _answers(link: socket.socket) -> Iterator[tuple[str, int]]:
    """Yield inode and bytes of each connection in the answer to one request."""
    while True:
        answer = memoryview(link.recv(_ANSWER_BYTES))
        while len(answer) >= _HEADER.size:
            length, kind, *_ = _HEADER.unpack_from(answer)
            if kind in (_DONE, _ERROR) or length < _HEADER.size:
                return
            if kind == _BY_FAMILY and (moved := _moved(answer[_HEADER.size : length])) is not None:
                yield moved
            answer = answer[_aligned(length) :]


def _moved(message: memoryview) -> tuple[str, int] | None:
    """Return inode and bytes of one connection; None if this kernel does not count them."""
    (inode,) = struct.unpack_from("=I", message, _INODE_OFFSET)
    attributes = message[_MESSAGE_BYTES:]
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _INFO and length >= _ATTRIBUTE.size + _MOVED_OFFSET + 16:
            return str(inode), sum(struct.unpack_from("=QQ", attributes, _ATTRIBUTE.size + _MOVED_OFFSET))
        if length < _ATTRIBUTE.size:
            return None
        attributes = attributes[_aligned(length) :]
    return None


def _aligned(length: int) -> int:
    return (length + 3) & ~3
