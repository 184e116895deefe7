"""The verdict as a whole: it holds for empty, tiny and large runs, and no rule can take the others down."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from simulated_runs import MAIN, START_SECONDS, Script, finish, jittered, sample_process, simulate

from collector.diagnosis import verdict as verdict_module
from collector.diagnosis.verdict import diagnose
from collector.findings import KINDS, as_json, from_json
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_WORKER


def test_empty_live_run_has_no_findings():
    script = Script()
    script.living = frozenset({MAIN})
    verdict = diagnose(script.tables())
    assert verdict.findings == ()
    assert (verdict.status, verdict.steps, verdict.batches, verdict.workers_reporting) == ("running", 0, 0, (0, 0))
    assert verdict.summary["data_wait_ratio"] is None
    assert set(verdict.summary["peak"].values()) == {None}
    assert set(verdict.summary["throughput"].values()) == {None}
    assert set(verdict.summary["overhead"].values()) == {None}


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"argv": ["python", "train.py", "--lr", "0.1"]}, "python train.py --lr 0.1"),
        (
            {"argv": ["/opt/bin/python3.11", "-P", "-m", "training_harness.jobs", "fault", "slow-worker"]},
            "python -P -m training_harness.jobs fault slow-worker",
        ),
        ({"argv": ["/opt/bin/python3.11", "train.py"]}, "/opt/bin/python3.11 train.py"),
        ({"argv": ["python", "train.py", "--token=***"]}, "COMMAND"),
        ({"argv": ["python", "train.py", *map(str, range(100))]}, "COMMAND"),
        ({"argv": ["python", "notebook"], "command": None}, "COMMAND"),
        ({}, "COMMAND"),
    ],
)
def test_advice_has_the_command_of_the_run_if_it_can_be_repeated(manifest, words):
    script = simulate(workers=2, prefetch=2, service=jittered(0.1), consumer=jittered(0.01), batches=20)
    script.manifest |= manifest
    advice = [each.text for finding in diagnose(script.tables()).findings for each in finding.advice]
    assert f"Measure other settings: `tidegauge tune -- {words}`" in advice


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    workers=st.integers(0, 5),
    prefetch=st.integers(1, 4),
    batches=st.integers(1, 9),
    service=st.floats(1e-4, 1.0),
    consumer=st.floats(1e-4, 1.0),
)
def test_tiny_run_gets_only_cannot_tell(workers, prefetch, batches, service, consumer):
    script = simulate(
        workers=workers, prefetch=prefetch, service=jittered(service), consumer=jittered(consumer), batches=batches
    )
    verdict = diagnose(finish(script).tables())
    assert {finding.kind for finding in verdict.findings} == {"cannot-tell"}
    assert verdict.batches == batches
    assert verdict.status == "finished"


def test_verdict_has_the_figures_of_the_run():
    script = simulate(workers=2, prefetch=2, service=jittered(0.005), consumer=jittered(0.02, 0.01), batches=200)
    verdict = diagnose(finish(script).tables())
    assert (verdict.steps, verdict.batches, verdict.workers_reporting) == (200, 200, (2, 2))
    throughput = verdict.summary["throughput"]
    assert throughput["batches_per_second"] == pytest.approx(50, rel=0.05)
    assert throughput["samples_per_second"] == pytest.approx(400, rel=0.05)
    assert throughput["steps_per_second"] == pytest.approx(50, rel=0.05)
    assert 0 <= verdict.summary["data_wait_ratio"] < 0.02
    assert verdict.duration_seconds == pytest.approx(script.now_seconds - START_SECONDS - 0.1)


def test_each_check_that_a_kind_of_finding_fails_is_made():
    made = {check.name for check in diagnose(Script().tables()).checks}
    assert made == {check for kind in KINDS.values() for check in kind.checks}


def test_verdict_is_json_and_reproducible():
    script = simulate(workers=3, prefetch=2, service=jittered(0.1), consumer=jittered(0.02), batches=60)
    tables = script.tables()
    first, second = ([as_json(f) for f in diagnose(tables).findings] for _ in range(2))
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)
    assert [as_json(from_json(json.loads(json.dumps(finding)))) for finding in first] == first


def test_cached_results_are_not_used_for_derived_tables():
    script = simulate(workers=3, prefetch=2, service=jittered(0.1), consumer=jittered(0.02), batches=60)
    judged, fresh = script.tables(), script.tables()
    diagnose(judged)
    part = {name: rows.iloc[: len(rows) // 2] for name, rows in judged.streams.items()}
    found, expected = (
        [as_json(f) for f in diagnose(replace(tables, streams=part)).findings] for tables in (judged, fresh)
    )
    assert json.dumps(found) == json.dumps(expected)
    assert json.dumps(found) != json.dumps([as_json(f) for f in diagnose(judged).findings])


def test_a_failing_rule_is_named_and_the_others_go_on(monkeypatch):
    def breaks(_tables):
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(verdict_module, "find_deaths", breaks)
    script = simulate(workers=4, prefetch=2, service=jittered(0.06), consumer=jittered(0.01), batches=100)
    found = diagnose(script.tables()).findings
    assert [finding.kind for finding in found] == ["workers-too-slow", "cannot-tell"]
    assert "'deaths' failed" in found[1].summary


def test_silent_workers_are_reported():
    script = simulate(workers=4, prefetch=2, service=jittered(0.06), consumer=jittered(0.01), batches=100)
    script.living = frozenset({MAIN})
    script.events = [e for e in script.events if not (e["kind"] == "worker-start" and e["worker"] == 2)]
    script.parts["fetch"] = [part[part["worker"] != 2] for part in script.parts["fetch"]]
    verdict = diagnose(script.tables())
    assert verdict.workers_reporting == (3, 4)
    silent = next(f for f in verdict.findings if f.kind == "workers-not-reporting")
    assert silent.locus.worker == 2


def test_starting_workers_have_a_grace_period():
    script = Script()
    script.living = frozenset({MAIN})
    script.now_seconds = START_SECONDS + 12
    script.event(START_SECONDS, "process-start")
    script.event(START_SECONDS + 2, "epoch-start", loader=0, epoch=0, worker_pids=[1, 2])
    verdict = diagnose(script.tables())
    assert verdict.workers_reporting == (0, 2)
    assert verdict.findings == ()
    script.now_seconds = START_SECONDS + 60
    assert diagnose(script.tables()).findings == ()
    script.now_seconds = START_SECONDS + 130
    assert [f.kind for f in diagnose(script.tables()).findings] == ["workers-not-reporting"]


def test_lost_records_are_reported():
    script = simulate(workers=2, prefetch=2, service=jittered(0.005), consumer=jittered(0.02), batches=60)
    script.event(START_SECONDS + 2, "records-lost", stream="batch", count=12)
    script.lost_count = 12
    found = diagnose(finish(script).tables()).findings
    assert [f.kind for f in found] == ["samples-lost", "compute-bound"]
    assert "12 records" in found[0].summary


def test_disabled_hook_is_reported():
    script = simulate(workers=2, prefetch=2, service=jittered(0.005), consumer=jittered(0.02), batches=60)
    script.event(START_SECONDS + 2, "hook-disabled", hook="step", error="AttributeError: x")
    found = diagnose(finish(script).tables()).findings
    assert [f.kind for f in found] == ["compute-bound", "cannot-tell"]
    assert "'step'" in found[1].summary


def test_missing_values_in_every_column_break_no_rule():
    script = simulate(workers=2, prefetch=2, service=jittered(0.06), consumer=jittered(0.01), batches=80)
    for name in ("batch", "fetch", "step", "host"):
        for part in script.parts[name]:
            for column in part.columns:
                if column not in (
                    "time_ns",
                    "loader",
                    "epoch",
                    "index",
                    "worker",
                    "host",
                    "pid",
                    "start_ticks",
                    "rank",
                ):
                    part[column] = np.nan
    for finding in diagnose(finish(script).tables()).findings:
        assert finding.kind == "cannot-tell"
        assert "failed" not in finding.summary


def several_loaders(begin_of, **settings):
    script = None
    for loader in range(6):
        script = simulate(
            workers=2,
            prefetch=2,
            service=jittered(0.06),
            consumer=jittered(0.01),
            batches=20,
            loader=loader,
            script=script,
            begin=begin_of(loader),
            **{name: values[loader] for name, values in settings.items()},
        )
    return {f.locus.loader for f in diagnose(finish(script).tables()).findings if f.kind == "workers-too-slow"}


def test_loaders_created_for_each_epoch_are_one_loop():
    assert several_loaders(lambda loader: START_SECONDS + 10 * loader) == {5}


def test_loaders_used_alternately_are_not_one_loop():
    assert several_loaders(lambda _: START_SECONDS) == set(range(6))


@pytest.mark.parametrize("length", [[*range(160, 166)], [160, 160, 161, 161, 162, 162]])
def test_loaders_of_one_line_over_a_dataset_that_grows_are_one_loop(length):
    settings = {"dataset_length": length, "line": [7] * 6}
    assert several_loaders(lambda loader: START_SECONDS + 10 * loader, **settings) == {5}
    assert several_loaders(lambda _: START_SECONDS, **settings) == set(range(6))


@pytest.mark.parametrize(
    "setting",
    [
        {"sampler": ["RandomSampler", "SequentialSampler"] * 3},
        {"dataset_length": [160, 161] * 3},
        {"dataset_length": [160, 161] * 3, "line": [7] * 6},
    ],
)
def test_training_and_validation_loaders_are_two_loops(setting):
    assert several_loaders(lambda loader: START_SECONDS + 10 * loader, **setting) == {4, 5}


def test_data_wait_is_a_share_of_steps_or_else_of_the_loop():
    script = simulate(workers=0, prefetch=0, service=jittered(0.03), consumer=jittered(0.01), batches=100)
    for part in script.parts["step"]:
        part["data_wait_ns"], part["duration_ns"] = 25e6, 100e6
    assert diagnose(script.tables()).summary["data_wait_ratio"] == pytest.approx(0.25)
    script.parts["step"][0].loc[0, "data_wait_ns"] = np.nan  # before the first DataLoader, nothing was waited for
    steps = sum(len(part) for part in script.parts["step"])
    assert diagnose(script.tables()).summary["data_wait_ratio"] == pytest.approx(0.25 * (1 - 1 / steps))
    del script.parts["step"]
    assert diagnose(script.tables()).summary["data_wait_ratio"] == pytest.approx(0.75, abs=0.02)


def test_pss_of_different_ticks_adds_up_while_processes_live():
    nan = np.nan
    script = Script()
    for key, seconds, pss, alive in (
        (("node", 1, 1), [0, 1, 2, 3], [100.0, nan, 150.0, nan], [1, 1, 1, 0]),
        (("node", 2, 2), [0, 1, 2, 3], [nan, 40.0, nan, nan], [1, 1, 1, 1]),
        (("node", 3, 3), [4], [170.0], [1]),
    ):
        times = [START_SECONDS + second for second in seconds]
        none = [nan] * len(times)
        sample_process(script, times, key, ROLE_MAIN, private=none, rss=none, pss_bytes=pss, alive=alive)
    collector = {"private": [9.0] * 2, "rss": [9.0] * 2, "pss_bytes": [900.0] * 2}
    sample_process(script, [START_SECONDS, START_SECONDS + 4], ("node", 90, 4900), ROLE_COLLECTOR, **collector)
    summary = diagnose(script.tables()).summary
    assert summary["peak"]["run_pss_bytes"] == 40 + 170
    assert summary["overhead"]["collector_private_dirty_bytes"] == 9


@pytest.mark.parametrize(("before", "highest"), [(240.0, 240), (200.0, 110 + 100)])
def test_pages_that_a_fork_shares_count_once_in_the_peak(before, highest):
    nan = np.nan
    script = Script()
    for key, role, seconds, pss in (
        (("node", 1, 1), ROLE_MAIN, [0.0, 0.3, 1.0, 2.0], [before, nan, 110.0, nan]),
        (("node", 2, 2), ROLE_WORKER, [0.3, 1.0, 2.0], [nan, nan, 100.0]),  # forked just after main was read
    ):
        times = [START_SECONDS + second for second in seconds]
        none = [nan] * len(times)
        sample_process(script, times, key, role, private=none, rss=none, pss_bytes=pss)
    assert diagnose(script.tables()).summary["peak"]["run_pss_bytes"] == highest


def test_a_run_too_short_to_sample_its_workers_is_not_said_to_have_none():
    run = simulate(workers=1, prefetch=2, service=jittered(0.01), consumer=jittered(0.02), batches=60)
    (check,) = [one for one in diagnose(run.tables()).checks if one.name == "workers' memory"]
    assert check.status == "not judged"
    assert "no workers" not in check.reason


def test_cores_until_the_first_step_are_unknown_if_those_of_a_host_are():
    run = {"workers": 0, "prefetch": 2, "service": jittered(0.01), "consumer": jittered(0.02), "batches": 20}
    script = simulate(**run, begin=START_SECONDS + 30.0)
    seconds, held = START_SECONDS + np.arange(40.0), np.full(40, 1e9)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, cpu_ns=0.5e9 * np.arange(40.0))
    sample_process(script, seconds[35:], MAIN, ROLE_MAIN, private=held, rss=held, cpu_ns=np.arange(40.0))
    script.parts["process"][-1]["host"] = "other-node"
    assert diagnose(finish(script).tables()).summary["start"]["cores_used"] is None


@pytest.mark.parametrize("is_watched", [False, True])
def test_time_until_the_first_step_is_that_of_a_command(is_watched):
    run = {"workers": 0, "prefetch": 2, "service": jittered(0.01), "consumer": jittered(0.02), "batches": 20}
    script = simulate(**run, begin=START_SECONDS + 30.0)
    seconds = START_SECONDS + np.arange(40.0)
    held = np.full(40, 1e9)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, cpu_ns=0.5e9 * np.arange(40.0))
    script.manifest |= {"command": {"host": MAIN[0], "pid": MAIN[1], "start_ticks": MAIN[2]}, "watched": is_watched}
    start = diagnose(finish(script).tables()).summary["start"]
    if is_watched:
        assert start is None
    else:
        assert start == {"seconds": pytest.approx(31.0, abs=0.3), "cores_used": pytest.approx(0.5, abs=0.02)}
