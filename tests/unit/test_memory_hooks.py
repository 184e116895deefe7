"""Allocator gauges, the census, compact snapshots, and what is written when CUDA runs out of memory.

There is no CUDA here: its functions are stood in for by ones that return the shapes which they are documented to
return (torch.cuda.memory_stats, host_memory_stats, memory_snapshot, _snapshot).
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import pickle
import sys
import time
import tracemalloc
import warnings
from types import SimpleNamespace

import pytest
import torch

from training_harness import layout, session
from training_harness.hooks import census as census_module
from training_harness.hooks import growth, profiling
from training_harness.hooks.census import census
from training_harness.hooks.memory import DeviceGauges, gauges
from training_harness.hooks.oom import OomHook, install, is_out_of_memory
from training_harness.hooks.progress import Progress
from training_harness.hooks.requests import LOOK_EVERY_NS
from training_harness.hooks.snapshots import compact
from training_harness.records import DEVICE_MEMORY, MISSING_INT64

NAMES = [column.name for column in DEVICE_MEMORY.columns[3:]]
STATS = {
    "allocated_bytes": {"all": {"current": 10, "peak": 15, "allocated": 99, "freed": 89}},
    "requested_bytes": {"all": {"current": 9}},
    "active_bytes": {"all": {"current": 11}},
    "reserved_bytes": {"all": {"current": 32, "peak": 64}},
    "inactive_split_bytes": {"all": {"current": 1}},
    "allocation": {"all": {"current": 3}},
    "segment": {"all": {"current": 0}},  # as with expandable segments
    "num_alloc_retries": 4,
    "num_ooms": 5,
    "num_device_alloc": 6,
    "num_device_free": 7,
    "reserved_bytes_by_private_pools": {(0, 1): {"all": {"current": 20}}, (0, 2): {"all": {"current": 22}}},
}
PINNED = {"allocated_bytes": {"current": 8}, "active_bytes": {"current": 2}}
UNUSED = {**STATS, "reserved_bytes": {"all": {"current": 0, "peak": 0, "allocated": 0, "freed": 0}}}


def test_gauges_follow_the_stream_and_leave_out_what_an_allocator_does_not_tell():
    full = dict(zip(NAMES, gauges(STATS, PINNED), strict=True))
    assert full == {
        "allocated_bytes": 10, "requested_bytes": 9, "active_bytes": 11, "reserved_bytes": 32,
        "inactive_split_bytes": 1, "allocated_peak_bytes": 15, "reserved_peak_bytes": 64, "allocation_count": 3,
        "segment_count": 0, "alloc_retry_count": 4, "oom_count": 5, "device_alloc_count": 6,
        "device_free_count": 7, "private_pool_bytes": 42, "pinned_allocated_bytes": 8, "pinned_active_bytes": 2,
    }  # fmt: skip
    assert set(gauges({}, {})) == {MISSING_INT64}, "before CUDA is initialised nothing is known, and nothing is 0"
    assert gauges({**STATS, "reserved_bytes_by_private_pools": {}}, PINNED)[NAMES.index("private_pool_bytes")] == 0


def cuda_with(stats: list[dict], **more: object) -> SimpleNamespace:
    """What stands for torch on a machine with so many devices."""
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: len(stats),
            memory_stats_as_nested_dict=lambda device: stats[device],
            get_allocator_backend=lambda: "native",
            get_device_properties=lambda device: SimpleNamespace(total_memory=1000),
            **more,
        )
    )


def recorded_by(fake: SimpleNamespace, step: int = 0) -> dict[int, dict[str, int]]:
    written: list[tuple[int, ...]] = []
    events = SimpleNamespace(append=lambda kind, **fields: None)
    DeviceGauges(fake).record(SimpleNamespace(device_memory=written.extend, events=events), step)
    return {device: dict(zip(NAMES, values, strict=True)) for _, _, device, *values in written}


def test_every_device_in_use_is_recorded_whatever_the_allocator_tells():
    pinned = {"host_memory_stats_as_nested_dict": lambda: PINNED}
    rows = recorded_by(cuda_with([STATS, UNUSED, STATS], **pinned))
    assert sorted(rows) == [0, 2]
    assert rows[2]["pinned_allocated_bytes"] == 8

    old_torch = recorded_by(cuda_with([STATS]))
    assert old_torch[0]["pinned_allocated_bytes"] == MISSING_INT64

    fake = cuda_with([STATS])
    fake.cuda.get_allocator_backend = lambda: "cudaMallocAsync"
    malloc_async = recorded_by(fake)
    assert malloc_async[0]["reserved_bytes"] == 32
    assert malloc_async[0]["oom_count"] == MISSING_INT64, "it always says 0"


class Hostile:
    """Nothing of this may be asked while the objects of a process are walked."""

    @property
    def __class__(self):
        raise AssertionError("the census called user code")

    def __getattribute__(self, name):
        raise AssertionError("the census called user code")


class HostileMeta(type):
    def __hash__(cls):
        raise AssertionError("the census called user code")

    def __eq__(cls, other):
        raise AssertionError("the census called user code")

    def __instancecheck__(cls, instance):
        raise AssertionError("the census called user code")


class HostileType(metaclass=HostileMeta):
    pass


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the census called user code")


def test_the_census_counts_each_storage_once_and_calls_nothing_of_the_users():
    base = torch.zeros(10, 10)
    with warnings.catch_warnings(action="ignore"):  # a prototype
        nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    objects = [
        Hostile(), HostileType(), base[0], base, base[:5], torch.nn.Parameter(torch.zeros(4)), torch.zeros(4),
        torch.eye(3).to_sparse(), nested, torch.zeros(2).as_subclass(Wrapped), "text", None,
    ]  # fmt: skip
    counted = census(torch, objects)
    assert counted["storage_bytes"] == {"cpu": 400 + 16 + 16}
    first = counted["rows"][0]
    assert (first["shape"], first["tensors_count"], first["storage_bytes"]) == ((10, 10), 1, 400)
    assert {row["type"] for row in counted["rows"]} == {"Tensor", "Parameter"}
    assert counted["subclasses"] == {"Wrapped": 1}
    assert (counted["without_storage_count"], counted["complete"]) == (2, True)
    assert sum(row["tensors_count"] for row in counted["rows"]) == counted["tensors_count"] == 6


def test_the_census_is_bounded_in_time_and_sets_off_no_collection():
    ticks = iter(range(10**6))
    many = [torch.zeros(1) for _ in range(3 * census_module._CLOCK_EVERY)]
    counted = census(torch, many, limit_ns=1, clock_ns=lambda: next(ticks))
    assert counted["complete"] is False
    assert 0 < counted["tensors_count"] < len(many)

    collected: list[str] = []

    def walk():
        collected.clear()
        yield from many
        assert collected == []

    note = lambda phase, info: collected.append(phase)  # noqa: E731
    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        assert census(torch, walk())["tensors_count"] == len(many)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)


FRAMES = [
    {"filename": "train.py", "line": 7, "name": "forward"},
    {"filename": "train.py", "line": 3, "name": "<module>"},
]
SNAPSHOT = {
    "segments": [
        {
            "device": 0, "address": 1, "total_size": size, "segment_type": "large", "segment_pool_id": (0, 0),
            "blocks": [
                {"address": 1, "size": size // 2, "state": "active_allocated", "frames": FRAMES},
                {"address": 2, "size": size // 2, "state": "inactive", "frames": []},
            ],
        }
        for size in (20, 40)
    ],
    "device_traces": [[{"action": "alloc", "addr": 1, "size": 9, "stream": 0, "frames": FRAMES}]],
}  # fmt: skip


def test_a_compact_snapshot_keeps_each_stack_once_and_the_largest_segments_whole():
    small = compact(SNAPSHOT, max_blocks=3)
    assert [segment["total_size"] for segment in small["segments"]] == [40, 20]
    assert [len(segment["blocks"]) for segment in small["segments"]] == [2, 1]
    assert small["blocks_left_out_count"] == 1
    assert small["frames"] == [("train.py", 7, "forward"), ("train.py", 3, "<module>")]
    assert small["stacks"] == [(0, 1)]
    assert small["segments"][0]["blocks"][0]["stack"] == small["device_traces"][0][0]["stack"] == 0
    assert "stack" not in small["segments"][0]["blocks"][1]


@pytest.fixture
def out_of_memory(tmp_path, monkeypatch):
    """A process whose CUDA has just been initialised: its hook, its progress and what it has said."""
    monkeypatch.delenv(layout.DISABLED_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    current = session.start(layout.create_run(tmp_path, name="oom", argv=[]))
    fake = cuda_with([STATS, STATS], memory_snapshot=lambda include_traces=True: SNAPSHOT["segments"])
    history: list[dict] = []
    fake.cuda.memory = SimpleNamespace(
        _record_memory_history=lambda **options: history.append(options), _snapshot=lambda: SNAPSHOT
    )
    observers: list = []
    fake._C = SimpleNamespace(_cuda_attach_out_of_memory_observer=observers.append)
    progress = Progress()
    hook = OomHook(progress, fake)

    def events(kind: str) -> list[dict]:
        lines = [line for path in current.run_dir.glob("events/*") for line in path.read_text().splitlines()]
        return [event for line in lines if (event := json.loads(line))["kind"] == kind]

    def end_step() -> None:
        progress.end(current, time.monotonic_ns())
        progress.catch_up(time.monotonic_ns())

    yield SimpleNamespace(
        hook=hook, current=current, progress=progress, events=events, end_step=end_step, observers=observers,
        history=history, torch=fake,
    )  # fmt: skip
    hook.remove()
    session.stop()


def test_nothing_is_done_to_cuda_before_the_training_initialises_it(out_of_memory, monkeypatch):
    world = out_of_memory
    for name, value in (("_cuda_init", lambda: None), ("_cuda_getDeviceCount", lambda: 1)):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", world.observers.append, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native", raising=False)
    nothing = {"_queued_calls": [], "_lazy_seed_tracker": torch.cuda._LazySeedTracker()}  # whatever ran before
    for name, value in {**nothing, "_cudart": object(), "_initialized": False}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    hook = install(world.progress)
    try:
        assert world.observers == []
        torch.cuda.init()  # torch's own, but for the driver
        assert world.observers == [hook.noticed]
    finally:
        hook.remove()


def test_an_error_in_a_worker_is_told_before_the_training_ends_it_by_a_signal(out_of_memory, monkeypatch):
    world = out_of_memory
    world.hook.cuda_is_ready()
    monkeypatch.setattr("training_harness.hooks.oom.is_worker", lambda: True)
    for _ in range(5):  # a dataset that tries again
        world.observers[0](1, 100, 1000, 30)
    told = world.events("cuda-oom")
    assert len(told) == len(list(world.current.run_dir.glob("snapshots/*"))) == 2
    assert (told[0]["device"], told[0]["requested_bytes"], told[0]["allocated_bytes"]) == (1, 100, 10)
    assert (told[0]["step"], told[0]["caught"]) == (None, None), (
        "a worker is in no step; what becomes of it is open"
    )


def test_an_error_that_the_training_catches_is_told_as_it_was_at_the_error(out_of_memory, monkeypatch):
    world = out_of_memory
    world.hook.cuda_is_ready()
    (observer,) = world.observers
    world.end_step()
    for requested in (100, 50):  # a convolution tries again with less
        observer(1, requested, 1000, 30)
    assert world.events("cuda-oom") == [], "what becomes of the error is not known yet"
    allocated = STATS["allocated_bytes"]["all"]
    monkeypatch.setitem(allocated, "current", 5)  # the step's temporaries are gone when it ends
    world.end_step()
    (first,) = world.events("cuda-oom")
    assert (first["device"], first["errors_count"], first["requested_bytes"]) == (1, 2, 50)
    assert (first["limit_bytes"], first["free_bytes"], first["reserved_bytes"]) == (1000, 30, 32)
    assert first["allocated_bytes"] == 10
    assert (first["step"], first["caught"]) == (1, True)
    saved = json.loads(gzip.decompress((world.current.run_dir / first["path"]).read_bytes()))
    assert [segment["total_size"] for segment in saved["segments"]] == [40, 20]

    for _ in range(4):  # a search for the batch size that fits
        observer(0, 10, 1000, 30)
        world.end_step()
    assert ["path" in event for event in world.events("cuda-oom")] == [True, True, False, False, False]
    sys.excepthook(torch.OutOfMemoryError, torch.OutOfMemoryError("CUDA out of memory."), None)
    assert world.events("cuda-oom")[-1]["is_snapshot_later"], "the last error has one in any case"
    assert world.progress.requests.due_ns > time.monotonic_ns() - LOOK_EVERY_NS


def test_an_error_that_ends_the_training_is_told_with_its_message_and_a_snapshot(out_of_memory):
    world = out_of_memory
    world.hook.cuda_is_ready()
    world.observers[0](0, 100, 1000, 30)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 bytes.")
    sys.excepthook(type(error), error, None)
    (told,) = world.events("cuda-oom")
    assert (told["caught"], told["type"], told["requested_bytes"]) == (False, "OutOfMemoryError", 100)
    assert (world.current.run_dir / told["path"]).is_file()
    sys.excepthook(ValueError, ValueError("nothing to do with it"), None)
    assert len(world.events("cuda-oom")) == 1
    world.observers[0](0, 100, 1000, 30)  # in the same step, and caught
    sys.excepthook(ValueError, ValueError("nothing to do with it"), None)
    assert [event["caught"] for event in world.events("cuda-oom")] == [False, None]


@pytest.mark.parametrize(
    ("what", "module", "is_running"),
    [("profile", profiling, torch._C._autograd._profiler_enabled), ("growth", growth, tracemalloc.is_tracing)],
)
def test_what_lasts_ends_with_its_time_and_with_its_requests(out_of_memory, monkeypatch, what, module, is_running):
    world = out_of_memory

    def ask(number: int) -> None:
        asked = {"what": what, "steps": 5, "expires_wall_ns": time.time_ns() + 10**12}
        (world.current.run_dir / layout.REQUESTS).mkdir(exist_ok=True)
        (world.current.run_dir / layout.REQUESTS / f"{what}-{number}.json").write_text(json.dumps(asked))
        world.progress.requests.due_ns = 0
        world.end_step()

    ask(1)
    assert is_running()
    world.progress.requests.expire(world.current, 1)
    assert is_running(), "its time is not up"
    world.progress.requests.close()
    assert not is_running()

    monkeypatch.setattr(module, "LIMIT_NS", 1)
    ask(2)
    assert is_running()
    if what == "growth":
        child = os.fork()
        if child == 0:
            os._exit(tracemalloc.is_tracing() or gc.get_freeze_count())
        assert os.waitpid(child, 0)[1] == 0, "a worker that is forked meanwhile traces nothing"
        world.end_step()  # it is marked once before its end
    world.progress.requests.expire(world.current, 2)
    assert not is_running()
    assert gc.get_freeze_count() == 0
    (told,) = world.events("snapshot")
    assert told["request"] == f"{what}-2"
    saved = json.loads(gzip.decompress((world.current.run_dir / told["path"]).read_bytes()))
    assert saved["steps_count"] == 0

    if what == "growth":
        tracemalloc.start()
        ask(3)
        assert tracemalloc.is_tracing(), "the training's own goes on"
        tracemalloc.stop()
        assert "uses tracemalloc itself" in world.events("snapshot")[1]["error"]
        ask(4)
        tracemalloc.stop()  # by the training, in the middle of what was asked
        world.end_step()
        failed = world.events("snapshot")[2]
        assert (failed["request"], gc.get_freeze_count()) == ("growth-4", 0)
        assert "must be tracing" in failed["error"]
        ask(5)
        assert is_running(), "what is asked later is answered"
        world.progress.requests.close()


def test_the_history_is_recorded_if_asked_for_and_saved_for_torchs_viewer_too(out_of_memory, monkeypatch):
    world = out_of_memory
    monkeypatch.setenv(layout.MEMORY_HISTORY_VARIABLE, "500")
    world.hook.cuda_is_ready()
    assert world.history == [{"enabled": "all", "stacks": "python", "max_entries": 500}]
    world.observers[0](0, 100, 1000, 30)
    world.end_step()
    (told,) = world.events("cuda-oom")
    assert pickle.loads((world.current.run_dir / told["pickle"]).read_bytes()) == SNAPSHOT
    saved = json.loads(gzip.decompress((world.current.run_dir / told["path"]).read_bytes()))
    assert saved["frames"][0] == ["train.py", 7, "forward"]
    world.hook.remove()
    assert world.history[-1] == {"enabled": None}


def test_an_allocator_without_observers_still_has_its_fatal_error_told(out_of_memory):
    world = out_of_memory

    def refuse(observer):
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver.")

    def no_snapshot(include_traces=True):
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")

    world.torch._C._cuda_attach_out_of_memory_observer = refuse
    world.torch.cuda.memory_snapshot = no_snapshot
    world.hook.cuda_is_ready()
    assert [event["hook"] for event in world.events("hook-disabled")] == ["cuda_oom_observer"]
    error = RuntimeError("CUDA error: out of memory")
    sys.excepthook(RuntimeError, error, None)
    (told,) = world.events("cuda-oom")
    assert (told["device"], told["message"]) == (None, str(error))
    assert "not meaningful" in told["snapshot_error"]


def test_only_cuda_out_of_memory_is_taken_for_it():
    assert is_out_of_memory(torch.OutOfMemoryError("Caught OutOfMemoryError in replica 1 on device 1."))
    assert not is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(MemoryError())
