"""Device times of a step, on a fake CUDA whose events complete when the test says so."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from training_harness.hooks.training.devices import BACKWARD, FORWARD, OPTIMIZE, OTHER, SAMPLE_EVERY_NS, DeviceTimes

START_NS = 10 * SAMPLE_EVERY_NS


class Cuda:
    """A device with its own clock (ms); events up to `done_ms` are complete."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.done_ms = float("inf")
        self.capturing = False
        self.device = 0
        self.working = {0}
        self.made = 0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                cuda.made += 1

            def record(self) -> None:
                self.at_ms = cuda.now_ms

            def query(self) -> bool:
                return self.at_ms <= cuda.done_ms

            def elapsed_time(self, later: Event) -> float:
                assert later.query(), "reading an event that is still to come raises"
                return later.at_ms - self.at_ms

        self.Event = Event

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_device(self) -> int:
        return self.device


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


@pytest.fixture
def world(cuda):
    rows: list[tuple[int, ...]] = []
    times = DeviceTimes(lambda device: device in cuda.working)
    return times, SimpleNamespace(device_time=lambda *row: rows.append(row)), rows


def play(times, session, cuda, step, *, forward=4.0, backward=6.0, micro_batches=1):
    if times.sampling:
        for _ in range(micro_batches):
            for phase, spent_ms in ((FORWARD, forward), (BACKWARD, backward)):
                cuda.now_ms += spent_ms
                times.mark(phase)
        cuda.now_ms += 1
        times.mark(OTHER)
        cuda.now_ms += 2
        times.mark(OPTIMIZE)
    times.end_step(session, step, START_NS + step * SAMPLE_EVERY_NS)


def test_phases_add_up_over_the_micro_batches_of_a_step(world, cuda):
    times, session, rows = world
    play(times, session, cuda, 0)
    play(times, session, cuda, 1, micro_batches=3)
    _, step, device, duration_ns, *phases = rows[0]
    assert (step, device) == (1, 0)
    assert phases == [12e6, 18e6, 2e6, 1e6]
    assert duration_ns == sum(phases)


def test_intel_gpu_is_timed_by_its_own_events(world, cuda, monkeypatch):
    xpu = SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 0, Event=cuda.Event
    )  # it captures no graphs
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(xpu=xpu))
    times, session, rows = world
    play(times, session, cuda, 0)
    play(times, session, cuda, 1)
    [(_, step, device, duration_ns, *phases)] = rows
    assert (step, device, duration_ns) == (1, 0, sum(phases))


def test_hook_never_waits_for_a_device_that_is_behind(world, cuda):
    times, session, rows = world
    cuda.done_ms = -1.0
    for step in range(100):
        play(times, session, cuda, step)
    assert not rows
    made = cuda.made
    cuda.done_ms = float("inf")
    for step in range(100, 110):
        play(times, session, cuda, step)
    assert [row[1] for row in rows] == sorted({row[1] for row in rows})
    assert made == cuda.made < 100, "events are bounded and used again"


def test_only_some_short_steps_are_sampled(world, cuda):
    times, session, rows = world
    for step in range(1000):
        times.end_step(session, step, START_NS + step * SAMPLE_EVERY_NS // 100)
    assert 8 <= len(rows) <= 10


def test_no_event_is_recorded_in_a_graph_or_on_another_device(world, cuda):
    times, session, rows = world
    for step, change in enumerate(({"capturing": True}, {"device": 1})):
        times.end_step(session, step, START_NS + step * SAMPLE_EVERY_NS)
        assert times.sampling
        before = vars(cuda).copy()
        vars(cuda).update(change)
        times.mark(FORWARD)
        assert not times.sampling
        vars(cuda).update(before)
    times.end_step(session, 2, START_NS + SAMPLE_EVERY_NS)
    assert not rows


def test_step_that_does_not_use_the_device_has_no_times(world, cuda):
    times, session, rows = world
    play(times, session, cuda, 0)
    cuda.working = {1}
    play(times, session, cuda, 1)
    made = cuda.made
    for step in range(2, 6):
        play(times, session, cuda, step)
    assert not rows
    assert cuda.made == made, "the first event on a device makes a context there"
