"""Memory that grows by what the optimizers keep."""

import pytest
from growing_memory import RAMP, SECONDS, findings_of, memory, training
from simulated_runs import MAIN, MIB, ns

from collector.diagnosis.verdict import diagnose


def of_optimizers(script, kept):
    """Add what the optimizers of the training process keep, in MiB: a quarter of it are gradients."""
    rows = [
        {"time_ns": ns(at), "device": -1, "gradients_bytes": mib * MIB // 4, "state_bytes": 3 * mib * MIB // 4}
        for at, mib in zip(SECONDS, kept, strict=True)
    ]
    return script.add("optimizer", rows, MAIN)


def test_state_of_an_optimizer_that_trains_more_and_more_layers_is_no_leak():
    script = memory(training(), main=600 * RAMP, host=600 * RAMP, total=10**14)
    found = diagnose(of_optimizers(script, 600 * RAMP).tables()).findings
    (told,) = [finding for finding in found if finding.rate is not None]
    assert (told.kind, told.severity) == ("bounded-growth", "info")
    assert "gradients and state of its optimizers" in told.summary
    assert told.value_of("optimizer_rise_bytes") > 256 * MIB


def test_forecast_of_growth_by_the_optimizer_is_information():
    script = memory(training(), main=600 * RAMP, host=600 * RAMP, total=8 * 2**30)
    (risk,) = findings_of(of_optimizers(script, 600 * RAMP))
    assert (risk.kind, risk.severity) == ("host-oom-risk", "info")
    assert "which ends by itself" in risk.summary


def test_leak_beside_a_growing_optimizer_is_found_with_its_own_rate():
    script = memory(training(), main=900 * RAMP, host=900 * RAMP, total=10**14)
    (leak,) = findings_of(of_optimizers(script, 600 * RAMP))
    assert (leak.kind, leak.severity) == ("main-heap-leak", "warning")
    assert leak.rate.value == pytest.approx(5 * MIB, rel=0.1)
