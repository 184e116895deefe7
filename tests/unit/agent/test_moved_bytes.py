"""Bytes that a process has moved: of files and pipes, and of TCP, which the kernel counts elsewhere."""

from __future__ import annotations

import os
import socket

from collector.agent.samplers.moved_bytes import moved_bytes, tcp_moved


def test_bytes_that_arrive_on_a_connection_count_before_they_are_read():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as connection,
    ):
        before = tcp_moved()
        client.send(b"x" * 5000)
        connection.recv(1, socket.MSG_PEEK)  # they have arrived
        inode = os.readlink(f"/proc/self/fd/{connection.fileno()}")[len("socket:[") : -1]
        after = tcp_moved()
        assert after[inode] - before[inode] == 5000
        own = moved_bytes("/proc", os.getpid(), after).tcp_bytes
        assert own >= 4000
        assert moved_bytes("/proc", os.getpid(), after, {inode}).tcp_bytes < own


def test_bytes_that_are_read_count():
    before = moved_bytes("/proc", os.getpid(), {}).file_bytes
    with open("/dev/zero", "rb", buffering=0) as zeros:
        zeros.read(100_000)
    assert moved_bytes("/proc", os.getpid(), {}).file_bytes - before >= 100_000


def test_a_process_that_may_not_be_read_has_no_count(tmp_path):
    assert moved_bytes(str(tmp_path), 500, {}) is None
