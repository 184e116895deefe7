"""Memory that grows at checkpoints, evaluations or epochs."""

import numpy as np
import pytest
from simulated_runs import (
    MAIN,
    MIB,
    START_SECONDS,
    jittered,
    ns,
    sample_host,
    sample_process,
    simulate,
)

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN

SECONDS = np.arange(80) + START_SECONDS + 1
CHECKPOINTS = START_SECONDS + 10 + 15 * np.arange(5)


def trained(levels_mib, *, epochs=1, checkpoints=(), is_early=False):
    """80 s of training by one process whose written memory has these levels over 300 MiB, with noise."""
    batches = 300 // epochs
    script = simulate(
        workers=0, prefetch=2, service=jittered(0.01), consumer=jittered(0.25), batches=batches, epochs=epochs
    )
    for at in checkpoints:
        script.event(at + 0.5, "checkpoint", begun_ns=ns(at))
    held = (300 + np.asarray(levels_mib) + np.random.default_rng(0).normal(0, 0.3, len(SECONDS))) * MIB
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=held, rss=held, data_bytes=held)
    if is_early:
        between = np.setdiff1d(np.round(np.arange(SECONDS[0], SECONDS[-1], 0.2), 1), SECONDS)
        values = np.interp(between, SECONDS, held)
        process = {"process_pid": MAIN[1], "process_start_ticks": MAIN[2], "fd_count": 30}
        rows = [
            {"time_ns": ns(at), "rss_bytes": value, "anon_bytes": value, **process}
            for at, value in zip(between, values, strict=True)
        ]
        script.add("early_process", rows, ("node", 90, 4900))
    return sample_host(script, SECONDS, demand=4000 * MIB + held, total=10**14)


def after(times, rise_mib):
    return rise_mib * np.searchsorted(np.asarray(times), SECONDS).astype(float)


def leaks(script):
    return [f for f in diagnose(script.tables()).findings if f.kind == "main-heap-leak"]


@pytest.mark.parametrize("is_early", [False, True])
def test_growth_at_each_checkpoint_is_named_with_its_size(is_early):
    (leak,) = leaks(trained(after(CHECKPOINTS, 26), checkpoints=CHECKPOINTS, is_early=is_early))
    assert "around each checkpoint" in leak.summary
    assert leak.value_of("rise_each_time_bytes") == pytest.approx(26 * MIB, rel=0.1)
    assert "checkpoint" in leak.advice[0].text
    assert not any("per step" in text for text in (leak.summary, *(advice.text for advice in leak.advice)))


def test_checkpoints_between_the_same_two_samples_share_the_growth():
    both = np.sort(np.concatenate([CHECKPOINTS, CHECKPOINTS + 0.2]))
    (leak,) = leaks(trained(after(CHECKPOINTS, 26), checkpoints=both))
    assert leak.value_of("rise_each_time_bytes") == pytest.approx(13 * MIB, rel=0.1)


@pytest.mark.parametrize("is_early", [False, True])
def test_growth_at_a_few_uneven_checkpoints_is_information(is_early):
    at = CHECKPOINTS[[0, 1, 2, 4]]
    (leak,) = leaks(trained(after(at, 40), checkpoints=at, is_early=is_early))
    assert leak.severity == "info"
    assert "around each checkpoint" in leak.summary


def test_growth_in_each_step_is_not_put_down_to_short_epochs():
    """Three samples fall into an epoch, so its first and last ones show what grows in between."""
    (leak,) = leaks(trained(2.0 * np.arange(80), epochs=25))
    assert "around each" not in leak.summary


def test_growth_at_the_start_of_each_epoch_is_named():
    script = trained(np.zeros(80), epochs=6)
    starts = [part["time_ns"].iloc[0] / 1e9 for part in script.parts["batch"]]
    (leak,) = leaks(trained(after(starts[1:], 30), epochs=6))
    assert "around each start of an epoch" in leak.summary


@pytest.mark.parametrize("work_seconds", [1, 5])
def test_growth_in_evaluations_is_not_blamed_on_the_epochs(work_seconds):
    """Each has six batches, half a second apart, and works on their outputs afterwards."""
    evaluations = START_SECONDS + 20 + 13 * np.arange(5)  # within one epoch
    script = trained(after(evaluations + 1 + work_seconds, 30))
    begins = evaluations[:, np.newaxis] + np.arange(0, 3, 0.5)
    for name, rest_seconds in (("batch", 0.0), ("step", 0.4)):
        (rows,) = script.parts[name]
        seconds = rows["time_ns"].to_numpy()[:, np.newaxis] / 1e9 - evaluations
        is_over = (seconds < 0) | (seconds > 3 + work_seconds + rest_seconds)
        script.parts[name] = [rows[is_over.all(axis=1)]]
    for epoch, times in enumerate(begins):
        script.add(
            "batch",
            [
                {"time_ns": ns(at), "loader": 1, "epoch": epoch, "index": index, "worker": -1, "wait_ns": 0}
                for index, at in enumerate(times)
            ],
        )
    (leak,) = leaks(script)
    assert "around each evaluation" in leak.summary


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(4 * np.arange(80.0), id="each step"),
        pytest.param(after(CHECKPOINTS - 7, 26), id="between the checkpoints"),
    ],
)
def test_growth_elsewhere_is_not_blamed_on_the_checkpoints(levels):
    (leak,) = leaks(trained(levels, checkpoints=CHECKPOINTS))
    assert "checkpoint" not in leak.summary
    assert leak.value_of("rise_each_time_bytes") is None


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(np.minimum(after(CHECKPOINTS, 60), 60), id="the first allocates buffers"),
        pytest.param(60.0 * np.isin(np.arange(80) % 15, (9, 10)), id="memory is given back"),
    ],
)
def test_checkpoints_that_keep_nothing_more_are_healthy(levels):
    assert leaks(trained(levels, checkpoints=CHECKPOINTS)) == []
