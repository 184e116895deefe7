"""Growth that ends is distinguished from growth that does not: a cache that fills, and look-alikes."""

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, jittered, sample_host, sample_process, simulate

from collector.diagnosis.statistics.growth import PARTS_COUNT_OF_STEPS
from collector.diagnosis.statistics.saturation import LENIENT, STRICT, saturation
from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_WORKER

COUNT = 240
AT = np.arange(COUNT) / 4
PART = AT / 60
FLAT = np.zeros(COUNT)


def cache(fill, *, seed=0, entries=3000, mib=240):
    """The size of a cache whose entries are visited at random, in MiB; `fill` is the length in time constants."""
    generator, seen, sizes = np.random.default_rng(seed), np.zeros(entries, bool), []
    for visits in generator.poisson(fill * entries / COUNT, COUNT):
        seen[generator.integers(0, entries, visits)] = True
        sizes.append(seen.mean() * mib)
    return np.array(sizes)


def noise(seed=0, size=0.3):
    return size * np.random.default_rng(seed).normal(size=COUNT)


@pytest.mark.parametrize("seed", range(4))
def test_end_of_a_cache_is_foretold(seed):
    found = saturation(AT, 300 + cache(2.5, seed=seed) + noise(seed), negligible=16, doubt=LENIENT)

    assert found is not None
    assert found.ends.min() - 2 <= 540 <= found.ends.max() + 2
    assert found.level == pytest.approx(300 + 240 * (1 - np.exp(-2.5)), rel=0.02)
    soonest, likeliest, latest = found.full_times
    assert soonest <= likeliest <= latest
    assert likeliest == pytest.approx(
        24 * np.log(20) - 54, abs=15
    )  # 95 % of what was still empty after the warm-up


WITHOUT_END = {
    "a line": 200 * PART,
    "a line with noise": 200 * PART + noise(1, 4),
    "a leak beside a cache": cache(2.5) + 200 * PART,
    "a root": 200 * np.sqrt(PART),
    "a power": 200 * PART**0.7,
    "a logarithm": 60 * np.log1p(20 * PART),
    "a leak whose steps become longer": 200 * (np.sqrt(1 + 8 * PART) - 1),
    "irregular growth": np.cumsum(np.random.default_rng(0).lognormal(0, 1.5, COUNT)) * 0.3,
    "a high-water mark": 20 * np.maximum.accumulate(np.random.default_rng(0).lognormal(0, 0.8, COUNT)),
    "stairs": 25 * np.floor(8 * PART),
    "growth that begins late": 200 * np.maximum(PART - 0.4, 0),
    "growth that has ended": np.minimum(250 * PART, 200),
    "a full cache": cache(8),
}


@pytest.mark.parametrize("growth", WITHOUT_END.values(), ids=WITHOUT_END)
@pytest.mark.parametrize("doubt", [STRICT, LENIENT], ids=["strict", "lenient"])
def test_other_growth_has_no_end_to_foretell(growth, doubt):
    assert saturation(AT, 300 + growth + noise(), negligible=16, doubt=doubt) is None


@pytest.mark.parametrize("full", [0.6, 0.7])
def test_a_buffer_that_rests_full_fills_no_more(full):
    level = 300 + 220 * np.minimum(PART / full, 1) + noise(size=0.05)

    assert saturation(AT, level, negligible=16, doubt=LENIENT, parts=PARTS_COUNT_OF_STEPS) is None


def judged(main=FLAT, workers=FLAT, *, steps_clock=None, total=10**14, living=True):
    """The findings on growth of a run of a minute; growth in MiB, of each worker or of all alike."""
    pace = jittered(0.25) if steps_clock is None else steps_clock
    script = simulate(workers=2, prefetch=2, service=jittered(0.05), consumer=pace, batches=240)
    script.living = frozenset({MAIN}) if living else frozenset()
    at = START_SECONDS + 1.2 + AT
    script.now_seconds = at[-1] + 0.5
    held = (300 + main + noise(2)) * MIB
    sample_process(script, at, MAIN, ROLE_MAIN, private=held, rss=held)
    for worker in range(2):
        held = (200 + (workers[worker] if isinstance(workers, tuple) else workers) + noise(3)) * MIB
        key = ("node", 1000 + worker, 7000 + worker)
        sample_process(script, at, key, ROLE_WORKER, private=held, rss=held, worker=worker, loader=0)
    of_workers = sum(workers) if isinstance(workers, tuple) else 2 * workers
    sample_host(script, at, demand=(4000 + main + of_workers) * MIB, total=total)
    return [f for f in diagnose(script.tables()).findings if f.rate is not None]


def test_cache_that_fills_is_information_with_its_end():
    [found] = judged(cache(2.2))

    assert (found.kind, found.severity, found.locus.role) == ("bounded-growth", "info", "main")
    low, high = (found.value_of(f"level_at_end_{end}_bytes") / MIB for end in ("low", "high"))
    assert low - 4 <= 540 <= high + 4
    soonest, likeliest, latest = (found.value_of(f"time_to_full_{name}seconds") for name in ("low_", "", "high_"))
    assert 0 < soonest <= likeliest <= latest
    assert "at the end, in about" in found.summary


def test_caches_of_a_loaders_workers_are_one_finding():
    [found] = judged(workers=cache(2.2))

    assert (found.kind, found.severity, found.locus.loader) == ("bounded-growth", "info", 0)
    assert found.summary.startswith("Workers 0 and 1 of loader 0 each fill")


@pytest.mark.parametrize(("fill", "seed", "kinds"), [(2.1, 6, ["bounded-growth"]), (1.5, 8, [])])
def test_no_worker_passes_for_a_leak_by_its_noise_where_all_fill_alike(fill, seed, kinds):
    fills = tuple(cache(fill, seed=seed + worker, entries=800) for worker in range(2))

    assert [f.kind for f in judged(workers=fills)] == kinds
    [leak] = judged(workers=(fills[0] + 200 * PART, FLAT))
    assert (leak.kind, leak.locus.worker) == ("worker-heap-leak", 0)
    assert [(each.value, each.n) for each in leak.evidence if each.name == "growing_workers_count"] == [(1, 2)]


@pytest.mark.parametrize("growth", [cache(6) + 200 * PART, cache(0.5) + 200 * PART, 200 * PART])
def test_leak_beside_a_cache_stays_a_leak(growth):
    assert [f.kind for f in judged(growth)] == ["main-heap-leak"]


def test_leak_per_step_stays_a_leak_although_steps_become_longer():
    durations = []

    def pace(generator, k):
        durations.append(0.06 + 0.002 * k)
        return durations[-1]

    judged(steps_clock=pace)
    steps = np.searchsorted(np.cumsum(durations), AT)

    assert "bounded-growth" not in [f.kind for f in judged(1.0 * steps, steps_clock=pace)]


@pytest.mark.parametrize(("room", "kinds"), [(300, ["bounded-growth"]), (228, ["host-oom-risk", "bounded-growth"])])
def test_memory_is_forecast_to_run_out_only_if_the_end_does_not_fit(room, kinds):
    """The cache has 240 MiB at its end, and 213 MiB now."""
    found = judged(cache(2.2), total=(4000 + room) * MIB)

    assert [f.kind for f in found] == kinds
    if "host-oom-risk" in kinds:
        assert 0 < found[0].eta.mid_seconds < 60
