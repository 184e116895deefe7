"""GPUs of one host and of several: no spike is lost, and each has its own chart and row."""

import make_run as runs
import numpy as np
import pytest
from make_gpus import HERE, OTHER, SECOND_NS, ask_driver, begin_ns, train
from make_records import GIB, MIB, NO_SUCH_PID, Writers
from opened import figures, open_view, texts, trace_names

from collector.diagnosis.device_account import accounts
from collector.quantities import size
from collector.store import device_queries, queries
from collector.store.reader import read
from collector.store.runs import Run
from training_harness.journal import EventLog, Identity

PARTS = ("allocated", "cached", "fragmentation", "non-PyTorch", "other processes", "unattributed")


def grid(run_dir, host=HERE):
    run = Run(run_dir)
    with read(run) as snapshot:
        reach = queries.extent(snapshot)
        within = queries.span(snapshot, reach, origin=queries.origin_ns(run.manifest), window="run", rank=None)
        gpus = device_queries.devices(snapshot)
        [gpu] = gpus.loc[gpus["host"] == host, "gpu"]
        both = device_queries.device_grid(snapshot, within)
        return (*(each[each["gpu"] == gpu] for each in both), within)


def spiked(held, at, by):
    values = np.full(2000, held)
    values[at] += by
    return values


@pytest.fixture
def run_dir(tmp_path):
    """Of 400 steps on the CPU, for GPUs to be added."""
    return runs.make_run(tmp_path, runs.HEALTHY)


def test_a_spike_between_two_samples_is_the_peak_and_its_parts_are_of_that_moment(run_dir):
    train(run_dir, spiked(8 * GIB, 777, 12 * GIB))
    ask_driver(run_dir, [9 * GIB] * 80)
    parts = accounts(*grid(run_dir)[:2])
    totals = parts.drop(columns=["gpu", "elapsed_seconds"]).sum(axis=1)
    peak = parts.loc[totals.idxmax()]
    assert totals.max() == 20 * GIB + OTHER
    assert (peak["allocated"], peak["cached"], peak["other processes"]) == (18 * GIB, 2 * GIB, OTHER)
    assert np.isnan(peak["non-PyTorch"])  # the driver was not asked then
    assert (parts["allocated"] > 6 * GIB).sum() == 1
    assert (totals.drop(totals.idxmax()) == 9 * GIB).all()
    assert abs(peak["elapsed_seconds"] - (2 + 778 * 0.02)) <= 0.5


def test_a_spike_of_tensors_out_of_the_cache_shows_in_what_is_allocated(run_dir):
    train(run_dir, np.full(2000, 8 * GIB), spiked(3 * GIB, 777, 4 * GIB))
    ask_driver(run_dir, [9 * GIB] * 80)
    parts = accounts(*grid(run_dir)[:2])
    assert parts["allocated"].max() == 7 * GIB
    assert (parts.drop(columns=["gpu", "elapsed_seconds"]).sum(axis=1) == 9 * GIB).all()


def test_a_spike_that_the_driver_saw_outside_pytorch_has_the_allocator_as_it_was_then(run_dir):
    reserved = np.where(np.arange(2000) % 25 < 12, 4 * GIB, 8 * GIB)  # at each sample of the driver the lower one
    train(run_dir, reserved)
    ask_driver(run_dir, np.where(np.arange(80) == 31, 16 * GIB, 9 * GIB))
    parts = accounts(*grid(run_dir)[:2])
    peak = parts.loc[parts.drop(columns=["gpu", "elapsed_seconds"]).sum(axis=1).idxmax()]
    assert peak["allocated"] + peak["cached"] == 4 * GIB
    assert peak["non-PyTorch"] == 12 * GIB - OTHER - 100 * MIB


def test_each_bucket_is_one_moment_and_that_of_most(run_dir):
    random = np.random.default_rng(3)
    reserved = random.integers(4, 12, 2000) * GIB
    allocated = (reserved * random.uniform(0.2, 0.9, 2000)).astype(np.int64)
    used = random.integers(6, 14, 80) * GIB
    train(run_dir, reserved, allocated)
    ask_driver(run_dir, used)
    driver, allocators, within = grid(run_dir)

    steps_ns, asked_ns = (
        np.array([begin_ns(run_dir) + int(s * SECOND_NS) for s in seconds])
        for seconds in ((np.arange(2000) + 1) * 0.02, (np.arange(80) + 0.4) * 0.5)
    )
    most = {}
    for now in sorted({*steps_ns, *asked_ns}):
        asked, step = np.searchsorted(asked_ns, now, "right") - 1, np.searchsorted(steps_ns, now, "right") - 1
        around = used[asked : asked + (1 if asked_ns[asked] == now else 2)]
        of_driver = around.min() if asked >= 0 else 0
        seen = max(of_driver, reserved[step] + (OTHER if asked >= 0 else 0)) if step >= 0 else of_driver
        bucket = (now - within.from_ns) // queries.GRID_STEP_NS
        most[bucket] = max(most.get(bucket, 0), seen)
    both = allocators.merge(driver, on="bucket")
    taken = both[["used_bytes"]].assign(held=both["reserved_bytes"] + OTHER).max(axis=1)
    found = dict(zip(both["bucket"], taken, strict=True))
    assert len(found) > 75
    assert all(most[bucket] == value for bucket, value in list(found.items())[:-1])
    written = dict(zip(steps_ns.tolist(), zip(reserved.tolist(), allocated.tolist(), strict=True), strict=True))
    for row in allocators.itertuples():
        step_ns = steps_ns[np.searchsorted(steps_ns, row.time_ns, "right") - 1]
        assert (row.reserved_bytes, row.allocated_bytes) == written[step_ns]


def test_at_the_end_stands_the_newest_and_not_the_most_of_its_bucket(run_dir):
    train(run_dir, spiked(8 * GIB, 1990, GIB))
    ask_driver(run_dir, [9 * GIB] * 80)
    parts = accounts(*grid(run_dir)[:2])
    assert parts["allocated"].iloc[-2:].tolist() == [7 * GIB, 6 * GIB]
    assert parts["elapsed_seconds"].iloc[-1] == pytest.approx(42)


def test_spikes_of_two_processes_on_one_gpu_are_both_kept(run_dir):
    train(run_dir, spiked(3 * GIB, 300, 5 * GIB), pid=1, rank=0)
    train(run_dir, spiked(4 * GIB, 310, 3 * GIB), pid=2, rank=1)
    train_at = accounts(*grid(run_dir)[:2])  # without a driver: what the allocators hold
    totals = train_at["allocated"] + train_at["cached"]
    assert totals.max() == 12 * GIB  # the first one's 8, with the other's 4 of that moment
    assert set(totals) >= {7 * GIB, 12 * GIB}
    driver, allocators, _ = grid(run_dir)
    assert driver.empty
    assert allocators.groupby("bucket").size().unique().tolist() == [2]


def test_headroom_is_what_the_allocators_own_peak_left(monkeypatch, tmp_path, run_dir):
    train(run_dir, np.full(400, 8 * GIB), every=0.1, peaks=(18 * GIB, 20 * GIB))
    ask_driver(run_dir, [9 * GIB] * 80)
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    row = at.dataframe[0].value.set_index("Limit").loc["GPU 0"]
    assert (row["Last"], row["Peak"], row["Headroom at peak"]) == (size(9 * GIB), size(20 * GIB), size(4 * GIB))
    lines = at.dataframe[1].value.set_index("Memory")["PyTorch's own peak"]
    assert lines[["allocated", "reserved"]].tolist() == [size(18 * GIB), size(20 * GIB)]
    assert "the peak of reserved that PyTorch counts" in texts(at)
    own = f"allocated {size(18 * GIB)}, reserved {size(20 * GIB)}."
    assert f"Peaks that PyTorch counted itself, in one process: {own}" in texts(
        open_view(monkeypatch, tmp_path, "gpu_memory")
    )


def test_where_the_driver_saw_more_the_peak_is_its(monkeypatch, tmp_path, run_dir):
    train(run_dir, np.full(400, 8 * GIB), every=0.1)
    ask_driver(run_dir, np.where(np.arange(80) == 40, 15 * GIB, 9 * GIB))
    row = open_view(monkeypatch, tmp_path, "oom_risk").dataframe[0].value.set_index("Limit").loc["GPU 0"]
    assert (row["Peak"], row["Headroom at peak"]) == (size(15 * GIB), size(9 * GIB))


def test_the_peak_of_the_account_is_that_of_the_chart_of_its_limit(monkeypatch, tmp_path, run_dir):
    train(run_dir, spiked(8 * GIB, 777, 12 * GIB))
    ask_driver(run_dir, [9 * GIB] * 80)
    lines = open_view(monkeypatch, tmp_path, "oom_risk").dataframe[1].value.set_index("Memory")
    assert lines.loc["allocated", ["Last", "Peak of samples"]].tolist() == [size(6 * GIB), size(18 * GIB)]
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    assert f"Peak {size(20 * GIB + OTHER)}, 85% of the capacity of 24 GiB." in texts(at)
    rows = at.dataframe[0].value
    assert rows["Allocated"].tolist() == [size(18 * GIB), size(6 * GIB)]
    assert rows["Non-PyTorch"].tolist()[0] == "—"


def test_the_gpu_that_a_training_died_of_has_met_its_limit(monkeypatch, tmp_path, run_dir):
    train(run_dir, np.full(400, 21 * GIB), every=0.1)
    ask_driver(run_dir, [22 * GIB] * 80)
    EventLog(run_dir / "events", Identity(HERE, NO_SUCH_PID, 2000)).append(
        "cuda-oom", time_ns=begin_ns(run_dir) + 40 * SECOND_NS, device=0, step=400, caught=False, message="CUDA"
    )
    row = open_view(monkeypatch, tmp_path, "oom_risk").dataframe[0].value.set_index("Limit").loc["GPU 0"]
    assert row["Limit met"] == "met: training ended"


def test_gpus_of_two_hosts_are_told_apart(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.CUDA)
    train(run_dir, np.full(400, 21 * GIB), host="node-b", every=0.1)
    ask_driver(run_dir, [22 * GIB] * 80, host="node-b")
    names = [f"GPU 0 of {host}" for host in sorted((HERE, "node-b"))]
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    for name in names:
        assert f"How near is {name} to its limit?" in texts(at)
    gpus = dict(zip(names, figures(at), strict=False))
    assert all(trace_names(gpu) == ["reserved", "allocated", "used, all processes"] for gpu in gpus.values())
    table = at.dataframe[0].value.set_index("Limit")
    assert [limit for limit in table.index if limit.startswith("GPU")] == names
    assert table.loc["GPU 0 of node-b", ["Last", "Peak"]].tolist() == [size(22 * GIB)] * 2
    assert table.loc["GPU 0 of node-b", "Limit met"] == "not forecast"
    assert table.loc[f"GPU 0 of {HERE}", "Limit met"].startswith("in")
    overview = {metric.label: metric for metric in open_view(monkeypatch, tmp_path, "overview").metric}
    assert overview["GPU reserved peak"].proto.help.startswith(f"Device 0 of node-b: {size(21 * GIB)}")


def test_a_chosen_rank_is_shown_on_its_own_gpu_alone(monkeypatch, tmp_path, run_dir):
    for rank, host in enumerate((HERE, "node-b")):
        told = {"argv": ["train.py"], "torch": "2.13.0", "parent_pid": 1, "capabilities": {}}
        who = Identity(host, NO_SUCH_PID, 2000, rank)
        EventLog(run_dir / "events", who).append("process-start", time_ns=begin_ns(run_dir), **told)
        train(run_dir, np.full(400, 8 * GIB), host=host, rank=rank, every=0.1)
        ask_driver(run_dir, [9 * GIB] * 80, host=host)
    at = open_view(monkeypatch, tmp_path, "oom_risk", rank="1")
    shown = dict(zip(sorted((HERE, "node-b")), figures(at), strict=False))
    assert trace_names(shown["node-b"]) == ["reserved, rank 1", "allocated, rank 1", "used, all processes"]
    assert trace_names(shown[HERE]) == ["used, all processes"]


def test_gpus_of_one_host_are_named_without_it(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.CUDA)
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    assert "How near is GPU 0 to its limit?" in texts(at)
    assert at.dataframe[0].value["Limit"].iloc[0] == "GPU 0"
    overview = {metric.label: metric for metric in open_view(monkeypatch, tmp_path, "overview").metric}
    assert overview["GPU reserved peak"].proto.help.startswith("Device 0: ")


def test_of_many_gpus_the_fullest_are_drawn_and_that_of_a_chosen_rank(monkeypatch, tmp_path, run_dir):
    hosts = [f"node-{place}" for place in range(6)]
    for rank, (host, held) in enumerate(zip(hosts, (20, 4, 12, 3, 18, 16), strict=True)):
        told = {"argv": ["train.py"], "torch": "2.13.0", "parent_pid": 1, "capabilities": {}}
        EventLog(run_dir / "events", Identity(host, NO_SUCH_PID, 2000, rank)).append(
            "process-start", time_ns=begin_ns(run_dir), **told
        )
        train(run_dir, np.full(400, held * GIB), host=host, rank=rank, every=0.1)
        ask_driver(run_dir, [(held + 1) * GIB] * 80, host=host)

    def drawn(view, question, **asked):
        at = open_view(monkeypatch, tmp_path, view, **asked)
        return at, [host for host in hosts if question.format(f"GPU 0 of {host}") in texts(at)]

    for view, question in (
        ("oom_risk", "How near is {} to its limit?"),
        ("gpu_memory", "What takes the memory of {}?"),
    ):
        at, found = drawn(view, question)
        assert found == ["node-0", "node-2", "node-4", "node-5"]
        assert "The 4 fullest of 6 GPUs are drawn." in texts(at)
        rows = at.dataframe[0].value
        assert {f"GPU 0 of {host}" for host in hosts} <= {*rows["Limit" if view == "oom_risk" else "GPU"]}
        assert drawn(view, question, rank="3")[1] == ["node-0", "node-3", "node-4", "node-5"]


def test_each_flush_of_the_cache_and_each_oom_is_a_mark_and_many_are_counted(monkeypatch, tmp_path, run_dir):
    train(run_dir, np.full(4000, 8 * GIB), every=0.01, retries=(10, *range(2000, 4000)), ooms=(3000,))
    ask_driver(run_dir, [9 * GIB] * 80)
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    marks = {trace["name"]: trace for trace in figures(at)[0]["data"] if trace.get("mode") == "markers"}
    assert marks["cache flushed"]["text"][0] == "in step 10"
    assert len(marks["cache flushed"]["text"]) < 300
    assert all("times, last in step" in each for each in marks["cache flushed"]["text"][2:-1])
    assert marks["out of memory"]["text"] == ["at step 3,000 (32 s)"]
    assert "Cache flushed: 2,001 times. Out of memory at step 3,000 (32 s)." in texts(at)


def test_of_a_short_window_what_was_counted_before_is_no_news(run_dir):
    train(run_dir, np.full(4000, 8 * GIB), every=0.2, retries=(10, 20, 3500), ooms=(30,))
    run = Run(run_dir)
    with read(run) as snapshot:
        reach = queries.extent(snapshot)
        within = queries.span(snapshot, reach, origin=queries.origin_ns(run.manifest), window="run", rank=None)
        newest_ns = begin_ns(run_dir) + int(4000 * 0.2 * SECOND_NS)
        recent = queries.replace(within, from_ns=newest_ns - 200 * SECOND_NS, to_ns=newest_ns, newest_ns=newest_ns)
        flushes = device_queries.cache_flushes(snapshot, recent)
        errors = device_queries.cuda_errors(snapshot, recent)
    assert flushes[["step", "count"]].to_numpy().tolist() == [[3500, 1]]
    assert errors.empty


def test_what_a_process_held_is_gone_with_it(run_dir):
    train(run_dir, np.full(1000, 8 * GIB), pid=1)
    train(run_dir, np.full(1000, 5 * GIB), pid=2, every=0.04)
    agent = Writers(run_dir / "journal", Identity(HERE, NO_SUCH_PID + 900, 900))
    for seconds, alive in ((10, 1), (25, 0)):  # it was there for 5 s after its last step
        of_process = {"process_pid": NO_SUCH_PID + 1, "process_start_ticks": 2000, "role": 0, "alive": alive}
        agent.append("process", time_ns=begin_ns(run_dir) + seconds * SECOND_NS, **of_process)
    agent.close()
    _, allocators, _ = grid(run_dir)
    at = (allocators["time_ns"] - begin_ns(run_dir)) / SECOND_NS
    held = allocators.groupby(at)["reserved_bytes"].sum()
    assert (held[(held.index > 0.1) & (held.index < 25)] == 13 * GIB).all()
    assert (held[held.index > 25] == 5 * GIB).all()
    assert 25 < held.index[-1] <= 40
