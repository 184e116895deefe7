"""Memory of the C library's heap, in use and free: a `heap` record every quarter of a second.

Memory that is freed in the middle of the heap stays resident until something fits into it. So a process may grow
although it keeps no more than before, and only its allocator can tell (mallinfo2(3), glibc 2.33). A reading
takes the locks that every allocation takes, and changes nothing.
"""

from __future__ import annotations

import ctypes
import sys
import time

from training_harness import session

#: Nanoseconds between two readings.
EVERY_NS = 250_000_000
#: Pause after a reading, in multiples of its CPU time. A reading visits every free block: it takes 5 µs for a small
#: heap, and 45 ms for one with 100,000 holes, which is then read once in 90 s.
_PAUSE_RATIO = 2000
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


class HeapGauge:
    """Reads the heap of this process.

    Args:
        first_ns: when the first reading is due.

    Attributes:
        due_ns: when the next reading is due; never where the C library has no `mallinfo2`.
    """

    def __init__(self, *, first_ns: int = 0) -> None:
        self.due_ns = first_ns
        try:
            self._mallinfo2 = ctypes.CDLL(None).mallinfo2
            self._mallinfo2.restype = _Mallinfo2
        except (AttributeError, OSError):  # the other hooks must not go with it
            self.due_ns = sys.maxsize

    def record(self, current: session.Session) -> None:
        """Write one record."""
        begun_cpu_ns = time.thread_time_ns()
        heap = self._mallinfo2()
        now_ns = time.monotonic_ns()
        current.heap(now_ns, heap.uordblks + heap.hblkhd, heap.fordblks)
        self.due_ns = next_due_ns(now_ns, begun_cpu_ns, EVERY_NS)


def next_due_ns(now_ns: int, begun_cpu_ns: int, every_ns: int) -> int:
    """Return when to take the next reading, from the thread's CPU time at the start of this one."""
    return now_ns + max(every_ns, _PAUSE_RATIO * (time.thread_time_ns() - begun_cpu_ns))
