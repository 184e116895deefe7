"""Do the intervals of the forecasts hold? Tested on random series, since any number of them can be drawn.

    python -m benchmarks.accuracy.memory_synthetic [--seeds N]

All rise from 0 towards a limit of 100 in 120 to 700 samples, each family in its own way. The rules see them up to
half of the way and up to three quarters, as in the replay of recorded runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy.signal import lfilter

from benchmarks.accuracy.memory_replay import HALF, THREE_QUARTERS
from collector.diagnosis.statistics.first_passage import first_passage_times
from collector.diagnosis.statistics.growth import growth

_LIMIT = 100.0
_LONGEST = 6  # times the samples that the way takes
_NEGLIGIBLE = 3.0
Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def _line(count: int, size: int) -> np.ndarray:
    return _LIMIT * np.arange(size) / count


def _slow_noise(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    follow = g.uniform(0.3, 0.98)
    noise = lfilter([math.sqrt(1 - follow**2)], [1, -follow], g.normal(size=size))
    return _line(count, size) + g.uniform(0.5, 6) * noise


def _walk(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    return _line(count, size) + np.cumsum(g.uniform(3, 15) / math.sqrt(count) * g.normal(size=size))


def _epochs(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    stair = _LIMIT / g.uniform(8, 30)
    return stair * np.floor(_line(count, size) / stair + g.random()) + 0.3 * g.normal(size=size)


def _late(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    onset = g.uniform(0.3, 1.5) * _LIMIT
    return np.maximum(0, _line(count, size) - onset) + g.uniform(0.3, 3) * g.normal(size=size)


def _falling(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    rise = _LIMIT * (_line(count, size) / _LIMIT) ** g.uniform(0.65, 0.95)
    return rise + g.uniform(0.3, 2) * g.normal(size=size)


def _evaluations(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    period = count / g.uniform(6, 25)
    held = (np.arange(size) + g.uniform(0, period)) % period < 0.12 * period
    return _line(count, size) + g.uniform(2, 10) * held + g.uniform(0.3, 2) * g.lognormal(0, 0.7, size=size)


def _jumps(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    jumps = g.uniform(15, 60)
    sizes = (g.random(size) < jumps / count) * g.exponential(_LIMIT / jumps, size=size)
    return np.cumsum(sizes) + 0.3 * g.normal(size=size)


def _changing_pace(g: np.random.Generator, count: int, size: int) -> np.ndarray:
    stretch = int(count / g.uniform(2, 12))
    paces = np.exp(g.uniform(0.05, 0.4) * g.normal(size=size // stretch + 1)).repeat(stretch)[:size]
    return np.cumsum(paces) * _LIMIT / count + 0.2 * g.normal(size=size)


FAMILIES: dict[str, Draw] = {
    "a line in slow noise": _slow_noise,
    "a random walk that drifts": _walk,
    "a stair per epoch": _epochs,
    "a late onset": _late,
    "a rate that falls": _falling,
    "evaluations and varying lengths": _evaluations,
    "random jumps": _jumps,
    "a pace that changes": _changing_pace,
}


def table(seeds_count: int) -> Iterator[str]:
    """The lines of the table in Markdown."""
    yield "| series | share of the way seen | forecasts | median error | 90 % interval holds |"
    yield "|---|---|---|---|---|"
    totals: dict[float, list[tuple[float, bool]]] = {HALF: [], THREE_QUARTERS: []}
    for number, (name, draw) in enumerate(FAMILIES.items()):
        for ratio, total in totals.items():
            asked = [_forecast(draw, ratio, np.random.default_rng([number, seed])) for seed in range(seeds_count)]
            told = [each for each in asked if each is not None]
            total += told
            yield _row(name, ratio, told, seeds_count)
    for ratio, total in totals.items():
        yield _row("all", ratio, total, seeds_count * len(FAMILIES))


def _row(name: str, ratio: float, told: list[tuple[float, bool]], asked_count: int) -> str:
    errors, held = zip(*told, strict=True)
    return (
        f"| {name} | {ratio:.0%} | {len(told)} of {asked_count} | {np.median(errors):.0%} | {np.mean(held):.0%} |"
    )


def _forecast(draw: Draw, ratio: float, generator: np.random.Generator) -> tuple[float, bool] | None:
    """The error of the middle and whether the interval holds; None if no growth was found, or the way is over."""
    count = int(generator.integers(120, 700))
    values = draw(generator, count, _LONGEST * count)
    end = int(np.argmax(values >= _LIMIT))
    now = int(np.flatnonzero(values[:end] < ratio * _LIMIT)[-1]) + 2
    clock, seen = np.arange(float(now)), values[:now]
    grown = growth(clock, seen, negligible=_NEGLIGIBLE)
    if grown is None or now > end:
        return None
    since = clock >= grown.since_seconds
    met = first_passage_times(clock[since], seen[since], _LIMIT)
    low, mid, high = np.percentile(met, (5, 50, 95), method="inverted_cdf")
    truth = end - now + 1
    return abs(mid - truth) / truth, bool(low <= truth <= high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="series of each family")
    for line in table(parser.parse_args().seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
