"""Stages: the time of each, the readings of the CPU clock, and calls that stay unchanged."""

from __future__ import annotations

import ast
import gc
import inspect
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
import torch

from training_harness import layout, session, stage
from training_harness.hooks.patching import Hook
from training_harness.hooks.stages import stage_calls, stages
from training_harness.installation import TRIGGERS
from training_harness.records import INLINE_WORKER, MISSING_INT32, MISSING_INT64

MS = 1_000_000


class Clock:
    """Stands for the `time` module: `pass_ns` passes, a part of it on the CPU."""

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0

    def pass_ns(self, wall_ns: int, cpu_ns: int) -> None:
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns

    def monotonic_ns(self) -> int:
        return self.wall_ns

    def thread_time_ns(self) -> int:
        return self.cpu_ns


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stages, "time", clock)
    return clock


@pytest.fixture
def stage_rows(tmp_path, monkeypatch):
    """Rows that are recorded: (loader, epoch, index, worker, stage, calls, own ns, CPU ns)."""
    monkeypatch.delenv(layout.DISABLED_VARIABLE, raising=False)
    monkeypatch.setattr(stages.recording, "hook", Hook("stage"))
    stages._forget()
    current = session.start(layout.create_run(tmp_path, name="stages", argv=[]))
    rows: list[tuple] = []
    current.stage = lambda records: rows.extend(record[1:] for record in records)
    yield rows
    session.stop()
    stages._forget()


def test_stage_excludes_nested_stages_and_is_written_once_per_batch(clock, stage_rows):
    for _ in range(2):
        with stage("augment"):
            clock.pass_ns(3 * MS, 2 * MS)
            with stage("read"):
                clock.pass_ns(5 * MS, 1 * MS)
            clock.pass_ns(1 * MS, 1 * MS)
    stages.write_fetch_stages(clock.wall_ns, 0, 1, 2, 3)
    assert sorted(stage_rows) == [
        (0, 1, 2, 3, b"augment", 2, 8 * MS, 6 * MS),
        (0, 1, 2, 3, b"read", 2, 10 * MS, 2 * MS),
    ]
    stages.write_fetch_stages(clock.wall_ns, 0, 1, 3, 3)
    assert len(stage_rows) == 2, "the next batch called nothing"


def test_stages_of_the_loop_belong_to_its_current_batch(clock, stage_rows):
    for index in range(2):
        stages.flush()
        stages.local.tally.batch = 0, 0, index
        with stage("copy"):
            clock.pass_ns(MS, MS)
    stages.flush()
    assert stage_rows == [(0, 0, index, MISSING_INT32, b"copy", 1, MS, MS) for index in range(2)]


def test_batches_in_close_succession_share_a_record(clock, stage_rows):
    stages.due_ns = 0
    stages.local.tally.batch = 0, 0, 0
    for index in range(1, 7):
        with stage("convert"):
            clock.pass_ns(session.HOLD_NS // 2, 0)
        if clock.wall_ns >= stages.due_ns:
            stages.write_loop_stages(clock.wall_ns)
        stages.local.tally.batch = 0, 0, index
    stages.flush()
    assert [(row[2], row[5]) for row in stage_rows] == [(0, 1), (2, 2), (4, 2), (6, 1)]


def test_stages_of_a_loop_wait_apart_from_those_of_the_batches_that_it_makes(clock, stage_rows):
    stages.due_ns = clock.wall_ns + session.HOLD_NS
    for index in range(2):
        stages.begin_fetch(clock.wall_ns)
        if index:
            with stage("decode"):
                clock.pass_ns(MS, MS)
        stages.end_fetch(clock.wall_ns, 0, 0, index)
        stages.local.tally.batch = 0, 0, index
        with stage("copy"):
            clock.pass_ns(MS, 0)
    assert stage_rows == [(0, 0, 1, INLINE_WORKER, b"decode", 1, MS, MS)]
    stages.begin_fetch(clock.wall_ns)
    stages.return_to_loop()  # the next batch cannot be made
    stages.flush()
    assert stage_rows[1:] == [(0, 0, 1, MISSING_INT32, b"copy", 2, 2 * MS, 0)]


def test_another_thread_writes_no_stages_of_a_batch_that_is_being_made(clock, stage_rows):
    stages.due_ns = clock.wall_ns + session.HOLD_NS
    with stage("copy"):
        clock.pass_ns(MS, 0)
    stages.begin_fetch(clock.wall_ns)
    with stage("decode"):
        clock.pass_ns(MS, 0)
    other = threading.Thread(target=stages.write_loop_stages, args=(clock.wall_ns,))
    other.start()
    other.join()
    stages.end_fetch(clock.wall_ns, 0, 0, 0)
    stages.flush()
    assert sorted(row[4] for row in stage_rows) == [b"copy", b"decode"]
    assert {row[3] for row in stage_rows if row[4] == b"decode"} == {INLINE_WORKER}


def test_cpu_time_of_short_calls_is_sampled_and_scaled(clock, stage_rows):
    read: list[int] = []
    clock.thread_time_ns = lambda: read.append(clock.wall_ns) or clock.cpu_ns
    work = stage_calls.time_calls(clock.pass_ns, "augment", stages.recording.hook)
    for _ in range(32):
        work(10_000, 5_000)
    assert len(read) == 2 * 2
    stages.write_fetch_stages(clock.wall_ns, 0, 0, 0, 0)
    work(10_000, 5_000)
    read.clear()
    for _ in range(3):
        work(MS, MS)
    assert len(read) == 2 * 2, "a long call makes the next one be measured, and that the one after it"
    stages.write_fetch_stages(clock.wall_ns, 0, 0, 1, 0)
    for _ in range(2):
        work(10_000, 5_000)
    stages.write_fetch_stages(clock.wall_ns, 0, 0, 2, 0)
    work(10_000, 5_000)
    stages.write_fetch_stages(clock.wall_ns, 0, 0, 3, 0)
    assert [row[5:] for row in stage_rows[:1]] == [(32, 320_000, 160_000)]
    assert stage_rows[3][5:] == (1, 10_000, MISSING_INT64), "CPU time that was not measured is missing, not 0"


def test_stages_of_helper_threads_count_for_the_batch(stage_rows):
    def helper() -> None:
        with stage("decode"):
            pass

    def other_loader() -> None:
        stages.local.tally.batch = 1, 0, 0
        with stage("decode"):
            pass
        stages.flush()
        with stage("copy"):
            pass
        ready.set()
        go_on.wait()
        stages.flush()

    ready, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=other_loader)
    other.start()
    ready.wait()
    for _ in range(2):
        thread = threading.Thread(target=helper)
        thread.start()
        thread.join()
    with stage("decode"):
        pass
    stages.write_fetch_stages(0, 0, 0, 0, 2)
    go_on.set()
    other.join()
    assert [row[:6] for row in stage_rows] == [
        (1, 0, 0, MISSING_INT32, b"decode", 1),
        (0, 0, 0, 2, b"decode", 3),
        (1, 0, 0, MISSING_INT32, b"copy", 1),
    ]


def test_stage_has_no_effect_without_recording_and_keeps_metadata(stage_rows):
    @stage("augment")
    def half(value: float) -> float:
        """Half of it."""
        return value / 2

    @stage("augment")
    def broken() -> None:
        raise KeyError("the user's own")

    assert (half(4), half.__name__, half.__doc__) == (2, "half", "Half of it.")
    with pytest.raises(KeyError, match="own"):
        broken()
    with stage("ä" * 20):
        pass
    stages.write_fetch_stages(0, 0, 0, 0, 0)
    assert [(row[4].decode(), row[5]) for row in stage_rows] == [("augment", 2), ("ä" * 12, 1)]
    stages.recording.hook.active = False
    assert half(4) == 2
    with stage("augment"):
        pass
    assert not stages.pending_tallies
    stages.recording.hook.active = True
    with stage([]):  # type: ignore[arg-type]
        pass
    assert not stages.recording.hook.active, "not hashable: switched off, not raised"


def test_replaced_function_looks_unchanged_and_is_restored(stage_rows, tmp_path):
    before, loader = cv2.imread, np.load
    hooks = [stage_calls.install("cv2"), stage_calls.install("numpy")]
    assert cv2.imread is not before
    assert (cv2.imread.__name__, cv2.imread.__doc__) == (before.__name__, before.__doc__)
    assert inspect.signature(np.load) == inspect.signature(loader)
    by_name = pickle.dumps([cv2.imread, np.load])
    assert b"tidegauge" not in by_name
    assert b"training_harness" not in by_name
    picture = np.zeros((8, 8, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), picture)
    assert np.array_equal(cv2.imread(str(tmp_path / "a.png")), picture)
    with pytest.raises(cv2.error):
        cv2.resize(picture, (0, 0))
    stages.write_fetch_stages(0, 0, 0, 0, 0)
    assert sorted(row[4:6] for row in stage_rows) == [(b"read+decode", 1), (b"resize", 1)]
    for hook in hooks:
        hook.remove()
    assert (cv2.imread, np.load) == (before, loader)
    assert pickle.loads(by_name) == [before, loader]


@pytest.mark.parametrize("part", ["enter", "leave"])
def test_failing_stage_hook_disables_itself_and_stays_picklable(stage_rows, monkeypatch, part):
    before, hook = cv2.flip, stage_calls.install("cv2")
    monkeypatch.setattr(stages.Tally, part, lambda *_: 1 / 0)
    try:
        flip = cv2.flip
        assert np.array_equal(flip(np.eye(3), 1), np.eye(3)[:, ::-1])
        assert not hook.active
        assert pickle.loads(pickle.dumps(flip)) is flip
        assert np.array_equal(flip(np.eye(3), 0), np.eye(3)[::-1])
    finally:
        hook.remove()
    assert cv2.flip is before


def test_members_of_a_compose_are_stages_with_reading_separate(stage_rows, monkeypatch, tmp_path):
    class Shrink:
        def __call__(self, path):
            return cv2.resize(cv2.imread(path), (4, 4))

    class ToTensor:
        def __call__(self, picture):
            return torch.from_numpy(picture)

    class Compose:
        def __init__(self, *transforms):
            self.transforms = list(transforms)

        def __call__(self, value):
            for transform in self.transforms:
                value = transform(value)
            return value

    library = ModuleType("albumentations.core.composition")
    library.Compose = Compose
    monkeypatch.setitem(sys.modules, library.__name__, library)
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((8, 8, 3), np.uint8))
    originals = [Shrink.__call__, ToTensor.__call__, Compose.__call__]
    hooks = [stage_calls.install("cv2"), stage_calls.install(library.__name__)]
    made = Compose(Shrink(), ToTensor(), torch.nn.Identity(), lambda tensor: tensor + 1)(str(tmp_path / "a.png"))
    assert made.shape == (4, 4, 3)
    stages.write_fetch_stages(0, 0, 0, 0, 0)
    assert sorted(row[4:6] for row in stage_rows) == [(b"Shrink", 1), (b"convert", 1), (b"read+decode", 1)]
    assert "__call__" not in vars(torch.nn.Identity)
    for hook in reversed(hooks):
        hook.remove()
    assert originals == [Shrink.__call__, ToTensor.__call__, Compose.__call__]


def test_only_copies_to_a_device_are_recorded_as_copies(stage_rows, monkeypatch, clock):
    went: list[tuple] = []

    def to(tensor, *args, **kwargs):
        went.append(args)
        clock.pass_ns(2 * MS, MS)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "cuda", to)
    told: list[int] = []
    # Other test modules of this process may have made such tensor classes.
    monkeypatch.setattr(stage_calls, "_has_method_tables", lambda tensor_class: False)
    hook = stage_calls.install("torch", told.append)
    monkeypatch.setattr(stages.recording, "hook", hook)
    tensor = torch.ones(2)
    on_device = torch.ones(2, device="meta")
    copies = [
        lambda: tensor.to("cuda:1"),
        lambda: tensor.to(0),
        lambda: tensor.to(device=torch.device("cuda")),
        tensor.cuda,
    ]
    others = [
        lambda: tensor.to(torch.float64), lambda: tensor.to("cpu"), lambda: tensor.to(on_device), tensor.to,
        lambda: on_device.to("cuda"), lambda: torch.nn.Parameter(tensor).to("cuda"),
    ]  # fmt: skip
    for move in [*copies, *others]:
        move()
    assert len(went) == len(copies) + len(others)
    assert told == [2 * MS] * len(copies)
    stages.flush()
    assert [row[4:] for row in stage_rows] == [(b"copy", 4, 8 * MS, 4 * MS)]
    hook.remove()
    assert torch.Tensor.to is to


def test_tensor_methods_are_not_replaced_if_a_subclass_may_compare():
    class Marked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    before = torch.Tensor.to
    hook = stage_calls.install("torch")
    try:
        assert torch.Tensor.to is before
    finally:
        hook.remove()
        del Marked
        gc.collect()  # it must not be met by what comes after


def test_warning_about_an_array_names_the_line_that_made_it_a_tensor():
    hook = stage_calls.install("torch")
    array = np.zeros(2)
    array.setflags(write=False)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # it comes once in a process otherwise
    try:
        with pytest.warns(UserWarning, match="not writable") as warned:
            torch.from_numpy(array)
    finally:
        torch.set_warn_always(always)
        hook.remove()
    assert [warning.filename for warning in warned] == [__file__]


def test_shim_waits_for_every_module_with_hooks():
    source = (Path(layout.__file__).parent / "bootstrap" / "shim.py").read_text()
    triggers = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_TRIGGERS"
    )
    assert triggers == TRIGGERS
