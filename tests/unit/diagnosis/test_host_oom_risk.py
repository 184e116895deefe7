"""Limits of host memory: when the run meets them, and who takes the memory."""

import numpy as np
import pytest
from growing_memory import (
    COLLECTOR,
    RAMP,
    SECONDS,
    UNREAD,
    findings_of,
    kinds,
    memory,
    training,
)
from simulated_runs import (
    MAIN,
    MIB,
    START_SECONDS,
    Script,
    ns,
    sample_host,
    sample_process,
    start_training,
)

from collector.diagnosis.memory.exhaustion import full_finding
from collector.diagnosis.memory.resources import HOST_MEMORY
from collector.findings import Limit, Locus, measurements
from collector.units import size
from training_harness.records import ROLE_MAIN, ROLE_WORKER


def test_host_risk_advises_fewer_workers_only_where_there_are_workers():
    alone = Script()
    alone.event(START_SECONDS, "process-start")
    sample_process(alone, SECONDS, MAIN, ROLE_MAIN, private=(300 + 600 * RAMP) * MIB, rss=(500 + 600 * RAMP) * MIB)
    sample_host(alone, SECONDS, demand=(4000 + 600 * RAMP) * MIB, limit=6000 * MIB)
    with_workers = memory(training(), main=600 * RAMP, host=600 * RAMP, limit=6000 * MIB)
    for script, advised in ((alone, False), (with_workers, True)):
        risk = next(f for f in findings_of(script) if f.kind == "host-oom-risk")
        assert any("workers" in advice.text for advice in risk.advice) == advised


def test_growth_towards_the_limit_has_a_forecast_in_time_and_steps():
    script = memory(training(), main=600 * RAMP, host=600 * RAMP, limit=6000 * MIB)
    risk = next(f for f in findings_of(script) if f.kind == "host-oom-risk")
    assert risk.severity == "critical"
    assert risk.limit.value == 6000 * MIB
    assert risk.eta.mid_seconds == pytest.approx(140, rel=0.15)
    assert risk.eta.low_seconds <= risk.eta.mid_seconds <= risk.eta.high_seconds
    assert "would have lasted" in risk.summary
    assert risk.eta.mid_steps == pytest.approx(risk.eta.mid_seconds / 0.25, rel=0.2)


def test_memory_of_a_live_verdict_is_no_demand():
    """The verdict holds 100 MiB for a moment, every ten samples, in the cgroup of the training."""
    verdict = 100 * (np.arange(60) % 10 == 3)
    script = memory(training(), main=100 * RAMP, host=100 * RAMP + verdict, limit=4300 * MIB)
    rows = [
        {"time_ns": ns(at), "verdict_anon_bytes": size * MIB if size else np.nan}
        for at, size in zip(SECONDS, verdict, strict=True)
    ]
    script.add("agent", rows, COLLECTOR)
    (risk,) = (each for each in findings_of(script) if each.kind == "host-oom-risk")
    assert risk.eta.mid_seconds == pytest.approx(120, rel=0.2)
    assert risk.eta.low_seconds > 0.7 * risk.eta.mid_seconds


@pytest.mark.parametrize(("caches_mib", "seconds"), [(np.nan, 90), (500, 140)])
def test_kernel_memory_counts_towards_the_limit_except_caches(caches_mib, seconds):
    kernel = {"usage": 5100, "file": 0, "slab_reclaimable": caches_mib}
    columns = {f"cgroup_{name}_bytes": np.full(60, float(size)) * MIB for name, size in kernel.items()}
    script = memory(training(), main=600 * RAMP, host=600 * RAMP, limit=6000 * MIB, **columns)
    risk = next(f for f in findings_of(script) if f.kind == "host-oom-risk")
    assert risk.eta.mid_seconds == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("planned", "share"),
    [({"max_steps": 20_400}, 0.0), ({"max_steps": -1, "max_epochs": 220}, 1.0)],
)
def test_forecast_has_the_chance_of_the_limit_before_the_planned_end(planned, share):
    """The framework counts on from a checkpoint: 20 000 steps, 100 in each epoch."""
    script = memory(training(), main=600 * RAMP, host=600 * RAMP, limit=6000 * MIB)
    script.event(START_SECONDS + 0.1, "hyper-parameters", framework="lightning", values=planned)
    script.event(START_SECONDS + 0.2, "phase", phase="train", epoch=200, step=20_000)
    script.living = frozenset([MAIN, COLLECTOR])
    risk = next(f for f in findings_of(script) if f.kind == "host-oom-risk")
    assert risk.value_of("limit_met_before_end_ratio") == pytest.approx(share, abs=0.05)
    assert f"In {share:.0%} of the simulated futures" in risk.summary


@pytest.mark.parametrize(
    ("name", "words"), [("host memory", "9.8 GiB of 10 GiB at"), ("cgroup", "10 GiB (cgroup)")]
)
def test_a_full_memory_names_the_limit_that_is_not_the_hosts_own(name, words):
    limit, facts = Limit(name=name, value=10 * 2**30, unit="bytes"), measurements(1, "run", a_ratio=1, b_ratio=1)
    full = full_finding(HOST_MEMORY, limit, 9.8 * 2**30, Locus(host="node"), facts, verb="was")
    assert words in full.summary


def test_growth_that_takes_days_is_no_risk():
    script = memory(training(), main=30 * RAMP, host=30 * RAMP, noise=0.1, total=10**14)
    assert "host-oom-risk" not in kinds(script)


def test_copy_on_read_that_ends_below_the_limit_is_no_risk():
    script = memory(training(), workers_private=100 * RAMP, host=200 * RAMP, total=30_000 * MIB)
    assert kinds(script) == ["copy-on-read-growth"]


def test_distant_limit_is_only_information():
    (risk,) = (
        f for f in findings_of(memory(training(), main=100 * RAMP, host=100 * RAMP)) if f.kind == "host-oom-risk"
    )
    assert risk.severity == "info"
    assert "too much for a warning" in risk.summary
    assert "out" not in risk.summary.split()


def test_growth_of_other_programs_on_a_roomy_host_is_no_risk():
    assert kinds(memory(training(), host=2000 * RAMP)) == []


def test_growth_of_the_run_that_ended_is_no_risk_where_other_programs_go_on():
    grown = 600 * np.minimum(2 * RAMP, 1)
    assert kinds(memory(training(), main=grown, host=1000 * RAMP, total=9000 * MIB)) == []
    assert "host-oom-risk" in kinds(memory(training(), main=600 * RAMP, host=1000 * RAMP, total=9000 * MIB))


def test_a_memory_that_others_fill_is_theirs_to_look_for():
    grows = memory(training(), host=900 * RAMP, limit=5000 * MIB)
    (risk,) = findings_of(grows)
    assert "Less than half of the growth is the run's." in risk.summary
    full = memory(training(), limit=4100 * MIB, memory_full_avg10_ratio=np.full(60, 0.3))
    (level,) = findings_of(full)
    held = level.value_of("run_held_bytes")
    assert 0 < held < 2000 * MIB
    assert f"The run's processes held {size(held)} of it." in level.summary
    for finding in (risk, level):
        assert "other programs" in finding.advice[0].text
    own = memory(training(), main=900 * RAMP, host=900 * RAMP, limit=5000 * MIB)
    assert all("other programs" not in advice.text for each in findings_of(own) for advice in each.advice)


def test_workers_of_one_epoch_after_another_are_no_growth_of_the_run():
    script = memory(training(), host=2000 * RAMP)
    for epoch in range(6):
        lived = slice(10 * epoch, 10 * epoch + 10)
        grown = np.linspace(20, 320, 10) * MIB
        key = ("node", 900 + epoch, 900 + epoch)
        sample_process(script, SECONDS[lived], key, ROLE_WORKER, private=grown, rss=grown, worker=0, loader=0)
    assert kinds(script) == []


def test_a_risk_of_freed_memory_that_stays_says_so_and_how_to_get_it_back():
    script = memory(training(), main=600 * RAMP, free=580 * RAMP, host=600 * RAMP, limit=6000 * MIB)
    (risk,) = findings_of(script)
    assert "MiB of the growth is freed memory in the training process (pid 100)" in risk.summary
    assert risk.value_of("freed_rise_bytes") > 400 * MIB
    assert "MALLOC_MMAP_THRESHOLD_" in risk.advice[0].text
    leak = memory(training(), main=600 * RAMP, free=0 * RAMP, host=600 * RAMP, limit=6000 * MIB)
    assert all(finding.value_of("freed_rise_bytes") is None for finding in findings_of(leak))


def test_a_risk_counts_the_freed_memory_of_all_training_processes():
    script = memory(training(), main=600 * RAMP, free=250 * RAMP, host=600 * RAMP, limit=6000 * MIB)
    second = ("node", 101, 5001)
    start_training(script, key=second, rank=1)
    rows = [{"time_ns": ns(at), "free_bytes": mib * MIB} for at, mib in zip(SECONDS, 250 * RAMP, strict=True)]
    script.add("heap", rows, second, 1)
    (risk,) = [finding for finding in findings_of(script) if finding.kind == "host-oom-risk"]
    assert "MiB of the growth is freed memory in 2 training processes" in risk.summary
    assert risk.value_of("freed_rise_bytes") > 400 * MIB


def test_freed_memory_goes_on_growing_after_the_last_reading_of_a_heap_with_many_holes():
    script = memory(training(), main=1200 * RAMP, free=1100 * RAMP, total=10**14)
    script.parts["heap"] = [rows[rows["time_ns"] < ns(SECONDS[40])] for rows in script.parts["heap"]]
    (leak,) = findings_of(script)
    assert leak.rate.value * (SECONDS[-1] - SECONDS[0]) == pytest.approx(100 * MIB, rel=0.2)


def test_full_host_is_a_risk_without_growth():
    script = memory(training(), limit=4100 * MIB, memory_full_avg10_ratio=np.full(60, 0.3))
    risk = findings_of(script)
    assert [(f.kind, f.severity, f.eta) for f in risk] == [("host-oom-risk", "critical", None)]


def test_page_cache_is_no_demand():
    script = memory(training(), limit=10_000 * MIB, cgroup_usage_bytes=np.full(60, 9990.0 * MIB))
    assert kinds(script) == []


def test_workers_whose_share_was_not_read_count_with_what_they_took_since_they_began():
    """Other programs are not blamed for it."""
    script = memory(training(), workers=500 * RAMP, workers_private=UNREAD, host=1000 * RAMP, limit=6500 * MIB)
    risk = next(finding for finding in findings_of(script) if finding.kind == "host-oom-risk")
    assert risk.severity == "critical"
    assert risk.value_of("run_processes_rise_bytes") == pytest.approx(800 * MIB, rel=0.2)
    assert not any("other programs" in advice.text for advice in risk.advice)
