"""The gauge of the C heap: what it reads, and how often."""

from __future__ import annotations

import ctypes
import sys
import time
from types import SimpleNamespace

import pytest

from training_harness.hooks.heap import EVERY_NS, HeapGauge


def heap_reading(gauge: HeapGauge) -> tuple[int, ...]:
    rows: list[tuple[int, ...]] = []
    gauge.record(SimpleNamespace(heap=lambda *row: rows.append(row)))
    return rows[0]


needs_mallinfo2 = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")


@needs_mallinfo2
def test_memory_freed_between_used_blocks_is_free():
    gauge = HeapGauge()
    blocks = [bytes(50_000) for _ in range(2000)]
    _, in_use_full, free_full = heap_reading(gauge)
    del blocks[::2]
    _, in_use_half, free_half = heap_reading(gauge)
    assert in_use_full - in_use_half == pytest.approx(50_000_000, rel=0.1)
    assert free_half - free_full == pytest.approx(50_000_000, rel=0.1)


@needs_mallinfo2
def test_heap_is_read_less_often_if_reading_is_slow(monkeypatch):
    gauge = HeapGauge()
    at_ns, _, _ = heap_reading(gauge)
    assert gauge.due_ns >= at_ns + EVERY_NS
    cpu_clock = iter([0, 10_000_000])
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(cpu_clock))
    at_ns, _, _ = heap_reading(gauge)
    assert gauge.due_ns == at_ns + 20_000_000_000


def test_heap_is_never_read_without_mallinfo2(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert HeapGauge().due_ns == sys.maxsize
