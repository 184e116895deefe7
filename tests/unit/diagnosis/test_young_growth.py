"""Growth in short runs: too small or too brief for a leak, and still said."""

import re

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, finish, jittered, ns, sample_host, sample_process, simulate

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_WORKER

WORKERS = [("node", 1000 + worker, 7000 + worker) for worker in range(2)]


def simulated(growth, *, seconds=20, workers=None, fds=None, living=False, is_early=True, **loading):
    """Return a run; `growth`, `workers` and `fds` are functions of the time in s."""
    batches = {"workers": 2, "prefetch": 2, "batches": round(4 * seconds)}
    script = simulate(service=jittered(0.2), consumer=jittered(0.25), **batches, **loading)
    script.living = frozenset({MAIN}) if living else frozenset()
    script.now_seconds = START_SECONDS + 1 + seconds
    ticks, between = np.arange(0.0, seconds), np.arange(0, seconds, 0.2)
    between = between[(between % 1 > 0.1) & (between < 120)]
    processes = [(MAIN, ROLE_MAIN, growth, {})]
    processes += [(key, ROLE_WORKER, workers or np.zeros_like, {"worker": w}) for w, key in enumerate(WORKERS)]
    noise = np.random.default_rng(1)
    for key, role, course, place in processes:
        held, early = ((300 + course(at) + 0.05 * noise.normal(size=len(at))) * MIB for at in (ticks, between))
        counts = (
            {"fd_count": 30 + np.floor(fds(ticks)), "fd_limit_count": np.full(len(ticks), 1024)}
            if fds and key == MAIN
            else {}
        )
        sample_process(
            script, START_SECONDS + 1 + ticks, key, role, private=held, rss=held, loader=0, **place, **counts
        )
        rows = [
            {
                "time_ns": ns(START_SECONDS + 1 + at),
                "process_pid": key[1],
                "process_start_ticks": key[2],
                "rss_bytes": value + 100 * MIB,
                "anon_bytes": value,
                "fd_count": 30 + np.floor(fds(at)) if counts else np.nan,
            }
            for at, value in zip(between, early, strict=True)
        ]
        script.add("early_process", rows if is_early else [], ("node", 90, 4900))
    sample_host(script, START_SECONDS + 1 + ticks, demand=(4000 + growth(ticks)) * MIB, total=10**14)
    return script


def short_run(growth, **course):
    """Return the findings on the growth of a run."""
    return [f for f in diagnose(simulated(growth, **course).tables()).findings if f.rate is not None]


def straight(mib_per_second, begin=0.0):
    return lambda at: mib_per_second * np.maximum(at - begin, 0.0)


@pytest.mark.parametrize("slope", [0.55, 0.92])
def test_small_growth_of_a_short_run_is_information(slope):
    """The second one rises by as much as a leak must, but the ends of a growth are not measured."""
    [found] = short_run(straight(slope))

    assert (found.kind, found.severity, found.locus.role) == ("cannot-tell", "info", "main")
    assert "too little to call a leak" in found.summary
    assert found.rate.value == pytest.approx(slope * MIB, rel=0.1)
    assert len(found.evidence) >= 2


@pytest.mark.parametrize("living", [False, True])
def test_the_time_that_would_tell_does_tell(living):
    [found] = short_run(straight(0.55), living=living)
    pattern = r"(\d+) s more would tell" if living else r"A run of (\d+) s would tell"
    seconds = int(re.search(pattern, found.summary)[1]) + (20 if living else 0)

    assert [f.kind for f in short_run(straight(0.55), seconds=seconds, living=living)] == ["main-heap-leak"]


def test_time_after_the_training_is_part_of_the_run_that_would_tell():
    seconds = []
    for after in (0, 10):
        script = simulated(straight(0.55))
        script.now_seconds += after
        finish(script)
        [found] = [f for f in diagnose(script.tables()).findings if f.rate is not None]
        seconds.append(int(re.search(r"A run of (\d+) s would tell", found.summary)[1]))
    assert seconds[1] - seconds[0] == pytest.approx(10, abs=5)


def test_large_growth_that_began_a_moment_ago_is_information():
    [found] = short_run(straight(6.2, begin=12.0))

    assert (found.kind, found.severity) == ("cannot-tell", "info")
    assert "too brief to call a leak" in found.summary


def test_growth_of_two_workers_is_one_finding():
    [found] = short_run(np.zeros_like, workers=straight(0.9), seconds=15)

    assert (found.kind, found.severity, found.locus.loader) == ("cannot-tell", "info", 0)
    assert found.summary.startswith("Workers 0 and 1 of loader 0 each grow by")


@pytest.mark.parametrize("startup", [19.0, 30.0])
def test_what_a_spawned_worker_imports_before_it_is_ready_is_no_growth(startup):
    imports = {"workers": straight(6.0), "start_method": "spawn", "startup": startup}
    assert short_run(np.zeros_like, **imports) == []


@pytest.mark.parametrize(("batches", "count"), [(False, 0), (True, 1)])  # with batches, the workers have no hooks
def test_what_a_spawned_worker_imports_before_it_records_anything_is_no_growth(batches, count):
    script = simulated(np.zeros_like, workers=straight(6.0), start_method="spawn")
    script.events = [event for event in script.events if not event["kind"].startswith("worker-")]
    for stream in ("fetch", "step", *([] if batches else ["batch"])):
        del script.parts[stream]
    found = [one for one in diagnose(script.tables()).findings if one.kind == "worker-heap-leak"]
    assert len(found) == count


@pytest.mark.parametrize(
    ("course", "name"),
    [
        ({"growth": straight(0.55)}, "training process's memory"),
        ({"growth": np.zeros_like, "workers": straight(0.9), "seconds": 15}, "workers' memory"),
        ({"growth": np.zeros_like, "fds": straight(5, begin=13)}, "open files"),
    ],
)
def test_what_grows_is_not_checked_and_fine(course, name):
    checks = {check.name: check for check in diagnose(simulated(**course).tables()).checks}

    assert (checks[name].status, "is not known yet" in checks[name].reason) == ("not judged", True)


def test_a_few_more_open_files_are_not_mentioned():
    assert short_run(np.zeros_like, fds=straight(0.7)) == []


def test_open_files_that_grow_since_a_moment_are_information():
    [found] = short_run(np.zeros_like, fds=straight(5, begin=13))

    assert (found.kind, found.severity) == ("cannot-tell", "info")
    assert found.rate.unit == "count/s"


@pytest.mark.parametrize(
    "growth",
    [
        np.zeros_like,
        lambda at: np.minimum(1.6 * at, 13.0),  # a buffer that is full after 8 s
        lambda at: 60 * (1 - np.exp(-at / 3)),  # a warm-up
        lambda at: 30.0 * (at > 11),  # one step
        lambda at: 6 * np.sin(at / 3),
    ],
)
def test_growth_that_has_levelled_off_is_not_mentioned(growth):
    assert short_run(growth) == []


def test_a_leak_is_the_same_with_and_without_early_samples():
    fast, slow = (short_run(straight(10.0), is_early=is_early) for is_early in (True, False))

    assert (
        [(f.kind, f.severity) for f in fast]
        == [(f.kind, f.severity) for f in slow]
        == [("main-heap-leak", "warning")]
    )
    assert fast[0].evidence[0].n > 3 * slow[0].evidence[0].n


def test_early_samples_count_only_if_they_cover_the_run():
    def growth(at):
        return 0.2 * at

    early, ticks = (short_run(growth, seconds=200, is_early=is_early) for is_early in (True, False))

    assert [(f.kind, f.evidence[0].n) for f in early] == [(f.kind, f.evidence[0].n) for f in ticks]
