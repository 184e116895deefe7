"""GPU memory: growth is named by its mechanism; memory that only seems to grow has no finding.

The runs were recorded (tests/recorded_runs.py): PyTorch's own allocator made their records on simulated devices.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from simulated_runs import MIB

from collector.diagnosis.memory.allocation_sites import rank_sites
from collector.diagnosis.memory.gpu_growth import find_device_growth
from collector.diagnosis.memory.gpu_oom_risk import find_device_risk
from collector.diagnosis.verdict import diagnose
from collector.store.allocator_snapshots import ProcessGrowth, SiteGrowth
from tests.recorded_runs import (
    at_last_step,
    at_times,
    only_rows,
    recorded,
    rise,
    until,
    with_changed_event,
    with_columns,
    with_hidden_processes,
)
from training_harness.records import ROLE_MAIN

#: Runs whose memory only seems to grow: batches of uneven size with another job on the GPU, evaluations
#: that hold more for a while, an optimizer whose state is made late.
HEALTHY = ("uneven-batches", "evaluation", "late-optimizer")
#: Each step keeps a tensor of 1 MiB, takes 1 MiB from the driver, or has one more pinned buffer of 256 KiB at once.
TENSORS, LIBRARY, PINNED = "tensor-leak", "library-growth", "pinned-cache"
HOLES = "gpu-fragmentation"
#: Columns that grow in the samples of a process whose heap grows.
HOST_GAUGES = ("rss_bytes", "data_bytes", "private_dirty_bytes", "pss_bytes")


def steps_per_second(tables):
    times = tables.streams["step"]["time_ns"]
    return 1e9 * (len(times) - 1) / (times.iloc[-1] - times.iloc[0])


def kinds(tables):
    return [finding.kind for finding in (*find_device_growth(tables), *find_device_risk(tables))]


def warnings_of(tables):
    return {finding.kind: finding for finding in diagnose(tables).findings if finding.severity != "info"}


def only_finding(tables, kind):
    [found] = [f for f in find_device_growth(tables) if f.kind == kind]
    assert len({evidence.name for evidence in found.evidence}) >= 2
    assert found.advice
    return found


def test_window_of_a_brief_training_has_decimals():
    """It takes a quarter of a second: without them its begin and end would be the same."""
    windows = [each.evidence[0].window for each in find_device_growth(recorded("two-devices"))]
    assert windows
    for window in windows:
        begin, end = map(float, window.removesuffix(" s").split("-"))
        assert 0 < end - begin < 1


def with_allocator(tables, **columns):
    """Return a run with other gauges of the allocator: values, or functions of its records."""
    return with_columns(
        tables, "device_memory", lambda rows: {n: v(rows) if callable(v) else v for n, v in columns.items()}
    )


def with_driver(tables, **columns):
    """Return the tables with changed samples of NVML."""
    return with_columns(
        tables, "device", lambda rows: {n: v(rows) if callable(v) else v for n, v in columns.items()}
    )


def flat(name):
    """Return a column as it was in the first record."""
    return lambda rows: rows[name].iloc[0]


def more(name, size):
    return lambda rows: rows[name] + size


def with_cache(tables, size):
    """Return a run whose allocator keeps `size` bytes more at each record; the driver counts them at once."""
    cache = tables.streams["device_memory"].assign(cache=size)

    def used(rows):
        return {
            name: rows[name] + at_times(rows["time_ns"], cache, "cache")
            for name in ("used_bytes", "process_used_bytes")
        }

    return with_columns(with_allocator(tables, reserved_bytes=more("reserved_bytes", size)), "device", used)


def with_other_job(tables, others):
    """Return a run with another job on its GPU, which holds `others` bytes in each sample."""
    return with_driver(
        tables,
        used_bytes=lambda rows: rows["used_bytes"] + others,
        other_used_bytes=lambda rows: rows["other_used_bytes"] + others,
    )


def as_another_job(tables):
    """Return a run in which another job takes what the run's processes took."""
    grown = rise(tables.streams["device"], "process_used_bytes").fillna(0)
    return with_driver(
        tables,
        process_used_bytes=lambda rows: rows["process_used_bytes"] - grown,
        other_used_bytes=lambda rows: rows["other_used_bytes"] + grown,
    )


def with_host_growth(tables, gauge, share):
    """Return a run whose training process takes a share of what a gauge of the allocator grew by, on the host."""
    records = tables.streams["device_memory"]
    grown = records.assign(grown=rise(records, gauge) * share)

    def taken(rows):
        return at_times(rows["time_ns"], grown, "grown")

    def in_process(rows):
        return {name: rows[name] + (rows["role"] == ROLE_MAIN) * taken(rows) for name in HOST_GAUGES}

    more = with_columns(tables, "process", in_process)
    return with_columns(
        more, "host", lambda rows: {"memory_available_bytes": rows["memory_available_bytes"] - taken(rows)}
    )


def with_steady_host(tables):
    """Return a run whose training process has the same resident memory at all times."""

    def last(rows):
        is_main = rows["role"] == ROLE_MAIN
        return {name: rows[name].mask(is_main, rows.loc[is_main, name].max()) for name in HOST_GAUGES}

    return with_columns(tables, "process", last)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_no_growth_findings(name):
    assert kinds(recorded(name)) == []
    assert warnings_of(recorded(name)) == {}


def test_few_steps_are_not_enough_to_call_a_gpu_fine():
    few = only_rows(recorded("late-optimizer"), "device_memory", lambda rows: rows["step"] < 5)
    reasons = {check.name: (check.status, check.reason) for check in diagnose(few).checks}
    assert reasons["GPU memory"] == ("not judged", "5 of the 12 steps needed")


def test_pinned_memory_of_the_largest_batch_is_no_growth():
    """The cache of pinned memory and the process itself follow the reserved memory to its highest mark."""
    run = recorded("uneven-batches")
    reserved = run.streams["device_memory"]["reserved_bytes"]
    assert (reserved.diff() > 0).sum() >= 3, "it was met several times"
    pinned = with_allocator(
        run, pinned_allocated_bytes=reserved, pinned_active_bytes=lambda r: r["allocated_bytes"]
    )
    assert kinds(with_host_growth(pinned, "reserved_bytes", 1)) == []


def test_one_failed_allocation_is_no_finding():
    assert (
        kinds(with_allocator(recorded("uneven-batches"), alloc_retry_count=lambda r: 1.0 * (r["step"] > 3))) == []
    )


def test_growing_number_of_tensors_is_a_leak():
    run = recorded(TENSORS)
    leak = only_finding(run, "gpu-tensor-leak")
    assert leak.rate.value == pytest.approx(MIB * steps_per_second(run), rel=0.1)
    assert (leak.locus.device, leak.locus.pid) == (0, run.manifest["command"]["pid"])
    assert leak.summary.endswith(", 1 MiB per step.")
    assert leak.value_of("allocation_rise_count") == pytest.approx(
        leak.value_of("allocated_rise_bytes") / MIB, 0.01
    )


def test_growing_state_of_an_optimizer_is_no_leak():
    run = recorded(TENSORS)
    device = run.streams["device_memory"]
    rows = device[["host", "pid", "start_ticks", "time_ns", "device"]].assign(
        gradients_bytes=0.0, state_bytes=rise(device, "allocated_bytes")
    )
    rows = rows.reindex(columns=run.streams["optimizer"].columns)
    [told] = find_device_growth(replace(run, streams={**run.streams, "optimizer": rows}))
    assert (told.kind, told.severity) == ("bounded-growth", "info")
    assert told.locus.device == 0
    assert told.value_of("optimizer_rise_bytes") == pytest.approx(told.value_of("allocated_rise_bytes"), 0.25)


def test_leak_names_its_lines_or_the_command_that_finds_them():
    run = recorded(TENSORS)
    command = f"Run `tidegauge snapshot {run.manifest['run_id']} --kind growth`"
    assert warnings_of(at_last_step(run))["gpu-tensor-leak"].advice[-1].text == command
    assert "--investigate" in warnings_of(run)["gpu-tensor-leak"].advice[-1].text
    [held] = warnings_of(recorded("investigated"))["gpu-tensor-leak"].held_by
    assert (held.grown_bytes, held.what) == (held.grown_count * MIB // 2, "tensors")
    assert [re.fullmatch(r"growth\.py:\d+ (.*)", site)[1] for site in (held.site, held.callers[0])] == [
        "block",
        "tensors",
    ]


def test_leak_names_lines_that_grew_between_two_snapshots():
    run = recorded("snapshots")
    run = with_allocator(run, allocated_bytes=lambda rows: 100 * rows["allocated_bytes"])
    first, last = run.events_of("snapshot")
    [held] = warnings_of(run)["gpu-tensor-leak"].held_by
    assert re.search(r"/asking\.py:\d+ <module>$", held.site)
    assert held.grown_count == last["step"] - first["step"]
    assert held.grown_bytes == held.grown_count * (16 << 10)
    assert (held.window, run.problems) == (f"steps {first['step']:,}-{last['step']:,}", ())


def graph(site, nodes, size):
    return SiteGrowth(
        site=site,
        callers=(),
        device="cpu",
        made_by="AddBackward0",
        grown_count=0,
        grown_bytes=size,
        grown_nodes_count=nodes,
    )


def test_growing_autograd_graphs_rank_first_among_sites():
    python = SiteGrowth(site="a.py:1", callers=(), device="", made_by="", grown_count=9, grown_bytes=MIB)
    lines = (python, graph("a.py:2", 2000, 400), graph("a.py:3", -40, MIB))
    told = rank_sites(
        ProcessGrowth(event={}, window="steps 0-50", held_bytes={"cpu": 40 * MIB}, lines=lines), "cpu"
    )
    assert [held.site for held in told] == ["a.py:2", "a.py:1", "a.py:3", "no line"]
    assert "2,000 nodes" in told[0].what
    assert told[-1].grown_bytes == 38 * MIB - 400
    known = rank_sites(
        ProcessGrowth(event={}, window="steps 0-50", held_bytes={"cpu": 3 * MIB}, lines=lines), "cpu"
    )
    assert [held.site for held in known] == ["a.py:1", "a.py:3"], "the lines explain it"


def test_losses_with_their_graphs_rank_before_the_batches_that_these_hold():
    batches = SiteGrowth(site="a.py:1", callers=(), device="cpu", made_by="", grown_count=50, grown_bytes=40 * MIB)
    losses = replace(graph("a.py:2", 350, 200), grown_count=50)
    told = rank_sites(
        ProcessGrowth(event={}, window="steps 0-50", held_bytes={"cpu": 44 * MIB}, lines=(batches, losses)), "cpu"
    )
    assert [held.site for held in told] == ["a.py:2", "a.py:1"]


def test_larger_batches_are_not_called_a_leak():
    assert kinds(with_allocator(recorded(TENSORS), allocation_count=flat("allocation_count")))[0] == "cannot-tell"


def test_leak_is_not_claimed_without_allocation_counts():
    assert kinds(with_allocator(recorded(TENSORS), allocation_count=np.nan))[0] == "cannot-tell"


def test_growing_inactive_splits_are_fragmentation():
    holes = only_finding(recorded(HOLES), "gpu-fragmentation")
    assert "inactive_split_rise_bytes" in {evidence.name for evidence in holes.evidence}


def test_failed_allocations_show_fragmentation_of_expandable_segments():
    run = with_allocator(recorded(HOLES), inactive_split_bytes=0)
    assert kinds(run) == []
    failing = with_allocator(run, alloc_retry_count=lambda rows: rows["step"] // 40)
    assert "alloc_retry_steps_count" in {e.name for e in only_finding(failing, "gpu-fragmentation").evidence}


def test_holes_that_stay_while_the_cache_is_released_are_fragmentation():
    """At the limit PyTorch gives its free segments back, again and again: the unused memory is a sawtooth."""

    def reserved(rows):
        return rows["active_bytes"] + rows["inactive_split_bytes"] + rows["step"] % 100 * 4 * MIB

    run = with_allocator(recorded(HOLES), reserved_bytes=reserved)
    evidence = {item.name for item in only_finding(run, "gpu-fragmentation").evidence}
    assert evidence == {"inactive_split_rise_bytes", "unused_rise_bytes"}


def test_private_pools_that_grow_are_no_fragmentation_to_tune():
    """Each captured CUDA graph keeps its pool: expandable segments would not help."""
    pools = with_allocator(recorded(HOLES), private_pool_bytes=lambda rows: rise(rows, "reserved_bytes"))
    grown = only_finding(pools, "gpu-fragmentation")
    assert "CUDA graphs" in grown.summary
    assert "expandable" not in " ".join(advice.text for advice in grown.advice)


def test_growth_of_processes_without_records_is_not_called_a_library():
    """A DataLoader worker that uses CUDA has tensors too, and no records."""
    run = recorded(LIBRARY)
    grown = rise(run.streams["device"], "process_used_bytes").fillna(0)
    in_worker = with_driver(run, recorded_used_bytes=lambda rows: rows["process_used_bytes"] - grown)
    [told] = find_device_growth(in_worker)
    assert (told.kind, told.locus.device) == ("cannot-tell", 0)
    assert "not recorded" in told.summary
    assert kinds(with_driver(run, recorded_used_bytes=lambda rows: rows["process_used_bytes"]))[0] == (
        "gpu-non-pytorch-growth"
    )


def test_memory_of_a_long_evaluation_is_not_called_a_library():
    """It takes no steps, so PyTorch's records stay as they were while the driver counts more."""
    run = at_last_step(recorded(TENSORS))
    begin_ns = run.streams["step"]["time_ns"].quantile(0.3)
    early = only_rows(run, "device_memory", lambda rows: rows["time_ns"] < begin_ns)
    assert kinds(early) == ["gpu-tensor-leak", "gpu-oom-risk"]


def test_growth_outside_pytorch_is_found():
    run = recorded(LIBRARY)
    grown = only_finding(run, "gpu-non-pytorch-growth")
    assert grown.rate.value == pytest.approx(MIB * steps_per_second(run), rel=0.1)
    assert grown.locus.device == 0


def test_growth_of_another_job_is_a_risk_and_no_growth_of_the_run():
    assert kinds(as_another_job(recorded(LIBRARY))) == ["gpu-oom-risk"]


def test_growth_is_unattributed_if_the_driver_names_no_process():
    assert kinds(with_hidden_processes(recorded(LIBRARY)))[0] == "cannot-tell"


def test_pinned_cache_explains_the_growth_of_the_process():
    run = recorded(PINNED)
    only_finding(run, "pinned-cache-growth")
    assert set(warnings_of(run)) == {"pinned-cache-growth"}
    assert "main-heap-leak" in warnings_of(with_host_growth(run, "pinned_allocated_bytes", 3))


def test_pinned_memory_in_use_is_named():
    run = with_allocator(recorded(PINNED), pinned_active_bytes=lambda rows: rows["pinned_allocated_bytes"])
    leak = warnings_of(run)["main-heap-leak"]
    assert "pinned" in leak.summary
    assert "pin_memory" in leak.advice[0].text
    assert leak.value_of("pinned_active_rise_bytes") >= 0.5 * leak.value_of("resident_rise_bytes")


def test_pinned_cache_without_process_growth_is_not_claimed():
    assert kinds(with_steady_host(recorded(PINNED))) == ["cannot-tell"]


def test_growth_towards_the_device_limit_has_a_forecast():
    """The run ends with the error, so it is known how many steps were left; seconds are at the pace so far."""
    run = recorded("leak-to-the-end")
    [error] = run.events_of("cuda-oom")
    times = run.streams["step"]["time_ns"]
    for share in (0.6, 0.8):
        now = until(run, times.iloc[0] + share * (error["error_time_ns"] - times.iloc[0]))
        [risk] = find_device_risk(now)
        left = error["step"] - len(now.streams["step"])
        assert risk.eta.mid_steps == pytest.approx(left, rel=0.05)
        assert risk.eta.mid_seconds == pytest.approx(left / steps_per_second(now), rel=0.1)
        assert (risk.kind, risk.severity, risk.locus.device) == ("gpu-oom-risk", "critical", 0)
    assert "was running out" in find_device_risk(recorded(TENSORS))[0].summary


@pytest.mark.parametrize("name", [TENSORS, LIBRARY])
def test_memory_left_at_the_rate_lasts_as_long_as_the_forecast_says(name):
    [risk] = find_device_risk(recorded(name))
    assert risk.value_of("headroom_bytes") / risk.rate.value == pytest.approx(risk.eta.mid_seconds, rel=0.03)


def test_cache_is_no_demand():
    run = with_allocator(recorded(HOLES), inactive_split_bytes=0)
    full = with_driver(run, total_bytes=lambda rows: rows["used_bytes"].max() + 10 * MIB)
    assert find_device_risk(full) == []


def test_forecast_of_growth_that_nobody_owns_names_both_owners():
    hidden = with_hidden_processes(recorded(LIBRARY))
    [risk] = find_device_risk(hidden)
    assert "another job" in risk.advice[0].text
    [owned] = find_device_risk(with_hidden_processes(recorded(TENSORS)))
    assert "another job" not in owned.advice[0].text


def test_total_memory_that_pytorch_reports_is_no_share():
    """NVML counts the memory that the driver keeps, PyTorch does not."""
    run = recorded(TENSORS)
    total = run.streams["device"]["total_bytes"].max()
    [risk] = find_device_risk(with_changed_event(run, "cuda-device", total_bytes=total * 98 // 100))
    assert (risk.limit.name, risk.limit.value) == ("GPU 0", total)


def test_forecast_uses_the_process_share_of_the_device():
    run = recorded("cuda-oom")
    [error] = run.events_of("cuda-oom")
    begin_ns = run.streams["step"]["time_ns"].iloc[0]
    now_ns = begin_ns + 0.7 * (error["error_time_ns"] - begin_ns)
    [risk] = find_device_risk(until(run, now_ns))
    assert (risk.limit.name, risk.limit.value) == ("its share of GPU 0", error["limit_bytes"])
    assert risk.eta.mid_seconds == pytest.approx((error["error_time_ns"] - now_ns) / 1e9, rel=0.2)


def test_growth_of_other_processes_is_reported_as_theirs():
    run = at_last_step(as_another_job(recorded(LIBRARY)))
    [risk] = find_device_risk(run)
    grown = rise(run.streams["device"], "other_used_bytes").max()
    assert "Other processes grow" in risk.summary
    assert 0.5 * grown < risk.value_of("other_processes_rise_bytes") < grown
    assert "another" in risk.advice[0].text


def test_growth_outside_pytorch_cannot_use_its_cache():
    """The driver knows nothing of PyTorch's cache, and refuses the library."""
    cache = 96 * MIB
    run = at_last_step(recorded(LIBRARY))
    with_cache = with_driver(
        run, used_bytes=more("used_bytes", cache), process_used_bytes=more("process_used_bytes", cache)
    )
    with_cache = with_allocator(with_cache, reserved_bytes=more("reserved_bytes", cache))
    [risk] = find_device_risk(with_cache)
    newest = run.streams["device"].iloc[-1]
    since = (run.now_ns - newest["time_ns"]) / 1e9
    left = newest["total_bytes"] - newest["used_bytes"] - cache
    rate = MIB * steps_per_second(run)
    assert risk.eta.mid_seconds == pytest.approx(left / rate - since, abs=2)
    assert cache / rate > 4, "the cache would make a difference"


def test_process_without_allocator_records_is_judged_by_the_driver():
    tables = at_last_step(recorded(TENSORS))
    grown = rise(tables.streams["device"], "process_used_bytes").max()
    none = {name: tables.streams[name].iloc[:0] for name in ("device_memory", "step", "batch", "fetch")}
    tables = replace(tables, streams=tables.streams | none)
    [risk] = find_device_risk(tables)
    assert (risk.kind, risk.limit.name) == ("gpu-oom-risk", "GPU 0")
    assert 0.5 * grown < risk.value_of("process_used_rise_bytes") <= grown
    assert "tidegauge run" in risk.advice[0].text
    assert find_device_growth(tables) == []  # what grows there is not known


def test_forecast_adds_peaks_within_steps():
    """Evaluations need 100 MiB for a while, every 60 steps."""
    extra, every = 100 * MIB, 60
    run = at_last_step(recorded(TENSORS))
    needed = with_allocator(
        run,
        allocated_peak_bytes=lambda rows: rows["allocated_bytes"] + extra * (rows["step"] % every == every // 2),
    )
    [without], [risk] = find_device_risk(run), find_device_risk(needed)
    rate = MIB * steps_per_second(run)
    sooner = without.eta.mid_seconds - extra / rate
    assert risk.eta.low_seconds <= sooner + every / steps_per_second(run)  # the next evaluation
    assert risk.eta.high_seconds >= sooner
    assert risk.eta.mid_seconds < without.eta.low_seconds


def test_cache_of_evaluations_between_steps_is_no_demand():
    """The driver counts it at once, and PyTorch's records show it only at the next step."""
    run = recorded(TENSORS)
    records = run.streams["device_memory"]
    cached = with_cache(run, 300 * MIB * ((records["step"] + 15) // 60))
    evaluated = only_rows(cached, "device_memory", lambda rows: rows["step"] % 60 < 45)
    [without], [risk] = find_device_risk(run), find_device_risk(evaluated)
    assert risk.rate.value == pytest.approx(without.rate.value, rel=0.1)
    assert risk.eta.mid_seconds == pytest.approx(without.eta.mid_seconds, rel=0.1)


def test_forecast_does_not_need_a_cache_that_is_steady_from_step_to_step():
    """A tensor that grows by torch.cat leaves blocks that fit nothing, and PyTorch releases them at the limit."""
    run = recorded(TENSORS)
    cached = with_cache(run, run.streams["device_memory"]["step"] % 90 // 3 * 60 * MIB)
    [risk] = find_device_risk(cached)
    assert risk.rate.value == pytest.approx(find_device_risk(run)[0].rate.value, rel=0.2)


def test_forecast_counts_fragmentation_as_demand():
    run = recorded(HOLES)
    [risk] = find_device_risk(run)
    records = run.streams["device_memory"]
    held = rise(records.assign(held=records["allocated_bytes"] + records["inactive_split_bytes"]), "held")
    seconds = (records["time_ns"].iloc[-1] - records["time_ns"].iloc[0]) / 1e9
    assert risk.rate.value == pytest.approx(held.iloc[-1] / seconds, rel=0.25)
    assert {"inactive_split_rise_bytes", "device_used_rise_bytes"} <= {e.name for e in risk.evidence}


def test_repeated_allocation_failures_on_a_full_device_are_a_risk():
    failing = with_allocator(recorded("uneven-batches"), alloc_retry_count=lambda rows: rows["step"] // 40)
    [risk] = find_device_risk(with_other_job(failing, 180 * MIB))
    assert (risk.kind, risk.severity, risk.eta) == ("gpu-oom-risk", "warning", None)
    assert find_device_risk(failing) == []
    assert kinds(only_rows(failing, "device", lambda rows: rows["device"] < 0)) == ["cannot-tell"]


def test_run_without_a_gpu_has_no_gpu_findings():
    assert kinds(recorded("diabetes")) == []


def test_host_growth_that_follows_from_a_tensor_leak_is_information():
    run = with_host_growth(with_steady_host(recorded("gpu-loss-list")), "allocated_bytes", 0.8)
    found = {finding.kind: finding for finding in diagnose(run).findings}
    assert found["gpu-tensor-leak"].severity == "warning"
    assert found["main-heap-leak"].severity == "info"
    assert "gpu-tensor-leak" in found["main-heap-leak"].summary


def test_independent_host_and_device_leaks_are_both_found():
    run = with_host_growth(with_steady_host(recorded(TENSORS)), "allocated_bytes", 0.5)
    assert {"gpu-tensor-leak", "main-heap-leak"} <= set(warnings_of(run))


def test_findings_of_an_ended_run_are_in_the_order_of_growth_with_forecasts_last():
    run = with_host_growth(with_steady_host(recorded(HOLES)), "inactive_split_bytes", 0.2)
    assert list(warnings_of(run)) == ["gpu-fragmentation", "main-heap-leak", "gpu-oom-risk"]


def test_limit_that_was_met_has_no_forecast():
    for name in ("cuda-oom", "leak-to-the-end"):
        found = {finding.kind for finding in diagnose(recorded(name)).findings}
        assert "cuda-oom" in found
        assert "gpu-oom-risk" not in found


def test_gpu_that_nvml_stopped_answering_for_is_reported():
    """The training ends soon after, as usual: it is the samples after its last step that tell."""
    run = recorded("device-lost")
    before_end = run.streams["device"]["time_ns"] <= run.streams["step"]["time_ns"].iloc[-1]
    assert run.streams["device"]["used_bytes"][before_end].isna().sum() < 3
    [gone] = [each for each in diagnose(run).findings if "NVML stopped answering" in each.summary]
    assert (gone.kind, gone.severity, gone.locus.device) == ("cannot-tell", "warning", 0)
    assert gone.value_of("device_samples_missing_count") == run.streams["device"]["used_bytes"].isna().sum()
    assert not any("NVML" in each.summary for each in diagnose(recorded("uneven-batches")).findings)
