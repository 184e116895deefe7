"""Pages that workers copy by reading, and pages that become theirs in another way."""

import numpy as np
import pytest
from growing_memory import (
    SATURATING,
    SECONDS,
    findings_of,
    kinds,
    memory,
    take_faults,
    training,
)
from simulated_runs import (
    MAIN,
    MIB,
    ns,
    sample_process,
)

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN


def test_copy_on_read_is_found_with_its_limit():
    script = memory(training(), workers_private=250 * SATURATING, host=500 * SATURATING)
    copies = findings_of(script)
    assert [f.kind for f in copies] == ["copy-on-read-growth"]
    assert copies[0].locus.loader == 0
    assert copies[0].limit.value >= 500 * MIB


def test_sparse_samples_are_enough():
    """smaps is read only now and then."""
    sparse = np.full(60, np.nan)
    sparse[[0, 7, 15, 30]] = [10, 40, 90, 110]
    assert kinds(memory(training(), workers_private=sparse)) == ["copy-on-read-growth"]


def test_two_readings_are_enough_after_a_start_that_grew():
    """Neither holds the copies before the first reading, nor the growth of the worker at its start."""
    copied, number = np.linspace(0, 80, 60), np.arange(60)
    sparse = np.where((number == 25) | (number == 46), copied, np.nan)
    script = memory(training(), workers=14.0 * (number > 0), workers_private=sparse)
    take_faults(script, copied)
    assert kinds(script) == ["copy-on-read-growth"]


@pytest.mark.parametrize(("readings", "seen"), [(1, "by resident size alone"), (2, "")])
def test_workers_whose_private_memory_was_hardly_read_are_not_called_fine_without_that(readings, seen):
    held = np.where(np.isin(np.arange(60), [25, 46][:readings]), 0.0, np.nan)
    checks = diagnose(memory(training(), workers_private=held).tables()).checks
    [check] = [check for check in checks if check.name == "workers' memory"]
    assert (check.status, check.reason.partition(":")[0]) == ("fine", seen)


def test_a_tensor_backed_dataset_is_silent():
    assert kinds(memory(training(), workers_private=3 * SATURATING)) == []


def test_pages_released_by_the_parent_are_no_copies():
    assert kinds(memory(training(), main=-250 * SATURATING, workers_private=250 * SATURATING)) == []


def test_pages_that_become_private_after_the_last_batch_are_no_copies():
    """The only other process that shared them has ended or freed them; a copy takes a fault in a batch."""
    script = memory(training(), workers_private=60.0 * (np.arange(60) >= 50))
    for name in ("fetch", "batch", "step"):
        script.parts[name] = [part[part["time_ns"] < SECONDS[49] * 1e9] for part in script.parts[name]]
    assert kinds(script) == []


@pytest.mark.parametrize("readings", [slice(0, 60), slice(45, 60), slice(55, 56)])
@pytest.mark.parametrize(("seconds", "expected"), [(1e-9, []), (14, ["copy-on-read-growth"])])
def test_pages_touched_by_garbage_collections_are_no_growth(seconds, expected, readings):
    """The first collection of the middle generation touches some objects, the first full one all."""

    def copied(at):
        middle, full = (np.clip((at - SECONDS[begin] + 0.01) / seconds, 0, 1) for begin in (20, 30))
        return 30.0 * middle + 60.0 * full

    held = copied(SECONDS - 0.5)  # its batch is over before it is read
    held[[at for at in range(60) if at not in range(60)[readings]]] = np.nan
    script = memory(training(), workers_private=held)
    for samples in script.parts["process"]:  # a reading may lack the clean private pages
        samples.loc[samples["time_ns"] == ns(SECONDS[50]), "uss_bytes"] = np.nan
    sample_process(script, SECONDS[:1] - 1, MAIN, ROLE_MAIN, private=[300 * MIB], rss=[500 * MIB])  # at the fork
    for fetches in script.parts["fetch"]:
        fetches["minor_fault_count"] = np.diff(copied(fetches["time_ns"] / 1e9), prepend=0.0) * MIB // 4096
    assert kinds(script) == expected


def test_one_garbage_collection_that_takes_longer_than_a_sample_is_no_growth():
    script = memory(training(), workers_private=120.0 * np.clip((SECONDS - SECONDS[30]) / 3, 0, 1))
    begun, ended = (SECONDS[at] * 1e9 for at in (30, 33))
    fetches = [
        part[~part["time_ns"].between(begun, ended)].reset_index(drop=True) for part in script.parts["fetch"]
    ]
    for part in fetches:
        collecting = int(np.argmax(part["time_ns"] > ended))
        part["minor_fault_count"] = 0.0
        part.loc[collecting, ["minor_fault_count", "getitem_ns"]] = [120 * MIB // 4096, 4e9]
    script.parts["fetch"] = fetches
    assert kinds(script) == []


@pytest.mark.parametrize(("faults_ratio", "expected"), [(0.0, []), (1.0, ["copy-on-read-growth"])])
def test_pages_that_become_private_without_a_fault_of_the_worker_are_no_copies(faults_ratio, expected):
    """A garbage collection of the parent writes the pages that it shares: the worker has the old ones alone."""
    copied = 80.0 * np.clip((SECONDS - SECONDS[25]) / 5, 0, 1)
    script = memory(training(), workers_private=copied)
    take_faults(script, faults_ratio * copied)
    for fetches in script.parts["fetch"]:
        fetches["minor_fault_count"] += 6000  # the batch itself
    assert kinds(script) == expected


def test_spawned_workers_copy_nothing():
    script = memory(training(start_method="spawn"), workers_private=250 * SATURATING)
    assert kinds(script) == []


def test_pages_left_to_a_worker_by_a_dead_parent_are_no_copies():
    at_the_end = 250 * (np.arange(60) >= 58)
    script = memory(training(), workers_private=at_the_end)
    for fetches in script.parts["fetch"]:
        fetches["minor_fault_count"] = np.nan
    assert kinds(script) == ["copy-on-read-growth"]
    script.add("process", [{"time_ns": ns(SECONDS[57]), "process_pid": MAIN[1], "alive": 0}])
    alive = script.parts["process"][0]
    script.parts["process"][0] = alive[alive["time_ns"] <= ns(SECONDS[57])]
    assert kinds(script) == []
