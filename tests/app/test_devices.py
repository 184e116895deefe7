"""GPUs of one host and of several: no spike is lost, and each has its own chart and row.

The runs were recorded. If no run shows a case, rows of one are scaled, dropped or recorded by another
process too.
"""

import numpy as np
import pytest
from dashboard_pages import figures, open_view, texts, trace_names

from collector.diagnosis import diagnose
from collector.diagnosis.run.device_account import accounts
from collector.store.lake.reader import read
from collector.store.queries import gpu_memory, spans
from collector.store.runs.run import Run
from collector.units import after_steps, percent, size
from tests.recorded_runs import add_event, add_process, change_events, edit, recorded, records_of, remove, unpack
from training_harness import layout

MIB = 2**20
SECOND_NS = 10**9
PARTS = ("allocated", "cached", "fragmentation", "non-PyTorch", "other processes", "unattributed")
#: Bytes of a process's context on a simulated device, and bytes that its driver keeps.
CONTEXT, DRIVER_RESERVED = 256 * MIB, 64 * MIB
#: Fields of an error that are missing if no observer could be attached.
MISSING_FIELDS = (
    "limit_bytes",
    "free_bytes",
    "requested_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "error_time_ns",
)
#: Number of the record from which on nothing changes in the run, except by a test.
STEADY = 100


def total_of(parts):
    return parts.drop(columns=["gpu", "elapsed_seconds"]).sum(axis=1)


def origin_ns(run_dir):
    [anchor] = layout.read_manifest(run_dir)["anchors"].values()
    return anchor["time_ns"]


def grid(run_dir, host=None):
    run = Run(run_dir)
    with read(run) as snapshot:
        reach = spans.extent(snapshot)
        within = spans.span(snapshot, reach, origin=spans.origin_ns(run.manifest), window="run", rank=None)
        gpus = gpu_memory.devices(snapshot)
        [gpu] = gpus["gpu"] if host is None else gpus.loc[gpus["host"] == host, "gpu"]
        both = gpu_memory.device_grid(snapshot, within)
        return (*(each[each["gpu"] == gpu] for each in both), within)


@pytest.fixture
def run_dir(tmp_path):
    """400 steps with batches of uneven size; another job uses the GPU too."""
    return unpack("uneven-batches", tmp_path)


@pytest.fixture
def steady_gauges(run_dir):
    """The records of the allocator and of the driver that stay the same: gauge -> bytes."""
    memory, driver = records_of(run_dir, "device_memory"), records_of(run_dir, "device")
    used = driver[driver["process_used_bytes"] >= 0]
    for name in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes"):
        assert len(set(memory[name][STEADY:])) == 1
    return {name: int(rows[name][-1]) for rows in (used, memory) for name in rows.dtype.names if "bytes" in name}


def raise_at(place, **more):
    """Change one record: gauge -> how much more it is."""

    def change(records):
        for name, value in more.items():
            records[name][place] += value

    return change


def raise_all(**more):
    """Change every record."""
    return raise_at(slice(None), **more)


def steady(parts, run_dir):
    """The account after the first steps, by seconds since the run was made."""
    since = (records_of(run_dir, "device_memory")["time_ns"][STEADY] - origin_ns(run_dir)) / SECOND_NS
    return parts[parts["elapsed_seconds"] > since + 1]


def test_peak_between_samples_has_the_parts_of_its_moment(run_dir, steady_gauges):
    by, place = 400 * MIB, 277
    edit(run_dir, "device_memory", raise_at(place, allocated_bytes=by, reserved_bytes=by))
    parts = steady(accounts(*grid(run_dir)[:2]), run_dir)
    totals = total_of(parts)
    peak = parts.loc[totals.idxmax()]
    other = steady_gauges["other_used_bytes"]
    assert totals.max() == steady_gauges["reserved_bytes"] + by + other
    assert (peak["allocated"], peak["other processes"]) == (steady_gauges["allocated_bytes"] + by, other)
    unused = steady_gauges["reserved_bytes"] - steady_gauges["allocated_bytes"]
    assert (peak["cached"] + peak["fragmentation"], peak["fragmentation"]) == (
        unused,
        steady_gauges["inactive_split_bytes"],
    )
    assert np.isnan(peak["non-PyTorch"])  # the driver was not asked then
    assert (parts["allocated"] > steady_gauges["allocated_bytes"]).sum() == 1
    assert (totals.drop(totals.idxmax()) == steady_gauges["used_bytes"]).all()
    at_ns = records_of(run_dir, "device_memory")["time_ns"][place]
    assert abs(peak["elapsed_seconds"] - (at_ns - origin_ns(run_dir)) / SECOND_NS) <= 0.5


def test_spike_served_from_the_cache_shows_in_allocated(run_dir, steady_gauges):
    edit(run_dir, "device_memory", raise_at(277, allocated_bytes=20 * MIB))
    parts = steady(accounts(*grid(run_dir)[:2]), run_dir)
    assert parts["allocated"].max() == steady_gauges["allocated_bytes"] + 20 * MIB
    assert (total_of(parts) == steady_gauges["used_bytes"]).all()


def test_spike_outside_pytorch_has_the_allocator_state_of_its_moment(run_dir, steady_gauges):
    asked_ns = records_of(run_dir, "device")["time_ns"]

    def hold_more_between_samples(records):
        apart_ns = np.abs(records["time_ns"][:, None] - asked_ns[None, :]).min(axis=1)
        assert 50 < (apart_ns > 150_000_000).sum() < 350
        records["reserved_bytes"][apart_ns > 150_000_000] += 100 * MIB

    edit(run_dir, "device_memory", hold_more_between_samples)
    edit(run_dir, "device", raise_at(40, used_bytes=140 * MIB, process_used_bytes=140 * MIB))
    parts = steady(accounts(*grid(run_dir)[:2]), run_dir)
    peak = parts.loc[total_of(parts).idxmax()]
    assert peak[["allocated", "cached", "fragmentation"]].sum() == steady_gauges["reserved_bytes"]
    assert peak["non-PyTorch"] == CONTEXT + 140 * MIB


def test_each_bucket_shows_its_fullest_moment(run_dir):
    random = np.random.default_rng(3)

    def scale_allocator(records):
        records["reserved_bytes"] *= random.integers(1, 8, len(records))
        records["allocated_bytes"] = records["reserved_bytes"] * random.uniform(0.2, 0.9, len(records))

    edit(run_dir, "device_memory", scale_allocator)
    edit(run_dir, "device", raise_all(used_bytes=random.integers(0, 200, 49) * MIB))
    driver, allocators, within = grid(run_dir)

    steps, asked = records_of(run_dir, "device_memory"), records_of(run_dir, "device")
    steps_ns, reserved = steps["time_ns"], steps["reserved_bytes"]
    asked_ns, used = asked["time_ns"], asked["used_bytes"]
    most = {}
    for now in sorted({*steps_ns, *asked_ns}):
        place, step = np.searchsorted(asked_ns, now, "right") - 1, np.searchsorted(steps_ns, now, "right") - 1
        around = used[place : place + (1 if asked_ns[place] == now else 2)]
        of_driver = around.min() if place >= 0 else 0
        other = asked["other_used_bytes"][place] if place >= 0 else 0
        seen = max(of_driver, reserved[step] + other) if step >= 0 else of_driver
        bucket = (now - within.from_ns) // spans.GRID_STEP_NS
        most[bucket] = max(most.get(bucket, 0), seen)
    both = allocators.merge(driver, on="bucket")
    taken = both[["used_bytes"]].assign(held=both["reserved_bytes"] + both["other_used_bytes"]).max(axis=1)
    found = dict(zip(both["bucket"], taken, strict=True))
    assert len(found) > 30
    assert [bucket for bucket, value in list(found.items())[:-1] if most[bucket] != value] == []
    for row in allocators.itertuples():
        before = steps[np.searchsorted(steps_ns, row.time_ns, "right") - 1]
        after = steps[min(np.searchsorted(steps_ns, row.time_ns), len(steps) - 1)]
        record = max(before, after, key=lambda each: each["reserved_bytes"])
        assert (row.reserved_bytes, row.allocated_bytes) == (record["reserved_bytes"], record["allocated_bytes"])


def test_last_bucket_shows_its_newest_value(run_dir, steady_gauges):
    newest_ns, by = records_of(run_dir, "device_memory")["time_ns"][-1], 400 * MIB
    edit(run_dir, "device_memory", raise_at(-6, allocated_bytes=by, reserved_bytes=by))
    edit(run_dir, "device", lambda records: records[records["time_ns"] < newest_ns])
    parts = accounts(*grid(run_dir)[:2])
    assert parts["allocated"].iloc[-2:].tolist() == [
        steady_gauges["allocated_bytes"] + by,
        steady_gauges["allocated_bytes"],
    ]
    assert parts["elapsed_seconds"].iloc[-1] == pytest.approx((newest_ns - origin_ns(run_dir)) / SECOND_NS)


def test_spikes_of_two_processes_on_one_gpu_are_both_shown(run_dir, steady_gauges):
    add_process(
        run_dir, ["device_memory"], pid=1, change=raise_at(310, allocated_bytes=90 * MIB, reserved_bytes=90 * MIB)
    )
    first, _ = sorted((run_dir / "journal").glob("*.device_memory.*"))
    edit(run_dir, "device_memory", raise_at(300, reserved_bytes=150 * MIB), only=first)
    remove(run_dir, "device")
    parts = accounts(*grid(run_dir)[:2])  # without a driver: what the allocators hold
    totals = parts["allocated"] + parts["cached"] + parts["fragmentation"]
    both = 2 * steady_gauges["reserved_bytes"]
    assert totals.max() == both + 150 * MIB  # the first one's, with the other's of that moment
    assert set(totals) >= {both, both + 150 * MIB}
    driver, allocators, _ = grid(run_dir)
    assert driver.empty
    assert allocators.groupby("bucket").size().iloc[2:].unique().tolist() == [2]


def test_headroom_is_measured_at_the_allocators_own_peak(monkeypatch, tmp_path, run_dir, steady_gauges):
    def peaks(records):
        records["allocated_peak_bytes"], records["reserved_peak_bytes"] = 840 * MIB, 900 * MIB

    edit(run_dir, "device_memory", peaks)
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    row = at.dataframe[0].value.set_index("Limit").loc["GPU 0"]
    shown = (row["Last"], row["Peak"], row["Headroom at peak"])
    assert shown == (size(steady_gauges["used_bytes"]), size(900 * MIB), size(124 * MIB))
    lines = at.dataframe[1].value.set_index("Memory")["PyTorch's own peak"]
    assert lines[["allocated", "reserved"]].tolist() == [size(840 * MIB), size(900 * MIB)]
    assert "the peak of reserved that PyTorch counts" in texts(at)
    own = f"allocated {size(840 * MIB)}, reserved {size(900 * MIB)}."
    assert f"Peaks that PyTorch counted itself, in one process: {own}" in texts(
        open_view(monkeypatch, tmp_path, "gpu_memory")
    )


def test_peak_is_the_drivers_where_it_saw_more(monkeypatch, tmp_path, run_dir, steady_gauges):
    edit(run_dir, "device", raise_at(40, used_bytes=100 * MIB))
    row = open_view(monkeypatch, tmp_path, "oom_risk").dataframe[0].value.set_index("Limit").loc["GPU 0"]
    peak = steady_gauges["used_bytes"] + 100 * MIB
    assert (row["Peak"], row["Headroom at peak"]) == (size(peak), size(steady_gauges["total_bytes"] - peak))


def test_memory_account_and_limit_chart_have_the_same_peak(monkeypatch, tmp_path, run_dir, steady_gauges):
    by = 450 * MIB
    edit(run_dir, "device_memory", raise_at(277, allocated_bytes=by, reserved_bytes=by))
    lines = open_view(monkeypatch, tmp_path, "oom_risk").dataframe[1].value.set_index("Memory")
    allocated = [size(steady_gauges["allocated_bytes"]), size(steady_gauges["allocated_bytes"] + by)]
    assert lines.loc["allocated", ["Last", "Peak of samples"]].tolist() == allocated
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    peak = steady_gauges["reserved_bytes"] + by + steady_gauges["other_used_bytes"]
    share = percent(peak / steady_gauges["total_bytes"])
    assert f"Peak {size(peak)}, {share} of the capacity of {size(steady_gauges['total_bytes'])}." in texts(at)
    rows = at.dataframe[0].value
    assert rows["Allocated"].tolist() == allocated[::-1]
    assert rows["Non-PyTorch"].tolist()[0] == "—"


def test_memory_account_of_a_gpu_adds_up_to_the_drivers_figure(monkeypatch, tmp_path, run_dir, steady_gauges):
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    assert trace_names(figures(at)[0]) == list(PARTS)
    assert f"capacity {size(steady_gauges['total_bytes'])}" in figures(at)[0]["layout"]["annotations"][0]["text"]
    now = at.dataframe[0].value.iloc[-1]
    cached = (
        steady_gauges["reserved_bytes"] - steady_gauges["allocated_bytes"] - steady_gauges["inactive_split_bytes"]
    )
    held = (steady_gauges["allocated_bytes"], cached, steady_gauges["inactive_split_bytes"], CONTEXT)
    parts = (*held, steady_gauges["other_used_bytes"], DRIVER_RESERVED)
    assert sum(parts) == steady_gauges["used_bytes"]
    names = [name[:1].upper() + name[1:] for name in PARTS]
    assert now[names].tolist() == [size(part) for part in parts]
    assert (now["GPU"], now["Total"]) == ("GPU 0", size(steady_gauges["used_bytes"]))
    assert now["When"].startswith("last, ")
    assert now["Share of capacity"] == percent(steady_gauges["used_bytes"] / steady_gauges["total_bytes"])


@pytest.mark.parametrize("unknown", [(), MISSING_FIELDS])
def test_gpu_of_a_fatal_out_of_memory_error_has_met_its_limit(monkeypatch, tmp_path, unknown):
    """An error without figures has the limit of the allocator's record."""
    run_dir = unpack("leak-to-the-end", tmp_path)
    if unknown:
        change_events(run_dir, "cuda-oom", **dict.fromkeys(unknown), message="CUDA")
    row = open_view(monkeypatch, tmp_path, "oom_risk").dataframe[0].value.set_index("Limit").loc["GPU 0"]
    assert row["Limit met"] == "met: 640 MiB, training ended"


def add_gpu(run_dir, host, rank=None, more=0):
    """Give the GPU of another host the same records, with `more` bytes in use."""
    change = raise_all(allocated_bytes=more, reserved_bytes=more, reserved_peak_bytes=more)
    add_process(run_dir, ["device_memory"], host=host, rank=rank, change=change)
    add_process(run_dir, ["device"], host=host, change=raise_all(used_bytes=more, process_used_bytes=more))


@pytest.mark.parametrize("name", ["uneven-batches", "tensor-leak"])
def test_gpu_names_omit_the_host_if_there_is_only_one(monkeypatch, tmp_path, name):
    unpack(name, tmp_path)
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    assert "How near is GPU 0 to its limit?" in texts(at)
    assert at.dataframe[0].value["Limit"].iloc[0] == "GPU 0"
    overview = {metric.label: metric for metric in open_view(monkeypatch, tmp_path, "overview").metric}
    assert overview["GPU reserved peak"].proto.help.startswith("Device 0: ")


def test_gpus_of_two_hosts_have_separate_charts_and_rows(monkeypatch, tmp_path, run_dir, steady_gauges):
    add_gpu(run_dir, "node-b", more=100 * MIB)
    names = ["GPU 0 of node-b", "GPU 0 of vm"]
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    for name in names:
        assert f"How near is {name} to its limit?" in texts(at)
    gpus = dict(zip(names, figures(at), strict=False))
    assert all(trace_names(gpu) == ["reserved", "allocated", "used, all processes"] for gpu in gpus.values())
    table = at.dataframe[0].value.set_index("Limit")
    assert [limit for limit in table.index if limit.startswith("GPU")] == names
    used = steady_gauges["used_bytes"]
    assert table.loc[names[0], ["Last", "Peak"]].tolist() == [size(used + 100 * MIB)] * 2
    assert table.loc[names[1], ["Last", "Peak"]].tolist() == [size(used)] * 2
    assert table.loc[names, "Limit met"].tolist() == ["not forecast"] * 2
    overview = {metric.label: metric for metric in open_view(monkeypatch, tmp_path, "overview").metric}
    reserved = size(steady_gauges["reserved_peak_bytes"] + 100 * MIB)
    assert overview["GPU reserved peak"].proto.help.startswith(f"Device 0 of node-b: {reserved}")


def test_charts_of_a_gpu_mark_only_its_own_findings(monkeypatch, tmp_path):
    unpack("two-devices", tmp_path)
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    leaks = {f.locus.device: f.since_step for f in diagnose(recorded("two-devices")).findings if "leak" in f.kind}
    assert len(leaks) == 2
    for chart, step in zip(figures(at)[:2], leaks.values(), strict=True):
        labels = str(chart["layout"]["annotations"])
        assert f"gpu-tensor-leak {after_steps(step)}" in labels
        assert "on GPU" not in labels


def test_chosen_rank_is_drawn_only_on_its_own_gpu(monkeypatch, tmp_path, run_dir):
    for rank, host in enumerate(("node-a", "node-b")):
        add_event(run_dir, "process-start", host=host, rank=rank)
        add_gpu(run_dir, host, rank)
    remove(run_dir, "device_memory", host="vm")
    remove(run_dir, "device", host="vm")
    at = open_view(monkeypatch, tmp_path, "oom_risk", rank="1")
    shown = dict(zip(("node-a", "node-b"), figures(at), strict=False))
    assert trace_names(shown["node-b"]) == ["reserved, rank 1", "allocated, rank 1", "used, all processes"]
    assert trace_names(shown["node-a"]) == ["used, all processes"]


def test_fullest_gpus_and_that_of_the_chosen_rank_are_drawn(monkeypatch, tmp_path, run_dir):
    hosts = [f"node-{place}" for place in range(6)]
    for rank, (host, more) in enumerate(zip(hosts, (150, 10, 60, 0, 130, 100), strict=True)):
        add_event(run_dir, "process-start", host=host, rank=rank)
        add_gpu(run_dir, host, rank, more * MIB)
    remove(run_dir, "device_memory", host="vm")
    remove(run_dir, "device", host="vm")

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


def raise_count(column, steps):
    """Change a count: it is one higher from each of these steps on."""

    def change(records):
        records[column] = sum(records["step"] >= each for each in steps)

    return change


def test_cache_flushes_and_ooms_are_marked_and_counted(monkeypatch, tmp_path, run_dir):
    edit(run_dir, "device_memory", raise_count("alloc_retry_count", (10, *range(200, 400))))
    edit(run_dir, "device_memory", raise_count("oom_count", (300,)))
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    marks = {trace["name"]: trace for trace in figures(at)[0]["data"] if trace.get("mode") == "markers"}
    assert marks["cache flushed"]["text"][0] == "after 10 steps"
    assert len(marks["cache flushed"]["text"]) < 100
    assert all("times, last after" in each for each in marks["cache flushed"]["text"][2:-1])
    records = records_of(run_dir, "device_memory")
    seconds = (records["time_ns"][300] - origin_ns(run_dir)) / SECOND_NS
    assert marks["out of memory"]["text"] == [f"after 300 steps ({seconds:.0f} s)"]
    assert f"Cache flushed: 201 times. Out of memory after 300 steps ({seconds:.0f} s)." in texts(at)


def test_window_excludes_flushes_and_errors_from_before_it(run_dir):
    edit(run_dir, "device_memory", raise_count("alloc_retry_count", (10, 20, 350)))
    edit(run_dir, "device_memory", raise_count("oom_count", (30,)))
    run = Run(run_dir)
    with read(run) as snapshot:
        reach = spans.extent(snapshot)
        within = spans.span(snapshot, reach, origin=spans.origin_ns(run.manifest), window="run", rank=None)
        newest_ns = int(records_of(run_dir, "device_memory")["time_ns"][-1])
        recent = spans.replace(within, from_ns=newest_ns - 8 * SECOND_NS, to_ns=newest_ns, newest_ns=newest_ns)
        flushes = gpu_memory.cache_flushes(snapshot, recent)
        errors = gpu_memory.cuda_errors(snapshot, recent)
    assert flushes[["step", "count"]].to_numpy().tolist() == [[350, 1]]
    assert errors.empty


def test_memory_of_a_process_is_dropped_when_it_exits(run_dir, steady_gauges):
    """Another process takes 150 steps, lives 2 s longer, and ends."""
    add_process(run_dir, ["device_memory"], pid=1, change=lambda records: records[:150])
    pid = recorded("uneven-batches").manifest["command"]["pid"]
    ended_ns = records_of(run_dir, "device_memory")["time_ns"][2 * 150] + 2 * SECOND_NS

    def samples(records):
        mine = records[records["process_pid"] == pid]
        mine["process_pid"] += 1
        until = mine[mine["time_ns"] <= ended_ns]
        until["alive"][-1] = 0
        return until

    add_process(run_dir, ["process"], pid=1, change=samples)
    _, allocators, _ = grid(run_dir)
    held = allocators.groupby("time_ns")["reserved_bytes"].sum()
    begun_ns = records_of(run_dir, "device_memory")["time_ns"][2 * STEADY]
    before = held[(held.index > begun_ns) & (held.index < ended_ns - SECOND_NS)]
    after = held[held.index > ended_ns]
    assert len(before) > 5
    assert len(after) > 5
    assert (before == 2 * steady_gauges["reserved_bytes"]).all()
    assert (after == steady_gauges["reserved_bytes"]).all()
