"""Forecasts of a GPU's limit: what counts as demand, whose growth it is, and which limit comes first."""

from dataclasses import replace

import pandas as pd
import pytest
from altered_gpu_runs import (
    HOLES,
    LIBRARY,
    TENSORS,
    as_another_job,
    kinds,
    more,
    steps_per_second,
    with_allocator,
    with_cache,
    with_driver,
    with_other_job,
)
from simulated_runs import MIB

from collector.diagnosis.memory.gpu_memory import find_device_growth, find_device_risk
from collector.diagnosis.verdict import diagnose
from collector.units import size
from tests.recorded_runs import (
    at_last_step,
    only_rows,
    recorded,
    rise,
    until,
    with_changed_event,
    with_hidden_processes,
)


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
    assert "would have lasted" in find_device_risk(recorded(TENSORS))[0].summary


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


def test_growth_of_processes_without_records_names_workers_that_use_cuda():
    run = recorded(LIBRARY)
    grown = rise(run.streams["device"], "process_used_bytes").fillna(0)
    in_worker = with_driver(run, recorded_used_bytes=lambda rows: rows["process_used_bytes"] - grown)
    [risk] = find_device_risk(in_worker)
    assert "DataLoader workers" in risk.advice[0].text
    assert risk.value_of("unrecorded_processes_rise_bytes") == risk.value_of("process_used_rise_bytes")
    assert "batch size" not in " ".join(advice.text for advice in risk.advice)
    assert "DataLoader workers" not in find_device_risk(run)[0].advice[0].text


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


def test_allocations_that_failed_for_good_are_errors_alone():
    failing = with_allocator(recorded("uneven-batches"), alloc_retry_count=lambda rows: rows["step"] // 40)
    errors = with_allocator(failing, oom_count=lambda rows: rows["step"] // 40)
    assert find_device_risk(with_other_job(errors, 180 * MIB)) == []


def test_full_device_whose_cache_is_in_pieces_needs_another_setting_first():
    failing = with_allocator(recorded("uneven-batches"), alloc_retry_count=lambda rows: rows["step"] // 40)
    own = with_driver(
        with_other_job(failing, 180 * MIB), other_used_bytes=lambda rows: 0 * rows["other_used_bytes"]
    )
    [full] = find_device_risk(own)
    assert full.advice[0].text.startswith("Make a step smaller"), "nothing grows that could be fixed"
    pieces = with_allocator(own, reserved_peak_bytes=more("allocated_peak_bytes", 200 * MIB))
    [in_pieces] = find_device_risk(pieces)
    assert "expandable_segments:True" in in_pieces.advice[0].text


def test_full_device_that_others_fill_has_advice_on_them_first():
    """Without them it would not be full: smaller steps gain less."""
    failing = with_allocator(recorded("uneven-batches"), alloc_retry_count=lambda rows: rows["step"] // 40)
    crowded = with_other_job(failing, 180 * MIB)
    [full] = find_device_risk(crowded)
    others = crowded.streams["device"]["other_used_bytes"].median()
    assert f"Processes outside the run held {size(others)} of it." in full.summary
    assert full.advice[0].text.startswith("End the other processes")
    workers = with_driver(
        crowded,
        recorded_used_bytes=lambda rows: rows["process_used_bytes"],
        process_used_bytes=lambda rows: rows["process_used_bytes"] + rows["other_used_bytes"],
        other_used_bytes=lambda rows: 0 * rows["other_used_bytes"],
    )
    [full] = find_device_risk(workers)
    assert f"Processes of the run that take no steps held {size(others)} of it." in full.summary
    assert full.advice[0].text.startswith("Take the work of these processes off this GPU")
    rows = workers.streams["device_memory"]
    at_error = rows.iloc[[len(rows) // 2]].assign(pid=1, reserved_bytes=others, allocated_bytes=others, oom_count=1)
    records = pd.concat([rows, at_error]).sort_values("time_ns", kind="stable")
    assert find_device_risk(replace(workers, streams={**workers.streams, "device_memory": records})) == [full]


def test_limit_that_was_met_has_no_forecast():
    for name in ("cuda-oom", "leak-to-the-end"):
        found = {finding.kind for finding in diagnose(recorded(name)).findings}
        assert "cuda-oom" in found
        assert "gpu-oom-risk" not in found
