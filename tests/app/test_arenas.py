"""Memory arenas of the server's threads: their number, and memory that returns to the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPEN_DASHBOARD = """
import ctypes, sys, threading
from pathlib import Path
from streamlit.testing.v1 import AppTest
from collector.agent.samplers.procfs import read_rollup

libc = ctypes.CDLL(None)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

assert not AppTest.from_file("app/frame.py", default_timeout=60).run().exception
"""
ARENAS = """
def arenas_count():
    file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return Path(sys.argv[1]).read_text().count("<heap nr=")

before, together = arenas_count(), threading.Barrier(33)
threads = [threading.Thread(target=lambda: (together.wait(), together.wait())) for _ in range(32)]
for thread in threads:
    thread.start()
together.wait()
print(before, arenas_count())
together.wait()
"""
TAKE_AND_FREE = """
def take(count, size_bytes):
    blocks = (ctypes.c_void_p * count)()  # not a list: that grows, and would come to lie on top of them
    for index in range(count):
        blocks[index] = libc.malloc(size_bytes)
    for block in blocks:
        ctypes.memset(block, 1, size_bytes)
    for block in reversed(blocks):
        libc.free(block)

take(1, 30 * 2**20)
before = read_rollup("/proc", "self").private_dirty_bytes
# An arena is made of heaps of 64 MiB. What was opened fills a part of one, and these fit into its rest: if they
# went on in a second one, a few bytes at the end of the first would keep all of it.
thread = threading.Thread(target=take, args=(40, 2**19))
thread.start()
thread.join()
print(before, read_rollup("/proc", "self").private_dirty_bytes)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")


def run_script(script, home):
    """Run a script in a process that has opened the dashboard; return the two figures that it prints."""
    words = [sys.executable, "-c", OPEN_DASHBOARD + script, str(home / "malloc.xml")]
    environment = {**os.environ, "TIDEGAUGE_HOME": str(home)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return map(int, done.stdout.split())


def test_server_threads_share_few_arenas(tmp_path):
    before, with_threads = run_script(ARENAS, tmp_path)
    assert with_threads <= max(before, 2)


def test_memory_freed_by_a_server_thread_returns_to_the_kernel(tmp_path):
    before_bytes, after_bytes = run_script(TAKE_AND_FREE, tmp_path)
    assert after_bytes - before_bytes < 8 * 2**20
