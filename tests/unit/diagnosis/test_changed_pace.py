"""Judge loops whose fetches became slower or faster for good."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from loading_runs import STEADY, loading_findings
from simulated_runs import finish, jittered, ns, simulate

from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.loading.steady_state import change_within_epochs
from collector.diagnosis.statistics.jumps import jump, rises, spell
from collector.diagnosis.verdict import diagnose

RUN = STEADY | {"workers": 2, "batches": 120, "epochs": 5}
SLOW, FAST = 0.2, 0.03


def by_number(seconds_of):
    """Return fetch times by the number of the batch in the whole run."""
    seen, noise = iter(range(10**6)), jittered(1.0)
    return lambda generator, *_: noise(generator) * seconds_of(next(seen))


@pytest.mark.parametrize("first_slow", [480, 360, 540])
def test_workers_that_become_slow_late_are_too_slow_since_then(first_slow):
    """The batches of a slow last epoch are no stragglers."""
    service = by_number(lambda number: SLOW if number >= first_slow else FAST)
    kinds, found = loading_findings(simulate(**RUN | {"service": service}))
    assert kinds == [("workers-too-slow", "warning")]
    slow = found["workers-too-slow"]
    assert slow.since_step == pytest.approx(first_slow, abs=5)
    assert f"That began after {first_slow} steps: a fetch takes 20" in slow.summary
    assert slow.value_of("lost_seconds") == pytest.approx((600 - first_slow) * (SLOW / 2 - 0.04), rel=0.15)


@pytest.mark.parametrize(("slow", "seconds", "severity"), [(240, SLOW, "warning"), (60, 0.15, "info")])
@pytest.mark.parametrize("first", [0, 120])
def test_workers_that_were_slow_for_a_while_are_a_warning_if_that_cost_much_of_the_run(
    slow, seconds, severity, first
):
    service = by_number(lambda number: seconds if first <= number < first + slow else FAST)
    findings = diagnose(finish(simulate(**RUN | {"service": service})).tables()).findings
    assert [(f.kind, f.severity) for f in findings] == [("workers-too-slow", severity), ("compute-bound", "info")]
    began, ended = re.search(
        r"That (?:began after (\d+) steps and )?ended after (\d+) steps", findings[0].summary
    ).groups("0")
    assert (int(began), int(ended)) == pytest.approx((first, first + slow), abs=2)
    assert ("For a while, a fetch took" if first else "The verdict is on the batches after") in findings[1].summary
    assert "num_workers" not in " ".join(advice.text for advice in findings[0].advice)
    assert findings[0].value_of("lost_seconds") == pytest.approx(slow * (seconds / 2 - 0.04), rel=0.15)


def test_a_loss_in_a_spell_and_outside_of_it_has_the_window_of_both():
    service = by_number(lambda number: 0.4 if 180 <= number < 380 else 0.12)
    (slow,) = diagnose(finish(simulate(**RUN | {"service": service})).tables()).findings
    windows = {evidence.name: evidence.window for evidence in slow.evidence}
    assert windows["lost_wall_ratio"] == windows["lost_seconds"] == "1-66 s"
    assert "otherwise; the shares above leave that time out. The time lost is that of all batches." in slow.summary


@pytest.mark.parametrize("epochs", [1, 5])
def test_workers_that_were_slow_until_late_recovered_only_if_no_epoch_ends_fast(epochs):
    service = by_number(lambda number: SLOW if number < 480 else FAST)
    kinds, found = loading_findings(
        simulate(**RUN | {"service": service, "epochs": epochs, "batches": 600 // epochs})
    )
    assert kinds == [("workers-too-slow", "warning")]
    assert ("That ended after 480 steps." in found["workers-too-slow"].summary) == (epochs > 1)


@pytest.mark.parametrize("epochs", [1, 4])
def test_workers_whose_fetches_become_longer_are_judged_by_the_newest(epochs):
    """A cache that is searched from its first entry on, say: on average the workers have time to spare."""
    service = by_number(lambda number: 0.01 + 0.00025 * number)
    length = {"batches": 600 // epochs, "epochs": epochs}
    kinds, found = loading_findings(simulate(**RUN | {"service": service} | length))
    assert kinds == [("workers-too-slow", "warning")]
    words = "The fetches of this loader become longer: the verdict is on those after "
    assert words in found["workers-too-slow"].summary


@pytest.mark.parametrize(("slow", "is_new"), [((400, 600), True), ((0, 200), False), ((200, 400), False)])
def test_a_worker_that_is_slow_for_a_while_has_no_stragglers(slow, is_new):
    """Its batches are a ninth of all, and far slower than the usual one."""

    def service(_generator, worker, index):
        return 0.5 if worker == 1 and slow[0] <= index < slow[1] else FAST

    _, found = loading_findings(simulate(**RUN | {"workers": 3, "service": service, "batches": 600, "epochs": 1}))
    late = found["slow-worker"]
    assert (list(found), late.locus.worker, late.severity) == (["slow-worker"], 1, "warning")
    assert ("ended after" in late.summary) == (not is_new)
    assert ("a fetch of worker 1 takes 500 ms, and took 30 ms" in late.summary) == is_new


def test_a_slow_part_of_each_epoch_is_not_over():
    service = by_number(lambda number: SLOW if number % 120 < 60 else FAST)
    kinds, found = loading_findings(simulate(**RUN | {"service": service}))
    assert kinds == [("workers-too-slow", "warning")]
    assert "That began" not in found["workers-too-slow"].summary
    words = "In each epoch, a fetch takes 30.1 ms from batch 60 on, and 200 ms before."
    assert words in found["workers-too-slow"].summary


@pytest.mark.parametrize(
    ("before", "since", "words"),
    [
        (0.02, 0.05, None),
        (0.2, 0.4, "The verdict is on the batches after 300 steps: a fetch takes 40"),
        (0.4, 0.2, "The verdict is on the batches after 300 steps: a fetch takes 20"),
    ],
    ids=["healthy before and since", "slow before and since", "less slow since"],
)
def test_a_change_is_not_called_the_begin_of_what_was_there_before(before, since, words):
    service = by_number(lambda number: since if number >= 300 else before)
    findings = diagnose(finish(simulate(**RUN | {"service": service})).tables()).findings
    assert len(findings) == 1
    assert "began" not in findings[0].summary
    if words is None:
        assert findings[0].is_healthy
        assert "steps" not in findings[0].summary
    else:
        assert words in findings[0].summary
        lost = findings[0].value_of("lost_seconds")
        assert lost == pytest.approx(300 * ((before + since) / 2 - 2 * 0.04), rel=0.15)


def test_a_cause_that_was_another_before_is_listed_with_its_cost():
    """First three of four workers are slow, and then only one."""
    of_worker = {w: by_number(lambda number: 0.4 if number < 60 else FAST) for w in (0, 2)}

    def service(generator, worker, _):
        return of_worker[worker](generator) if worker in of_worker else 0.4 if worker == 1 else FAST

    run = RUN | {"workers": 4, "epochs": 1, "batches": 600, "service": service}
    findings = diagnose(finish(simulate(**run)).tables()).findings
    now = next(finding for finding in findings if finding.severity == "warning")
    assert (now.kind, now.locus.worker) == ("slow-worker", 1)
    assert "That began" not in now.summary


@pytest.mark.parametrize(("batches", "transfer"), [(600, 0.0), (470, 0.0), (600, 0.003)])
def test_costs_that_rise_in_each_epoch_neither_begin_nor_end(batches, transfer):
    """The second epoch is complete, or has come as far as its middle. A transfer takes time in any case."""
    run = RUN | {"batches": 300, "epochs": 2, "sampler": "SequentialSampler"}
    script = simulate(**run | {"service": lambda _generator, _worker, index: 0.02 + 0.00033 * index})
    for name in ("batch", "fetch"):
        rows = pd.concat(script.parts[name])
        script.parts[name] = [rows[rows["index"] + 300 * rows["epoch"] < batches]]
    for rows in script.parts["batch"]:
        rows[["wait_ns", "blocked_ns"]] += ns(transfer)
    _, found = loading_findings(script)
    slow = found["workers-too-slow"]
    assert not {"began", "ended"} & set(slow.summary.split())
    assert any("shuffle=True" in advice.text for advice in slow.advice)


def test_an_epoch_that_has_just_begun_shows_nothing_of_each_epoch():
    service = by_number(lambda number: SLOW if number % 300 < 200 else FAST)
    tables = finish(simulate(**RUN | {"batches": 300, "epochs": 2, "service": service})).tables()
    (loop,) = loops(tables)
    assert "In each epoch, a fetch takes 30.2 ms from batch 200 on, and 200 ms before." in change_within_epochs(
        loop
    )
    begun = loop.fetches[(loop.fetches["epoch"] == 0) | (loop.fetches["index"] < 10)]
    assert change_within_epochs(replace(loop, fetches=begun)) == ""


def test_the_next_slow_worker_bounds_what_a_fix_of_the_slowest_gains():
    run = RUN | {"workers": 4, "service": lambda generator, worker, _: {1: 0.4, 3: 0.6}.get(worker, 0.05)}
    kinds, found = loading_findings(simulate(**run))
    assert kinds == [("slow-worker", "warning")]
    assert found["slow-worker"].locus.worker == 3
    assert "Worker 1 is slow, too: 400 ms." in found["slow-worker"].summary
    assert found["slow-worker"].advice[0].expected.startswith("up to 10 batches/s")


def test_a_jump_is_neither_a_drift_nor_a_burst():
    noise = np.random.default_rng(1).normal(0.0, 0.1, 400)
    level = np.arange(400) >= 150
    assert jump(noise + level, 20) == pytest.approx(150, abs=3)
    assert jump(noise - level, 20) == pytest.approx(150, abs=3)
    assert jump(noise, 20) is None
    drift = noise + np.linspace(0, 2, 400)
    assert jump(drift, 20) is None
    assert [rises(values, 20) for values in (drift, -drift, noise + level)] == [True, False, False]
    burst = noise + (level & (np.arange(400) < 250))
    assert jump(burst, 20) is None
    assert spell(burst, 20) == pytest.approx((150, 250), abs=3)
    assert [spell(values, 20) for values in (-burst, drift, noise, noise + level)] == [None] * 4
    assert jump(noise[:30] + level[140:170], 20) is None
