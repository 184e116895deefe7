"""GPU memory: growth is named by its mechanism; memory that only seems to grow has no finding.

The runs were recorded (tests/recorded_runs.py): PyTorch's own allocator made their records on simulated devices.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from altered_gpu_runs import (
    HOLES,
    LIBRARY,
    PINNED,
    TENSORS,
    as_another_job,
    flat,
    kinds,
    steps_per_second,
    with_allocator,
    with_driver,
    with_host_growth,
    with_steady_host,
)
from simulated_runs import MIB

from collector.diagnosis.memory.allocation_sites import rank_sites
from collector.diagnosis.memory.gpu_memory import find_device_growth
from collector.diagnosis.verdict import diagnose
from collector.report.wording import check_words
from collector.store.allocator_snapshots import ProcessGrowth, SiteGrowth
from tests.recorded_runs import at_last_step, only_rows, recorded, rise, with_hidden_processes

#: Runs whose memory only seems to grow: batches of uneven size with another job on the GPU, evaluations
#: that hold more for a while, an optimizer whose state is made late.
HEALTHY = ("uneven-batches", "evaluation", "late-optimizer")


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


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_no_growth_findings(name):
    assert kinds(recorded(name)) == []
    assert warnings_of(recorded(name)) == {}


def test_without_nvml_only_the_memory_of_pytorch_is_called_fine():
    run = recorded("uneven-batches")
    [seen] = [check for check in diagnose(run).checks if check.name == "GPU memory"]
    unseen_run = only_rows(run, "device", lambda rows: rows["device"] < 0)
    [unseen] = [check for check in diagnose(unseen_run).checks if check.name == "GPU memory"]
    assert (seen.status, seen.reason) == ("fine", "")
    assert check_words([unseen])[0] == "Checked and fine: GPU memory (of PyTorch alone: NVML reports nothing)."


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
    assert warnings_of(run)["gpu-tensor-leak"].advice[-1].text.startswith("Run it again for a minute or more with")
    started = {**run.events[0], "kind": "collector-start", "investigates": True}
    ended_early = warnings_of(replace(run, events=[started, *run.events]))["gpu-tensor-leak"]
    assert ended_early.advice[-1].text.startswith(
        "Run it for longer: `--investigate` made no trace of this process."
    )
    [held] = warnings_of(recorded("investigated"))["gpu-tensor-leak"].held_by
    assert (held.grown_bytes, held.what) == (held.grown_count * MIB // 2, "tensors")
    assert [re.fullmatch(r"growth\.py:\d+ (.*)", site)[1] for site in (held.site, held.callers[0])] == [
        "block",
        "tensors",
    ]


def test_leak_that_a_trace_did_not_show_needs_another_one():
    """It may grow at each start of an epoch, which fell outside of the traced steps."""
    run = recorded("investigated")
    seen_nothing = [replace(grown, lines=(), held_bytes={}) for grown in run.grown]
    leak = warnings_of(replace(run, grown=seen_nothing))["gpu-tensor-leak"]
    assert leak.held_by == ()
    assert "--memory-history" in leak.advice[-1].text
    assert not any("--investigate" in advice.text for advice in leak.advice)


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


@pytest.mark.parametrize(("tensors", "first"), [(1, "one or two tensors at a time"), (4, "with their graph")])
def test_advice_is_about_graphs_only_if_a_step_keeps_as_many_tensors(tensors, first):
    """A graph keeps what it saved for the backward pass; after that pass only the tensor itself is left."""
    run = recorded(TENSORS)
    kept = with_allocator(
        run, allocation_count=lambda rows: rows["allocation_count"] + (tensors - 1) * rise(rows, "allocation_count")
    )
    assert first in only_finding(kept, "gpu-tensor-leak").advice[0].text


@pytest.mark.parametrize(("kept", "every", "noise"), [(12, 10, 2), (1, 1, 12)])
def test_advice_is_general_where_the_number_of_tensors_does_not_decide(kept, every, noise):
    run, generator = recorded(TENSORS), np.random.default_rng(0)

    def counts(rows):
        steps = np.arange(len(rows))
        return 1000 + kept * (steps // every) + generator.integers(0, noise, len(rows))

    advice = only_finding(with_allocator(run, allocation_count=counts), "gpu-tensor-leak").advice[0].text
    assert "with their graph" in advice


def test_tensors_that_are_the_memory_themselves_are_not_advised_to_be_detached():
    run = recorded(TENSORS)
    [event], held = run.events_of("process-start"), replace(graph("train.py:7 step", 50, 20 * MIB), device="cuda:0")
    grown = ProcessGrowth(event=event, window="steps 0-50", held_bytes={"cuda:0": 20 * MIB}, lines=(held,))
    run = replace(run, grown=(grown,))
    of_graphs = with_allocator(
        run, allocation_count=lambda rows: rows["allocation_count"] + 3 * rise(rows, "allocation_count")
    )
    for tables, first in ((run, "Keep no tensors from"), (of_graphs, "Keep no graph of the tensors from")):
        assert warnings_of(tables)["gpu-tensor-leak"].advice[0].text.startswith(f"{first} `train.py:7 step`")


def test_larger_batches_are_not_called_a_leak():
    assert kinds(with_allocator(recorded(TENSORS), allocation_count=flat("allocation_count")))[0] == "cannot-tell"


def test_without_allocation_counts_a_leak_needs_reserved_memory_that_grows_and_steps_that_do_not():
    """The allocator `cudaMallocAsync` does not count tensors."""
    uncounted = with_allocator(recorded(TENSORS), allocation_count=np.nan)
    assert only_finding(uncounted, "gpu-tensor-leak").value_of("reserved_rise_bytes") > 0
    assert kinds(with_allocator(uncounted, reserved_bytes=flat("reserved_bytes")))[0] == "cannot-tell"
    larger = with_allocator(
        uncounted, allocated_peak_bytes=lambda rows: rows["allocated_bytes"] + rise(rows, "allocated_bytes")
    )
    assert kinds(larger)[0] == "cannot-tell"


def test_growing_inactive_splits_are_fragmentation():
    holes = only_finding(recorded(HOLES), "gpu-fragmentation")
    assert "inactive_split_rise_bytes" in {evidence.name for evidence in holes.evidence}


def test_failed_allocations_show_fragmentation_of_expandable_segments():
    run = with_allocator(recorded(HOLES), inactive_split_bytes=0)
    assert kinds(run) == []
    failing = with_allocator(run, alloc_retry_count=lambda rows: rows["step"] // 40)
    assert "alloc_retry_steps_count" in {e.name for e in only_finding(failing, "gpu-fragmentation").evidence}


def test_cache_of_steps_that_take_ever_more_is_no_fragmentation():
    """Batches grow: so do the peaks within the steps."""
    peaks = with_allocator(
        recorded(HOLES), allocated_peak_bytes=lambda rows: rows["allocated_bytes"] + rise(rows, "reserved_bytes")
    )
    assert "gpu-fragmentation" not in kinds(peaks)


def test_unused_memory_between_kept_tensors_follows_from_their_leak():
    run = recorded(HOLES)
    grown = 3 * rise(run.streams["device_memory"], "inactive_split_bytes")
    names = ("allocated_bytes", "active_bytes", "reserved_bytes", "allocated_peak_bytes")
    more_tensors = {name: (lambda rows, name=name: rows[name] + grown) for name in names}
    both = with_allocator(run, **more_tensors, allocation_count=lambda rows: rows["step"])
    [holes] = [finding for finding in diagnose(both).findings if finding.kind == "gpu-fragmentation"]
    assert (holes.severity, holes.consequence_of) == ("info", "gpu-tensor-leak")


def test_holes_that_stay_while_the_cache_is_released_are_fragmentation():
    """At the limit PyTorch gives its free segments back, again and again: the unused memory is a sawtooth."""

    def reserved(rows):
        return rows["active_bytes"] + rows["inactive_split_bytes"] + rows["step"] % 100 * 4 * MIB

    run = with_allocator(recorded(HOLES), reserved_bytes=reserved)
    evidence = {item.name for item in only_finding(run, "gpu-fragmentation").evidence}
    assert evidence == {"inactive_split_rise_bytes", "unused_rise_bytes"}


def test_holes_that_are_the_smaller_part_of_a_growing_cache_are_fragmentation():
    """Requests that grow leave free segments too, which PyTorch can give back."""
    run = recorded(HOLES)
    grown = 4 * rise(run.streams["device_memory"], "inactive_split_bytes")
    holes = only_finding(with_allocator(run, reserved_bytes=lambda rows: rows["reserved_bytes"] + grown), HOLES)
    assert holes.value_of("inactive_split_rise_bytes") < 0.5 * holes.value_of("unused_rise_bytes")


def test_private_pools_that_grow_are_no_fragmentation_to_tune():
    """Each captured CUDA graph keeps its pool: expandable segments would not help."""
    pools = with_allocator(recorded(HOLES), private_pool_bytes=lambda rows: rise(rows, "reserved_bytes"))
    grown = only_finding(pools, "gpu-fragmentation")
    assert "CUDA graphs or of torch.cuda.MemPool" in grown.summary
    assert any("use one torch.cuda.MemPool" in advice.text for advice in grown.advice)
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


def test_gpu_that_nvml_stopped_answering_for_is_reported():
    """The training ends soon after, as usual: it is the samples after its last step that tell."""
    run = recorded("device-lost")
    before_end = run.streams["device"]["time_ns"] <= run.streams["step"]["time_ns"].iloc[-1]
    assert run.streams["device"]["used_bytes"][before_end].isna().sum() < 3
    [gone] = [each for each in diagnose(run).findings if "NVML stopped answering" in each.summary]
    assert (gone.kind, gone.severity, gone.locus.device) == ("cannot-tell", "warning", 0)
    assert gone.value_of("device_samples_missing_count") == run.streams["device"]["used_bytes"].isna().sum()
    assert not any("NVML" in each.summary for each in diagnose(recorded("uneven-batches")).findings)
