"""Allocator gauges, and what is written when CUDA runs out of memory.

There is no CUDA here: its functions are replaced by ones that return what PyTorch's own allocator reported on a
simulated device (torch.cuda.memory_stats, host_memory_stats, memory_snapshot, _snapshot).
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import gzip
import json
import os
import pickle
import sys
import threading
import time
import tracemalloc
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import wait_for
from tests.recorded_runs import allocator_state, recorded
from training_harness import layout, session
from training_harness.hooks.heap import EVERY_NS
from training_harness.hooks.on_request import allocation_growth, requests
from training_harness.hooks.on_request.requests import POLL_EVERY_NS
from training_harness.hooks.training.cuda_oom import OomHook, install, is_out_of_memory
from training_harness.hooks.training.devices import DeviceGauges, gauges
from training_harness.hooks.training.step_phases import Progress
from training_harness.hooks.training.steps import StepHook
from training_harness.records import DEVICE_MEMORY, HOST_DEVICE, MISSING_INT64

NAMES = [column.name for column in DEVICE_MEMORY.columns[3:]]
STATE = allocator_state()
STATS, UNUSED, PINNED, SNAPSHOT = (STATE[name] for name in ("device", "unused", "host", "snapshot"))
[ERROR] = recorded("out-of-memory").events_of("cuda-oom")
#: Bytes that were requested, that the process may have, and that were free.
ASKED, LIMIT, FREE = (ERROR[f"{name}_bytes"] for name in ("requested", "limit", "free"))
ALLOCATED, RESERVED = (STATS[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "reserved"))


def test_pinned_bytes_in_use_are_missing_if_the_allocator_owns_less():
    """Torch 2.11 reports 189,058,252,800 bytes in use of 629,145,600."""
    pinned = {"allocated_bytes": {"current": 629_145_600}, "active_bytes": {"current": 189_058_252_800}}
    told = dict(zip(NAMES, gauges(STATS, pinned), strict=True))
    assert (told["pinned_allocated_bytes"], told["pinned_active_bytes"]) == (629_145_600, MISSING_INT64)


def test_gauges_follow_the_stream_and_unknown_ones_are_missing():
    full = dict(zip(NAMES, gauges(STATS, PINNED), strict=True))
    pools = STATS["reserved_bytes_by_private_pools"].values()
    now = {
        name: reported["all"]["current"]
        for name, reported in STATS.items()
        if isinstance(reported, dict) and "all" in reported
    }
    assert full == {
        **{name: now[name] for name in NAMES if name in now},
        "allocated_peak_bytes": STATS["allocated_bytes"]["all"]["peak"],
        "reserved_peak_bytes": STATS["reserved_bytes"]["all"]["peak"],
        "allocation_count": now["allocation"],
        "segment_count": now["segment"],
        "alloc_retry_count": STATS["num_alloc_retries"],
        "oom_count": STATS["num_ooms"],
        "device_alloc_count": STATS["num_device_alloc"],
        "device_free_count": STATS["num_device_free"],
        "private_pool_bytes": sum(pool["all"]["current"] for pool in pools),
        "pinned_allocated_bytes": PINNED["allocated_bytes"]["current"],
        "pinned_active_bytes": PINNED["active_bytes"]["current"],
    }
    assert len(pools) == 2
    assert len({*full.values()}) == len(full), "none could be taken for another"
    assert set(gauges({}, {})) == {MISSING_INT64}, "before CUDA is initialised nothing is known, and nothing is 0"
    assert gauges({**STATS, "reserved_bytes_by_private_pools": {}}, PINNED)[NAMES.index("private_pool_bytes")] == 0


def cuda_with(stats: list[dict], **more: object) -> SimpleNamespace:
    """Return a stand-in for torch on a machine with one device per entry of `stats`."""
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: len(stats),
            memory_stats_as_nested_dict=lambda device: stats[device],
            get_allocator_backend=lambda: "native",
            get_device_properties=lambda device: SimpleNamespace(total_memory=LIMIT),
            **more,
        )
    )


def record_gauges(fake: SimpleNamespace, step: int = 0) -> dict[int, dict[str, int]]:
    written: list[tuple[int, ...]] = []
    events = SimpleNamespace(append=lambda kind, **fields: None)
    gauges_of_devices = DeviceGauges(fake)
    gauges_of_devices.write(
        SimpleNamespace(device_memory=written.extend, events=events), step, gauges_of_devices.read()
    )
    return {device: dict(zip(NAMES, values, strict=True)) for _, _, device, *values in written}


def test_every_device_in_use_is_recorded():
    pinned = {"host_memory_stats_as_nested_dict": lambda: PINNED}
    rows = record_gauges(cuda_with([STATS, UNUSED, STATS], **pinned))
    assert sorted(rows) == [0, 2]
    assert rows[2]["pinned_allocated_bytes"] == PINNED["allocated_bytes"]["current"]

    old_torch = record_gauges(cuda_with([STATS]))
    assert old_torch[0]["pinned_allocated_bytes"] == MISSING_INT64

    fake = cuda_with([STATS])
    fake.cuda.get_allocator_backend = lambda: "cudaMallocAsync"
    malloc_async = record_gauges(fake)
    assert malloc_async[0]["reserved_bytes"] == RESERVED
    assert malloc_async[0]["oom_count"] == MISSING_INT64, "it always says 0"


def test_statistics_of_an_intel_gpu_are_read_by_the_same_names():
    """torch.xpu documents these four, and has neither another allocator nor pinned statistics."""
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    known, capacities = {name: STATS[name] for name in names}, []
    xpu = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        memory_stats_as_nested_dict=lambda device: known,
        get_device_properties=lambda device: SimpleNamespace(total_memory=LIMIT),
    )
    idle = SimpleNamespace(is_initialized=lambda: False)
    devices, written = DeviceGauges(SimpleNamespace(cuda=idle, xpu=xpu)), []
    events = SimpleNamespace(append=lambda kind, **fields: capacities.append(fields["total_bytes"]))
    devices.write(SimpleNamespace(device_memory=written.extend, events=events), 3, devices.read())
    [(_, step, device, *values)] = written
    told = dict(zip(NAMES, values, strict=True))
    assert (step, device, capacities) == (3, 0, [LIMIT])
    assert (told["allocated_bytes"], told["reserved_bytes"]) == (ALLOCATED, RESERVED)
    assert told["inactive_split_bytes"] == told["pinned_allocated_bytes"] == MISSING_INT64
    assert DeviceGauges(SimpleNamespace(cuda=idle, xpu=idle)).read() is None


def test_reading_of_a_device_that_was_emptied_before_it_is_written_is_recorded():
    stats, written = [STATS], []
    current = SimpleNamespace(
        device_memory=written.extend, events=SimpleNamespace(append=lambda kind, **fields: None)
    )
    devices = DeviceGauges(cuda_with(stats))
    readings = [devices.read()]
    stats[0] = UNUSED
    while readings[-1].of_devices:
        readings.append(devices.read())
    for step, reading in enumerate(readings):
        devices.write(current, step, reading)
    assert [step for _, step, *_ in written] == list(range(len(readings) - 1))


LARGEST_FIRST = sorted(SNAPSHOT["segments"], key=lambda segment: -segment["total_size"])
SIZES = [segment["total_size"] for segment in LARGEST_FIRST]


def frames_of(entry):
    return [(frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]]


@pytest.fixture
def out_of_memory(tmp_path, monkeypatch):
    """A process whose CUDA has just been initialised: its hook, its progress and its events."""
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
    hook = OomHook(progress, None, fake)

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


def test_cuda_is_not_touched_before_training_initialises_it(out_of_memory, monkeypatch):
    world = out_of_memory
    for name, value in (("_cuda_init", lambda: None), ("_cuda_getDeviceCount", lambda: 1)):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", world.observers.append, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native", raising=False)
    nothing = {"_queued_calls": [], "_lazy_seed_tracker": torch.cuda._LazySeedTracker()}  # whatever ran before
    for name, value in {**nothing, "_cudart": object(), "_initialized": False}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    hook = install(world.progress, None)
    try:
        assert world.observers == []
        torch.cuda.init()  # torch's own, but for the driver
        assert world.observers == [hook.on_error]
    finally:
        hook.remove()


def test_oom_in_a_worker_is_recorded_at_once(out_of_memory, monkeypatch):
    world = out_of_memory
    world.hook.cuda_is_ready()
    monkeypatch.setattr("training_harness.hooks.training.cuda_oom.is_worker", lambda: True)
    for _ in range(5):  # a dataset that tries again
        world.observers[0](1, ASKED, LIMIT, FREE)
    reported = world.events("cuda-oom")
    assert len(reported) == len(list(world.current.run_dir.glob("snapshots/*"))) == 2
    assert (reported[0]["device"], reported[0]["requested_bytes"], reported[0]["allocated_bytes"]) == (
        1,
        ASKED,
        ALLOCATED,
    )
    assert (reported[0]["step"], reported[0]["caught"]) == (None, None), (
        "a worker is in no step; what becomes of it is open"
    )


def test_caught_oom_is_recorded_with_figures_of_its_moment(out_of_memory, monkeypatch):
    world = out_of_memory
    world.hook.cuda_is_ready()
    (observer,) = world.observers
    world.end_step()
    for requested in (ASKED, ASKED // 2):  # a convolution tries again with less
        observer(1, requested, LIMIT, FREE)
    assert world.events("cuda-oom") == [], "what becomes of the error is not known yet"
    allocated = STATS["allocated_bytes"]["all"]
    monkeypatch.setitem(allocated, "current", ALLOCATED // 2)  # the step's temporaries are gone when it ends
    world.end_step()
    (first,) = world.events("cuda-oom")
    assert (first["device"], first["errors_count"], first["requested_bytes"]) == (1, 2, ASKED // 2)
    assert (first["limit_bytes"], first["free_bytes"], first["reserved_bytes"]) == (LIMIT, FREE, RESERVED)
    assert first["allocated_bytes"] == ALLOCATED
    assert (first["step"], first["caught"]) == (1, True)
    saved = json.loads(gzip.decompress((world.current.run_dir / first["path"]).read_bytes()))
    assert [segment["total_size"] for segment in saved["segments"]] == SIZES

    for _ in range(4):  # a search for the batch size that fits
        observer(0, ASKED, LIMIT, FREE)
        world.end_step()
    assert ["path" in event for event in world.events("cuda-oom")] == [True, True, False, False, False]
    sys.excepthook(torch.OutOfMemoryError, torch.OutOfMemoryError("CUDA out of memory."), None)
    assert world.events("cuda-oom")[-1]["is_snapshot_later"], "the last error has one in any case"
    assert world.progress.requests.due_ns > time.monotonic_ns() - POLL_EVERY_NS


def test_oom_records_the_optimizers_of_its_moment(out_of_memory):
    """A GPU's gradients are not there without one: those of the host show that they are read."""
    world, recorded = out_of_memory, []
    weight = torch.nn.Parameter(torch.zeros(256))
    optimizer = torch.optim.SGD([weight])
    steps = StepHook(world.progress)
    world.current.optimizer = lambda time_ns, *sizes: recorded.append(sizes)
    steps.on_step_begin(time.monotonic_ns(), threading.get_ident(), weakref.ref(optimizer))
    steps.on_step_end(time.monotonic_ns(), weakref.ref(optimizer))
    recorded.clear()
    weight.grad = torch.zeros(256)
    world.hook.cuda_is_ready()
    world.observers[0](0, ASKED, LIMIT, FREE)
    assert recorded == [(HOST_DEVICE, 1024, 0)]


def test_fatal_oom_is_recorded_with_its_message_and_a_snapshot(out_of_memory):
    world = out_of_memory
    world.hook.cuda_is_ready()
    world.observers[0](0, ASKED, LIMIT, FREE)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 104.00 MiB.")
    sys.excepthook(type(error), error, None)
    (reported,) = world.events("cuda-oom")
    assert (reported["caught"], reported["type"], reported["requested_bytes"]) == (False, "OutOfMemoryError", ASKED)
    assert (world.current.run_dir / reported["path"]).is_file()
    sys.excepthook(ValueError, ValueError("nothing to do with it"), None)
    assert len(world.events("cuda-oom")) == 1
    world.observers[0](0, ASKED, LIMIT, FREE)  # in the same step, and caught
    sys.excepthook(ValueError, ValueError("nothing to do with it"), None)
    assert [event["caught"] for event in world.events("cuda-oom")] == [False, None]


@pytest.mark.parametrize(
    ("what", "module", "is_running"),
    [
        ("profile", requests, torch._C._autograd._profiler_enabled),
        ("growth", allocation_growth, tracemalloc.is_tracing),
    ],
)
def test_profile_and_growth_end_at_their_limit_and_on_close(out_of_memory, monkeypatch, what, module, is_running):
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
    begun_ns = time.monotonic_ns()
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
    (reported,) = world.events("snapshot")
    assert reported["request"] == f"{what}-2"
    assert reported["begun_ns"] < begun_ns < reported["time_ns"], "the time in which it slowed the process down"
    saved = json.loads(gzip.decompress((world.current.run_dir / reported["path"]).read_bytes()))
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


def test_memory_history_is_recorded_on_request_and_pickled(out_of_memory, monkeypatch):
    world = out_of_memory
    monkeypatch.setenv(layout.MEMORY_HISTORY_VARIABLE, "500")
    world.hook.cuda_is_ready()
    assert world.history == [{"enabled": "all", "stacks": "python", "max_entries": 500}]
    world.observers[0](0, ASKED, LIMIT, FREE)
    world.end_step()
    (reported,) = world.events("cuda-oom")
    assert pickle.loads((world.current.run_dir / reported["pickle"]).read_bytes()) == SNAPSHOT
    saved = json.loads(gzip.decompress((world.current.run_dir / reported["path"]).read_bytes()))
    first = next(frames for s in LARGEST_FIRST for block in s["blocks"] if (frames := frames_of(block)))
    assert saved["frames"][0] == list(first[0])
    world.hook.remove()
    assert world.history[-1] == {"enabled": None}


def test_fatal_oom_is_recorded_without_observers(out_of_memory):
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
    (reported,) = world.events("cuda-oom")
    assert (reported["device"], reported["message"]) == (None, str(error))
    assert "not meaningful" in reported["snapshot_error"]


@pytest.mark.parametrize(
    ("message", "device"),
    [
        ("Allocation on device 1 would exceed allowed memory. (out of memory)", 1),
        ("CUDA out of memory. Tried to allocate 2 MiB. GPU 1 has a total capacity of 2 GiB", 1),
        ("CUDA error: out of memory", None),
        ("Caught OutOfMemoryError in DataLoader worker process 1.\nOriginal: GPU 0 has a total capacity", None),
    ],
)
def test_fatal_oom_without_observers_is_on_the_device_of_its_message(out_of_memory, message, device):
    out_of_memory.hook.cuda_is_ready()
    sys.excepthook(torch.OutOfMemoryError, torch.OutOfMemoryError(message), None)
    (reported,) = out_of_memory.events("cuda-oom")
    assert reported["device"] == device


def test_an_odd_error_of_the_script_reaches_its_own_excepthook(out_of_memory, monkeypatch):
    own_cause, unprintable, seen = ValueError(), type("Unprintable", (Exception,), {"__str__": None})(), []
    own_cause.__cause__ = own_cause
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args[1]))
    out_of_memory.hook.cuda_is_ready()
    for error in (own_cause, unprintable):
        sys.excepthook(type(error), error, None)
    assert (seen, out_of_memory.events("cuda-oom")) == ([own_cause, unprintable], [])


def test_error_raised_from_an_oom_is_fatal_with_the_message_of_the_oom(out_of_memory):
    out_of_memory.hook.cuda_is_ready()
    out_of_memory.observers[0](0, ASKED, LIMIT, FREE)
    error = ValueError("training failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    sys.excepthook(ValueError, error, None)
    (reported,) = out_of_memory.events("cuda-oom")
    assert (reported["caught"], reported["message"]) == (False, "CUDA out of memory.")


def test_error_that_is_raised_while_another_is_handled_is_recorded_so(out_of_memory):
    out_of_memory.hook.cuda_is_ready()
    first, second = (torch.OutOfMemoryError("CUDA out of memory.") for _ in range(2))
    second.__context__ = first
    for error in (first, second):
        out_of_memory.observers[0](0, ASKED, LIMIT, FREE)
        sys.excepthook(type(error), error, None)
    assert [event["in_handler"] for event in out_of_memory.events("cuda-oom")] == [False, True]


def test_caught_oom_has_the_line_that_took_the_memory(out_of_memory):
    """In a thread of the autograd engine, the observer has no frames above it."""
    world = out_of_memory
    world.hook.cuda_is_ready()
    for call in (lambda observer, arguments: observer(*arguments), _thread.start_new_thread):
        call(world.observers[0], (0, ASKED, LIMIT, FREE))
        wait_for(lambda: world.hook._errors, "the error")
        world.end_step()
    with_line, without = world.events("cuda-oom")
    assert "test_memory_hooks.py" in with_line["site"]
    assert "site" not in without
    assert without["allocated_bytes"] == with_line["allocated_bytes"] == ALLOCATED


@pytest.mark.parametrize(("trains", "caught"), [(True, False), (False, None)])
def test_oom_that_ends_a_thread_says_whether_that_one_trains(out_of_memory, monkeypatch, trains, caught):
    world = out_of_memory
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    world.hook.cuda_is_ready()

    def train():
        world.progress.on_optimizer(threading.get_ident() if trains else 1)
        world.observers[0](0, ASKED, LIMIT, FREE)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()
    (reported,) = world.events("cuda-oom")
    assert (reported["thread"], reported["caught"], reported["requested_bytes"]) == ("trainer", caught, ASKED)
    assert reported["site"].endswith("in train")


def test_only_cuda_out_of_memory_errors_are_recognised():
    assert is_out_of_memory(torch.OutOfMemoryError("Caught OutOfMemoryError in replica 1 on device 1."))
    assert is_out_of_memory(
        RuntimeError(
            "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
            '"/__w/pytorch/pytorch/c10/cuda/CUDACachingAllocator.cpp":1377, please report a bug to PyTorch. '
        )
    )
    assert not is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(MemoryError())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")
def test_heap_is_read_once_in_a_quarter_of_a_second(out_of_memory):
    rows: list[tuple[int, ...]] = []
    out_of_memory.current.heap = lambda *row: rows.append(row)
    begun_ns = time.monotonic_ns()
    while time.monotonic_ns() < begun_ns + 1.5 * EVERY_NS:
        out_of_memory.end_step()
    assert 1 <= len(rows) <= 2
