"""Memory that grows by what the optimizers keep."""

from dataclasses import replace

import pytest
from altered_gpu_runs import with_allocator
from growing_memory import RAMP, SECONDS, findings_of, memory, training
from simulated_runs import MAIN, MIB, ns

from collector.diagnosis.deaths.cuda_oom import find_cuda_ooms
from collector.diagnosis.verdict import diagnose
from tests.recorded_runs import only_rows, recorded, with_changed_event


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
    assert not any("Fix the growth" in advice.text for advice in risk.advice)


def test_leak_beside_a_growing_optimizer_is_found_with_its_own_rate():
    script = memory(training(), main=900 * RAMP, host=900 * RAMP, total=10**14)
    (leak,) = findings_of(of_optimizers(script, 600 * RAMP))
    assert (leak.kind, leak.severity) == ("main-heap-leak", "warning")
    assert leak.rate.value == pytest.approx(5 * MIB, rel=0.1)


@pytest.mark.parametrize(
    ("new_gradients", "new_state", "risen_before", "is_copy"),
    [
        (0, 0, 0, True),
        (300, 0, 0, False),
        (0, 300, 0, True),  # state of the step that failed is no part of the level before it
        (100, 0, 100, True),  # these gradients came between the reading and the last step
    ],
)
def test_gradients_of_layers_that_train_from_the_error_on_are_no_copy(
    new_gradients, new_state, risen_before, is_copy
):
    run = recorded("out-of-memory")
    [error] = run.events_of("cuda-oom")
    last = int(run.streams["step"]["step"].max())
    run = only_rows(run, "step", lambda rows: rows["step"] < last)
    failed = with_changed_event(only_rows(run, "batch", lambda rows: rows["index"] <= last), "cuda-oom", step=last)

    def risen(rows):
        risen_mib = (rows["step"] == last) * 300 + (rows["step"] >= last - 1) * risen_before
        return rows["allocated_bytes"] + risen_mib * MIB

    readings = (
        run.streams["step"]
        .tail(2)[["time_ns", "host", "pid", "start_ticks", "rank"]]
        .assign(
            time_ns=[run.streams["step"]["time_ns"].iloc[-2], error["error_time_ns"]],
            device=0,
            gradients_bytes=[40 * MIB, (40 + new_gradients) * MIB],
            state_bytes=[80 * MIB, (80 + new_state) * MIB],
        )
    )
    failed = with_allocator(failed, allocated_bytes=risen)
    (found,) = find_cuda_ooms(replace(failed, streams={**failed.streams, "optimizer": readings}))
    assert ("Let go of what was made since the step before" in found.advice[0].text) == is_copy
