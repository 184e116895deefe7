"""Loaders of all kinds: what is recorded of each agrees with what its own rows say.

Also run against other versions of torch (`make versions`): TIDEGAUGE_TEST_PYTHON names their interpreter.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter

import pandas as pd
import pytest

from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.trust import workers_reporting
from collector.store.runs.run import Run
from tests.conftest import PYTHON, REPOSITORY, SHIM, AttachedRun, bare_environment
from training_harness import layout

SCRIPT = REPOSITORY / "tests" / "scripts" / "loaders.py"
KEY = ["loader", "epoch", "index", "worker"]
MS = 1e6


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> AttachedRun:
    """The script's attached run; its bare twin ran meanwhile, and printed `bare`."""
    home = tmp_path_factory.mktemp("home")
    directory = layout.create_run(home, name="loaders", argv=[])
    shim = {layout.RUN_DIR_VARIABLE: str(directory), "PYTHONPATH": str(SHIM)}
    bare, attached = (
        subprocess.Popen(
            [PYTHON, "-W", "ignore", SCRIPT, "--truth", home / name],
            env=bare_environment() | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, extra in (("bare.json", {}), ("attached.json", shim))
    )
    try:
        (expected, complaint), (seen, errors) = bare.communicate(timeout=200), attached.communicate(timeout=200)
    finally:
        bare.kill()
        attached.kill()
    assert bare.returncode == 0, complaint
    (directory / "bare").write_text(expected)
    (directory / "truth.json").write_bytes((home / "attached.json").read_bytes())
    return AttachedRun(subprocess.CompletedProcess([SCRIPT], attached.returncode, seen, errors), Run(directory))


@pytest.fixture(scope="module")
def batches(run) -> pd.DataFrame:
    """The batch records, each with what its rows said."""
    truth = pd.DataFrame(json.loads((run.run.path / "truth.json").read_text()))
    recorded = run.table("batch")
    assert len(recorded) == len(truth)
    return pd.concat([recorded, truth.add_prefix("true_")], axis=1).rename(columns={"true_case": "case"})


@pytest.fixture(scope="module")
def fetches(run, batches) -> pd.DataFrame:
    """The fetch records of the batches that were yielded, with their case."""
    return run.table("fetch").merge(batches[[*KEY, "case"]], on=KEY, validate="one_to_one")


def bodies(run: AttachedRun, kind: str) -> list[dict]:
    return [json.loads(body) for body in run.events(kind).body]


def test_hooks_do_not_change_the_batches(run):
    assert run.done.returncode == 0, run.done.stderr
    assert run.done.stdout == (run.run.path / "bare").read_text()
    (disabled,) = bodies(run, "hook-disabled")
    assert disabled == {"hook": "worker of a batch", "error": "OwnIterator has no _task_info"}


def test_every_batch_names_the_worker_that_made_it(batches):
    """A batch of an iterator without `_task_info` has no worker, rather than a wrong one."""
    wrong = batches[batches.worker.fillna(-9) != batches.true_worker.fillna(-9)]
    assert wrong.empty, wrong[["case", *KEY, "true_worker"]].to_string()


def test_every_batch_has_its_fetch_record(batches, fetches):
    """A killed worker takes those of its last milliseconds with it."""
    kept = ~batches.case.isin(["failing", "foreign"])
    assert (fetches.case != "failing").sum() == kept.sum()
    assert not batches.duplicated(["loader", "epoch", "index"]).any()


def test_samples_are_counted_in_the_loop_or_in_the_worker(batches, fetches):
    counted = batches[batches.samples_count.notna()]
    assert (counted.samples_count == counted.true_samples).all()
    assert {"map_style", "left_early", "several", "stateful"} <= set(counted.case)
    made = fetches.merge(batches[[*KEY, "true_samples"]], on=KEY)
    made = made[made.samples_count.notna() & (made.case == "iterable_style")]
    assert len(made) > 0
    assert (made.samples_count == made.true_samples).all()


def test_waits_include_blocked_time_and_queue_counts(batches):
    queued = batches[batches.worker >= 0]
    assert (queued.wait_ns >= queued.blocked_ns).all()
    assert queued[["outstanding_count", "parked_count", "ready_count"]].notna().all(axis=None)
    inline = batches[batches.worker == -1]
    assert inline[["blocked_ns", "outstanding_count", "parked_count", "ready_count"]].isna().all(axis=None)
    tensors = batches[batches.case != "failing"]
    weighed = tensors[tensors.payload_bytes.notna()]
    assert len(weighed)
    assert (weighed.payload_bytes == weighed.true_samples * 2 * 8).all(), "int64 rows of two"


def test_batches_that_arrive_early_are_parked(batches):
    first = batches[batches.case == "parked"].iloc[0]
    assert first.wait_ns >= 390 * MS
    assert (first.parked_count, first.outstanding_count) == (2, 2), "the other worker made its two meanwhile"


def test_batches_that_wait_for_the_loop_are_ready(batches):
    assert batches[batches.case == "ready"].ready_count.max() >= 1


def test_out_of_order_batches_overtake_the_late_one(batches):
    late = batches[batches.case == "out_of_order"]
    if late.empty:
        pytest.skip("this torch has no in_order")
    assert late["index"].iloc[0] != 0
    assert sorted(late["index"]) == list(range(8))


def test_fetch_time_is_split_into_its_parts(fetches):
    fetch = fetches[fetches.case == "split"]
    assert len(fetch) == 4
    assert (fetch.getitem_ns >= 4 * 3 * MS).all(), "four rows of 3 ms"
    assert (fetch.collate_ns >= 6 * MS).all()
    assert (fetch.idle_ns >= 0).all()
    wall = fetch.getitem_ns + fetch.collate_ns
    parts = fetch.cpu_ns + fetch.run_queue_ns + fetch.blocked_ns
    assert (parts >= wall - 1).all(), "what is left over is blocked"
    # Which part of a sleep the scheduler books as waiting for a core depends on how busy it is.
    assert (fetch.blocked_ns + fetch.run_queue_ns >= 4 * 3 * MS).all()
    assert (fetch.cpu_ns > 0).all()


def test_heaps_of_workers_are_read(run, fetches):
    heap = run.table("heap")
    heap = heap[heap["pid"].isin(fetches["pid"])]
    assert len(heap) > 0
    assert (heap["in_use_bytes"] > 0).all()


def test_worker_start_is_timed_from_the_start_of_the_iterator(run, batches):
    loader = int(batches[batches.case == "split"].loader.iloc[0])
    (epoch,) = (event for event in bodies(run, "epoch-start") if event["loader"] == loader)
    frame = run.events("worker-ready").assign(body=lambda rows: rows.body.map(json.loads))
    ready = frame[frame.body.map(lambda body: body["loader"]) == loader]
    assert sorted(ready.pid) == sorted(epoch["worker_pids"])
    assert (ready.time_ns > epoch["begun_ns"]).all()
    assert all(body["setup_ns"] >= 50 * MS for body in ready.body), "worker_init_fn is kept, and timed"
    fetch = run.table("fetch").query("loader == @loader and index < 2")
    assert (fetch.idle_ns < ready.body.map(lambda body: body["setup_ns"]).max()).all(), "setting up is not idling"


def test_epochs_continue_with_persistent_workers_and_new_loaders(run, batches):
    epochs = batches.groupby(["case", "loader"]).epoch.nunique()
    assert epochs["thrown_away"].tolist() == [4, 1, 1, 1], "one loader, made four times; three that live at once"
    again = [event["loader"] for event in bodies(run, "loader-again")]
    assert [again.count(loader) for loader in epochs["thrown_away"].index] == [1, 0, 0, 0]
    assert epochs["by_hand"].tolist() == [3, 1, 1], "one loader, whose passes end; two whose passes take turns"
    assert sorted(epochs["left_early"]) == [1, 3]
    assert batches[batches.case == "cycled"].epoch.nunique() == 1


def test_loaders_inside_a_dataset_are_part_of_its_fetch(run, batches):
    inside = batches[batches.case == "inside"]
    counts = inside.groupby("loader").worker.agg(["count", "first"])
    assert sorted(map(tuple, counts.to_numpy())) == [(3, 0), (6, -1)], "the outer loaders look alike"
    assert len(run.events("process-start")) == 1


def test_worker_deaths_are_recorded_with_their_exit_status(run):
    died = bodies(run, "worker-died")
    assert sorted(event["exit_code"] for event in died) == [-9, 0, 3]
    assert {event["worker"] for event in died} == {1}
    assert {event["last_index"] for event in died} == {9}


def test_all_workers_report(run):
    promised = {pid for event in bodies(run, "epoch-start") for pid in event["worker_pids"]}
    assert promised == set(run.events("worker-start").pid)
    reporting, workers = workers_reporting(load_tables(run.run))
    assert reporting == workers > 0


def test_stateful_loader_records_its_batches(batches):
    stateful = batches[batches.case == "stateful"]
    if stateful.empty:
        pytest.skip("torchdata is not installed")
    assert Counter(stateful.worker.map(lambda worker: worker >= 0)) == {True: len(stateful) - 21, False: 21}
