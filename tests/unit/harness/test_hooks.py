"""Pure parts of the hooks: payload sizes, step boundaries."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from training_harness import layout, session
from training_harness.hooks.loading.fetch_meter import FetchMeter
from training_harness.hooks.loading.loader import LoaderHook, payload_bytes
from training_harness.hooks.loading.loader_ids import LoaderRegistry, _record_site, _site, site_of
from training_harness.hooks.patching import Hook
from training_harness.hooks.training import checkpoints, compilations
from training_harness.hooks.training.devices import FORWARD, OTHER
from training_harness.hooks.training.step_phases import UNREAD, Progress
from training_harness.hooks.training.steps import StepHook
from training_harness.records import MISSING_INT64, STEP


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(4, 8), 128),
        ((torch.zeros(4), {"y": torch.zeros(2, dtype=torch.int64), "z": [np.zeros(3)]}), 16 + 16 + 24),
        (["a", "b"], MISSING_INT64),
        ([torch.zeros(1)] * 1000, MISSING_INT64),
    ],
)
def test_payload_counts_nested_tensors_and_arrays(batch, expected):
    assert payload_bytes(batch) == expected


def test_payload_of_a_user_container_calls_no_user_code():
    def refuse(self):
        raise AssertionError("the payload called user code")

    kinds = [type(kind.__name__, (kind,), {"__iter__": refuse, "values": refuse}) for kind in (list, tuple)]
    mapping = type("Mapping", (dict,), {"__iter__": refuse, "values": refuse})
    claims = type("Claims", (), {"__class__": property(refuse)})()
    assert payload_bytes([*(kind([torch.zeros(2)]) for kind in kinds), mapping(x=torch.zeros(3)), claims]) == 28


def test_registry_of_many_different_loaders_is_bounded(steps):
    register = LoaderRegistry(session.active)
    numbers = []
    for length in range(1, 1000):
        loader = DataLoader(range(length))
        numbers.append(register.info(loader).number)
    assert numbers == list(range(999))
    assert len(register._same_settings) < 300


def test_loader_with_a_timeout_of_numpy_is_described(steps):
    LoaderRegistry(session.active).info(DataLoader(range(4), num_workers=1, timeout=np.int64(30)))
    (events,) = (session.active.run_dir / "events").iterdir()
    (event,) = (json.loads(line) for line in events.read_text().splitlines() if '"loader"' in line)
    assert event["timeout_seconds"] == 30


def test_loader_is_named_by_its_own_statement_of_a_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "text = 'é'; train = here(sys._getframe()); val = [here(sys._getframe())]\nhere(sys._getframe())\n"
    )
    seen = []
    exec(compile(script.read_text(), script, "exec"), {"here": lambda at: seen.append(_site(at)), "sys": sys})
    assert [(site["line"], site["variable"]) for site in seen] == [(1, "train"), (1, "val"), (2, None)]


_LIBRARY = """
def make():
    loader = DataLoader(range(4))
    record(loader, sys._getframe())
    return loader

def fit():
    used(make())
    return "a model"

class Ready(DataLoader):
    def __init__(self):
        super().__init__(range(4))
        record(self, sys._getframe())
        used(self)
"""


def test_loader_that_a_library_makes_and_uses_in_one_call_is_not_named_by_the_result(tmp_path):
    script, library = tmp_path / "train.py", tmp_path / "site-packages" / "library.py"
    script.write_text("train = make()\nused(train)\nmodel = fit()\nready = Ready()\n")
    seen = []
    names = {"DataLoader": DataLoader, "record": _record_site, "sys": sys, "__name__": "library"}
    names["used"] = lambda loader: seen.append(site_of(loader))
    exec(compile(_LIBRARY, library, "exec"), names)
    exec(compile(script.read_text(), script, "exec"), names)
    assert [(site["line"], site["variable"]) for site in seen] == [(1, "train"), (3, None), (4, "ready")]


def test_search_for_the_place_of_a_loader_keeps_nothing_of_the_callers_alive():
    class Trainer:
        def __init__(self, loader):
            outputs = {1, 2}
            reference = weakref.ref(outputs)
            site_of(loader)
            outputs = None
            self.is_free = reference() is None

    loader = DataLoader(range(4))
    _record_site(loader, sys._getframe())
    assert Trainer(loader).is_free


def test_unknown_iterator_class_is_reported_once(steps):
    current, hook = session.active, LoaderHook(Progress())
    for _ in range(3):
        state = SimpleNamespace()
        hook.probe_queue(Optimizer(), state)
        assert state.has_queue is False
    (events,) = (current.run_dir / "events").iterdir()
    assert events.read_text().count("hook-disabled") == 1


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """A step hook in a session, and the steps that it has recorded."""
    monkeypatch.delenv(layout.DISABLED_VARIABLE, raising=False)
    current = session.start(layout.create_run(tmp_path, name="steps", argv=[]))
    recorded: list[int] = []
    current.step = lambda record: recorded.append(record[1])
    progress = Progress()
    progress.announce(current)
    yield StepHook(progress), recorded
    session.stop()


class Optimizer:
    pass


def checkpoints_of(run_dir):
    (events,) = (run_dir / "events").iterdir()
    return [json.loads(line) for line in events.read_text().splitlines() if '"checkpoint"' in line]


def test_files_that_are_saved_together_are_one_checkpoint_and_stay_the_same(steps, tmp_path):
    plain, state = io.BytesIO(), {"weight": torch.arange(4.0)}
    torch.save(state, plain)
    original = torch.save
    hook = checkpoints.install()
    try:
        hooked = io.BytesIO()
        torch.save(state, hooked)
        torch.save(obj=state, f=tmp_path / "optimizer.pt")
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save is torch.serialization.save
    finally:
        hook.remove()
    assert torch.save is torch.serialization.save is original
    assert hooked.getvalue() == plain.getvalue()
    (event,) = checkpoints_of(session.active.run_dir)
    assert event["saves_count"] == 1, "the next event sums up the second file"
    assert 0 < event["saves_ns"] <= event["time_ns"] - event["begun_ns"]


def test_checkpoint_sums_up_the_saves_of_the_main_thread_since_its_last_event(steps, monkeypatch):
    def save_later(seconds):
        now_ns = time.monotonic_ns() + seconds * 10**9
        monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
        torch.save({}, io.BytesIO())

    hook = checkpoints.install()
    try:
        save_later(0)
        save_later(0)  # a second file, without an event
        thread = threading.Thread(target=save_later, args=(10,))
        thread.start()
        thread.join()
        save_later(20)
    finally:
        hook.remove()
    assert [event["saves_count"] for event in checkpoints_of(session.active.run_dir)] == [1, None, 2]


@pytest.fixture
def measurements(monkeypatch):
    """Class that Dynamo records compilations with, without Dynamo."""
    kind = type("CompilationMetrics", (), {"create": staticmethod(dict)})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(CompilationMetrics=kind))
    return kind


def test_backward_pass_is_compiled_again_if_its_forward_pass_was(steps, measurements):
    reasons = {"0/0": None, "1/0": None, "1/1": "1/0: k == 2.0  # y = x * k", "2/1": "No reason was found"}
    hook = compilations.install(Progress())
    for compile_id, reason in reasons.items():
        measured = {"co_name": "f", "co_filename": "train.py", "co_firstlineno": 1, "recompile_reason": reason}
        measurements.create(measured | {"compile_id": compile_id, "start_time_us": 0, "end_time_us": 1})
    for compile_id, microseconds in [("0/0", 100), ("1/1", 10)]:
        passed = {"compile_id": compile_id, "is_forward": False, "start_time_us": 0, "end_time_us": microseconds}
        assert measurements.create(passed) == passed
    hook.remove()
    (events,) = (session.active.run_dir / "events").iterdir()
    compiled = [json.loads(line) for line in events.read_text().splitlines() if '"compilation"' in line]
    assert [event["again_ns"] for event in compiled] == [0, 0, 1_000, 2_000, 2_000, 12_000]
    assert [event["reason"] for event in compiled[2:4]] == ["k == 2.0", "No reason was found"]


def test_compilations_of_an_older_torch_are_not_measured(measurements):
    del measurements.create
    progress = Progress()
    assert compilations.install(progress) is None
    assert progress.capabilities == {"compilation": False}


def play(hook: StepHook, *optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        hook.on_step_begin(time.monotonic_ns(), threading.get_ident(), weakref.ref(optimizer))
        hook.on_step_end(time.monotonic_ns(), weakref.ref(optimizer))


def test_two_optimizers_in_turn_make_one_step(steps):
    hook, recorded = steps
    generator, critic = Optimizer(), Optimizer()
    play(hook, *[generator, critic] * 5)
    assert recorded == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cpu_at_begin", [0, UNREAD])
def test_data_wait_is_not_counted_as_time_outside_the_step(steps, cpu_at_begin):
    progress, records, ms = Progress(), [], 1_000_000
    session.active.step = records.append
    progress.end(session.active, 0, cpu_at_begin)
    progress.mark(OTHER, 90 * ms, 0 if cpu_at_begin == 0 else UNREAD)  # the loop waits for its data
    progress.mark(FORWARD, 94 * ms, 4 * ms)
    progress.mark(OTHER, 96 * ms, 6 * ms)  # and computes its loss
    progress.end(session.active, 97 * ms)
    outside_cpu_ns = records[-1][9]
    if cpu_at_begin == UNREAD:
        assert outside_cpu_ns == MISSING_INT64
    else:
        assert outside_cpu_ns == pytest.approx(2 * ms, rel=0.05)


def test_another_optimizer_ends_steps_if_the_first_is_unused_or_gone(steps):
    hook, recorded = steps
    first, second = Optimizer(), Optimizer()
    play(hook, first, second, second, second)
    assert recorded == [0, 1, 2]
    del second
    play(hook, first, first)
    assert recorded == [0, 1, 2, 3, 4]


def test_optimizers_that_end_together_end_no_step_of_their_own(steps):
    """The last calls of a function run when its optimizers are gone."""
    hook, recorded = steps
    optimizers = [Optimizer() for _ in range(3)]
    references = [weakref.ref(optimizer) for optimizer in optimizers]
    play(hook, *optimizers * 2)
    optimizers.clear()
    for reference in references:
        hook.on_step_begin(time.monotonic_ns(), threading.get_ident(), reference)
        hook.on_step_end(time.monotonic_ns(), reference)
    assert recorded == [0, 1, 2]
    play(hook, Optimizer())
    assert recorded == [0, 1, 2, 3]


def test_removed_hook_restores_the_original_and_keeps_later_wrappers():
    class Owner:
        def method(self):
            return "original"

    original = Owner.method
    hook = Hook("test")
    hook.replace(Owner, "method", lambda inner: lambda self: f"seen {inner(self)}")
    assert Owner().method() == "seen original"
    hook.remove()
    assert Owner.method is original

    hook = Hook("test")
    hook.replace(Owner, "method", lambda inner: lambda self: inner(self) + "!")
    ours = Owner.method
    Owner.method = lambda self: ours(self) + " and theirs"
    hook.remove()
    assert Owner().method() == "original! and theirs"


def test_exception_of_a_signal_handler_in_a_hook_reaches_training():
    def handler(number, frame):
        raise RuntimeError("DataLoader worker is killed by signal")

    def interrupted():
        try:
            signal.raise_signal(signal.SIGUSR1)
        except RuntimeError as error:
            hook.fail(error)

    hook = Hook("test")
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="killed by signal"):
            interrupted()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert hook.active
    hook.fail(RuntimeError("its own"))
    assert not hook.active


def test_fetch_counts_the_cpu_time_of_children():
    meter = FetchMeter()
    meter.begin()
    subprocess.run([sys.executable, "-c", "sum(range(1_000_000))"], check=True)
    fetched = meter.end()
    assert fetched.children_cpu_ns > 1_000_000
    assert fetched.cpu_ns < fetched.wall_ns


def test_run_queue_time_does_not_exceed_the_fetch(tmp_path):
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("0 0 0")
    meter = FetchMeter()
    os.close(meter._schedstat)
    meter._schedstat = os.open(schedstat, os.O_RDONLY)
    meter.begin()
    schedstat.write_text(f"0 {10**12} 0")  # the core was lost after the fetch, before the meter had read it
    fetched = meter.end()
    assert fetched.blocked_ns == 0
    assert fetched.run_queue_ns + fetched.cpu_ns == max(fetched.wall_ns, fetched.cpu_ns)


def test_request_to_the_training_shortens_no_wait_for_a_batch(tmp_path, monkeypatch):
    current = session.Session(tmp_path)
    monkeypatch.setattr(session, "active", current)
    progress = Progress()
    assert progress.requests.due_ns == 0, "a request is under way, such as a profile"
    progress.follow_batches(has_optimizer=True)
    arrived_ns = time.monotonic_ns()
    requested_ns = arrived_ns - 5_000_000
    progress.begin(requested_ns - 1_000_000)
    state = SimpleNamespace(slots_count=None, samples={})
    LoaderHook(progress).on_yield(
        state, (0, 0, 0), threading.get_ident(), (requested_ns, arrived_ns), (0, 0, 0, 0, 0), 0
    )
    progress.end(current, arrived_ns)
    (step,) = current.writers["step"]._pending
    assert step[[column.name for column in STEP.columns].index("data_wait_ns")] == 5_000_000


def test_the_line_of_an_error_is_that_of_the_script_and_not_of_a_compiled_library():
    """Cython gives the paths of its frames in the folder that a package was built in."""
    compiled = {}
    exec(compile("def get_loc(): raise KeyError(1)", "pandas/_libs/index.pyx", "exec"), compiled)
    with pytest.raises(KeyError) as raised:
        compiled["get_loc"]()
    assert session.site_of(raised.value.__traceback__).partition(":")[0] == __file__
