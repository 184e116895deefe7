"""The records of device memory are PyTorch's own numbers, step by step, whatever allocates."""

from __future__ import annotations

import json

import pandas as pd
import pytest

#: Gauges that cudaMallocAsync's pool has.
MALLOC_ASYNC_GAUGES = {
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
    "allocated_peak_bytes",
    "reserved_peak_bytes",
}
PINNED = {"pinned_allocated_bytes", "pinned_active_bytes"}


@pytest.fixture
def run_program(watched, tmp_path):
    """Run a program; return the run, its records, and the numbers that it wrote, one row for each step."""

    def start(program, *arguments, **environ):
        run = watched(program, str(tmp_path / "statistics"), *arguments, memory="480M", **environ)
        assert run.done.returncode == 0, run.done.stderr
        said = json.loads((tmp_path / "statistics").read_text())
        records = run.table("device_memory").groupby("step").last()  # an error is recorded in its step, too
        return run, records, pd.DataFrame(said)

    return start


def assert_same(records, said, names):
    assert list(records.index) == list(said.index)
    for name in sorted(names):
        assert list(records[name]) == list(said[name]), name


def test_every_gauge_equals_pytorchs_statistics(run_program):
    run, records, said = run_program("gauges.py")
    assert_same(records, said, said.columns)
    assert run.failed_hooks == []
    for name in ("inactive_split_bytes", "alloc_retry_count", "oom_count", "pinned_active_bytes"):
        assert said[name].max() > 0, f"{name} is not put to the test"


def test_expandable_segments_have_no_inactive_splits(run_program):
    _, records, said = run_program("gauges.py", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert_same(records, said, said.columns)
    assert said["inactive_split_bytes"].max() == 0, "the allocator does not count holes then"


def test_process_share_is_the_limit_of_its_out_of_memory_error(run_program):
    run, records, said = run_program("gauges.py", "--fraction", "0.25")
    assert_same(records, said, said.columns)
    assert said["oom_count"].max() > 0
    (died_of,) = {each["limit"]["name"]: each["limit"]["value"] for each in run.findings("cuda-oom")}.items()
    assert died_of[1] == 0.25 * (480 << 20)


def test_gauges_that_malloc_async_lacks_are_missing(run_program):
    run, records, said = run_program("gauges.py", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert_same(records, said, MALLOC_ASYNC_GAUGES | PINNED)
    missing = set(said.columns) - MALLOC_ASYNC_GAUGES - PINNED
    assert records[sorted(missing)].isna().all(axis=None)
    assert run.failed_hooks == []


def test_private_pool_of_a_captured_graph_is_recorded(run_program):
    run, records, said = run_program("graph.py")
    replayed = records.tail(len(said)).reset_index(drop=True)
    assert_same(replayed, said, said.columns)
    assert said["private_pool_bytes"].min() > 0
    assert run.failed_hooks == []
    assert set(run.table("device_time")["step"]) & set(records.tail(len(said)).index), "the device computes then"


def test_replay_of_a_graph_that_holds_the_optimizer_is_its_step(run_program):
    run, records, said = run_program("graph.py", "--unmarked")
    assert (run.report["run"]["steps"], run.report["run"]["step_unit"]) == (3 + len(said), "optimizer step")
    assert_same(records.tail(len(said)).reset_index(drop=True), said, said.columns)
    assert run.failed_hooks == []
