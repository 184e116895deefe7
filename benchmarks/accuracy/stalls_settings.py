"""Errors of predictions for other settings: throughput, memory, and the cost of following the advice.

The prediction comes from one run with two workers. A second run, on other samples, is measured: the loader in
each setting of a grid, in the recommended one and in those of the rules of thumb. Regret is how much less a
choice gives than the best of all measured settings.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.accuracy.kept import disturbed, kept_run
from benchmarks.accuracy.programs import PROGRAMS, Pair
from benchmarks.accuracy.stalls_job import BATCH_SIZE, Training, Work, io, train
from collector.diagnosis.loading.loaders import Loop, loops
from collector.diagnosis.run.columns import floats
from collector.diagnosis.run.tables import RunTables, load_tables
from collector.diagnosis.stalls.verdict import find_stalls
from collector.diagnosis.tuning.loader_memory import held_memory
from collector.diagnosis.tuning.replay import Setting
from collector.diagnosis.tuning.what_if import Forecast, Option, Rate, forecast
from training_harness.jobs.common import expect_many_workers
from training_harness.jobs.faults.job import Items
from training_harness.jobs.faults.loading import compute

SWEEP: tuple[Pair, ...] = ((0, 2), (1, 2), (2, 2), (3, 2), (4, 2), (6, 2), (2, 1), (4, 1), (2, 4), (4, 4))
BATCHES = 150
FIRST_BATCHES = 250
DIABETES_WORKERS = 8
REPEATS_SHARE = 0.6  # of the repeats of the causes
SHARED = "I/O-bound, one pipe"


@dataclass(frozen=True)
class Loader:
    """Function that draws a training; `source` is the setting that it is predicted from."""

    draw: Callable[[random.Random], Training]
    source: Pair = (2, 2)


def blocked(draw: random.Random) -> Training:
    work = Work(asleep=draw.uniform(0.020, 0.035), spread=draw.uniform(0.1, 0.6))
    return Training(kind="", step=draw.uniform(0.006, 0.010), workers=2, work=work)


def unordered(draw: random.Random) -> Training:
    training = blocked(draw)
    training.settings = {"in_order": False}
    return training


def heavy(draw: random.Random) -> Training:
    """Batches and workers that take memory; with 3 workers or more the queues are full.

    Its items of 0.5 to 1.5 MiB leave holes in a worker's heap, how many is chance (malloc).
    """
    size = draw.randint(4, 12) * (1 << 20) // BATCH_SIZE // 4
    step = draw.uniform(0.020, 0.030)
    work = Hoarding(asleep=2.5 * step, kept_bytes=draw.randint(32, 128) << 20)
    return Training(kind="", step=step, workers=2, dataset=Items(work, count=100_000, size=size))


def caches(draw: random.Random) -> Training:
    """Workers that keep much, forked or spawned, and small batches."""
    step = draw.uniform(0.008, 0.020)
    work = Hoarding(asleep=step * draw.uniform(1.0, 4.0), kept_bytes=draw.randint(32, 128) << 20)
    settings = {"multiprocessing_context": draw.choice(["fork", "spawn"])}
    return Training(kind="", step=step, workers=2, work=work, settings=settings)


@dataclass(frozen=True, kw_only=True)
class Hoarding(Work):
    """Each worker keeps memory of its own from its first item on."""

    kept_bytes: int = 0

    def __call__(self, index: int) -> None:
        if os.getpid() not in kept:
            kept[os.getpid()] = bytearray(b"\1" * self.kept_bytes)
        super().__call__(index)


kept: dict[int, bytearray] = {}


def short_epochs(draw: random.Random) -> Training:
    training = blocked(draw)
    training.epoch, training.settings = 25, {"persistent_workers": True}
    return training


def computing(draw: random.Random) -> Training:
    work = Work(computing=draw.uniform(0.009, 0.016), spread=0.2)
    return Training(kind="", step=draw.uniform(0.006, 0.010), workers=2, work=work)


def computing_too(draw: random.Random) -> Training:
    """The loop computes as well."""
    training = computing(draw)
    training.step, seconds = 0.001, draw.uniform(0.004, 0.008)
    training.after_step = lambda _step: compute(seconds * BATCH_SIZE, 0)
    return training


def mixed(draw: random.Random) -> Training:
    work = Work(asleep=draw.uniform(0.015, 0.025), computing=draw.uniform(0.005, 0.009), spread=0.2)
    return Training(kind="", step=draw.uniform(0.006, 0.010), workers=2, work=work)


def large(draw: random.Random) -> Training:
    """Batches of 6 to 16 MiB."""
    work = Work(asleep=draw.uniform(0.012, 0.024), spread=0.2)
    size = draw.randint(6, 16) * (1 << 20) // BATCH_SIZE // 4
    dataset = Items(work, count=100_000, size=size)
    return Training(kind="", step=draw.uniform(0.008, 0.012), workers=2, dataset=dataset)


LOADERS = {
    "blocked": Loader(blocked),
    "blocked, unordered": Loader(unordered),
    "blocked, short epochs": Loader(short_epochs),
    "CPU-bound": Loader(computing),
    "CPU-bound, loop too": Loader(computing_too),
    "CPU and blocked": Loader(mixed),
    "from 4 workers": Loader(mixed, (4, 2)),
    "large batches": Loader(large),
    "inline, blocked": Loader(blocked, (0, 2)),
    "inline, CPU-bound": Loader(computing, (0, 2)),
    SHARED: Loader(lambda draw: io(draw, True)),
}
MEMORY = {"memory": heavy, "memory, caches": caches}
MEMORY_PAIRS: tuple[Pair, ...] = ((1, 2), (3, 4), (4, 2), (4, 4))
TRAININGS = {name: loader.draw for name, loader in (LOADERS | PROGRAMS).items()} | MEMORY


@dataclass(frozen=True)
class Seen:
    """One setting of one repeat: measured, and what was said of it; batches per second."""

    pair: Pair
    measured: float
    option: Option | None
    thumb: float


@dataclass(frozen=True)
class Round:
    """One repeat of one loader; `again` is what the setting predicted from gave when it was measured once more, as
    a ratio: no prediction can be nearer than that.
    """

    name: str
    outlook: Forecast | str
    choices: dict[str, Pair]
    seen: dict[Pair, Seen]
    again: float
    disturbed: bool

    @property
    def held_out(self) -> list[Seen]:
        """Return the predictions for settings that were not seen."""
        source = LOADERS[self.name].source
        return [one for one in self.seen.values() if one.option is not None and one.pair != source]

    def regret(self, rule: str) -> float:
        """Return how much less a rule's choice gives than the best of all, as a ratio."""
        return 1 - self.seen[self.choices[rule]].measured / max(one.measured for one in self.seen.values())


def one_round(home: Path, name: str, seed: int) -> Round:
    source = LOADERS[name].source
    tables, (loop,) = trained(home / f"{name}-{seed}-from", name, seed, [source], FIRST_BATCHES)
    outlook = forecast(loop)
    best = outlook.best if isinstance(outlook, Forecast) else None
    fetch, step = costs(loop)
    cores = len(os.sched_getaffinity(0))
    choices = {
        "advice": pair_of(best.setting) if best else source,
        "⌈w / c⌉ workers": (max(1, min(math.ceil(fetch / step), 16)), 2),
        "cores": (cores, 2),
        "cores - 1": (max(1, cores - 1), 2),
        "default": (0, 2),
    }
    pairs = list(dict.fromkeys([*SWEEP, *choices.values()]))
    swept, measured = trained(home / f"{name}-{seed}-sweep", name, seed, pairs, BATCHES, FIRST_BATCHES)
    options = (
        {pair_of(option.setting): option for option in outlook.options} if isinstance(outlook, Forecast) else {}
    )
    seen = {
        pair: Seen(pair, rate(each), options.get(pair), 1 / max(step, fetch / max(pair[0], 1)))
        for pair, each in zip(pairs, measured, strict=True)
    }
    again = seen[source].measured / rate(loop)
    is_disturbed = any(disturbed(each, loops(each)[0].main) for each in (tables, swept))
    return Round(name, outlook, choices, seen, again, is_disturbed)


def trained(
    folder: Path, name: str, seed: int, pairs: Sequence[Pair], batches: int, first_batch: int = 0
) -> tuple[RunTables, list[Loop]]:
    """Run a training that has the loader in each setting in turn; return the run and its loops in that order.

    Samples begin at `first_batch`: other samples than those of the run that is predicted from.
    """
    asked = json.dumps({"pairs": pairs, "batches": batches, "first_batch": first_batch})
    run = kept_run(folder, [sys.executable, "-m", "benchmarks.accuracy.stalls_settings", name, str(seed), asked])
    tables = load_tables(run)
    return tables, sorted(loops(tables), key=lambda loop: loop.loader)


def pair_of(setting: Setting) -> Pair:
    return setting.num_workers, setting.prefetch_factor


def rate(loop: Loop) -> float:
    """Batches per second after the ramp-up; of whole epochs, but the first, if there are several."""
    times = floats(loop.batches, "time_ns")
    begins = np.flatnonzero(floats(loop.batches, "index") == 0)
    first, last = (begins[1], begins[-1]) if len(begins) > 2 else (loop.ramp, len(times) - 1)
    return float((last - first) / (times[last] - times[first]) * 1e9)


def costs(loop: Loop) -> tuple[float, float]:
    """Return the rule of thumb's inputs: mean seconds of a fetch, and median seconds of the loop for a batch."""
    fetches, batches = loop.fetches, loop.batches
    fetch = floats(fetches, "getitem_ns") + np.nan_to_num(floats(fetches, "collate_ns"))
    times, waits = floats(batches, "time_ns"), floats(batches, "wait_ns")
    return float(np.nanmean(fetch)) / 1e9, float(np.median(np.diff(times) - waits[1:])) / 1e9


def memory_errors(home: Path, name: str, seed: int) -> tuple[list[float], float]:
    """Return the errors (ratios) of the host memory predicted from one run, and the change when it runs again."""

    def run(folder: str, pair: Pair) -> Loop:
        _, (loop,) = trained(home / f"{name}-{seed}-{folder}", name, seed, [pair], FIRST_BATCHES)
        return loop

    source, found = run("from", (2, 2)), []
    outlook = forecast(source)
    for pair in MEMORY_PAIRS:
        measured = held_memory(run(f"{pair[0]}-{pair[1]}", pair)).usual
        if isinstance(outlook, Forecast):
            (option,) = outlook.at([Setting(num_workers=pair[0], prefetch_factor=pair[1])])
            found.append(option.memory_bytes / measured - 1)
    return found, held_memory(run("again", (2, 2))).usual / held_memory(source).usual - 1


def memory_row(home: Path, name: str, repeats: int) -> str:
    """A row of the table of host memory."""
    rounds = [memory_errors(home, name, seed) for seed in range(repeats)]
    errors = np.abs([error for found, _ in rounds for error in found])
    again = np.abs([error for _, error in rounds])
    known = errors[np.isfinite(errors)]
    if not len(known):
        return f"| {name} | 0 of {len(errors)} | — | — |"
    figures = f"{np.median(known):.0%}, {np.quantile(known, 0.95):.0%}, {known.max():.0%}"
    twice = f"{np.nanmedian(again):.0%}, {np.nanmax(again):.0%}"
    return f"| {name} | {len(known)} of {len(errors)} | {figures} | {twice} |"


def nearest(option: Option, measured: float) -> Rate:
    """The nearest of the predictions: there are two where a run leaves open if workers share what they wait for."""
    rates = (option, option.if_shared, option.if_apart)
    return min(
        (rate for rate in rates if rate is not None),
        key=lambda rate: abs(math.log(rate.batches_per_second / measured)),
    )


def summary(name: str, rounds: Sequence[Round]) -> str:
    """A row of the table."""
    seen = [one for each in rounds for one in each.held_out]
    refused = sum(isinstance(each.outlook, str) for each in rounds)
    advice = statistics.median(each.regret("advice") for each in rounds)
    if not seen:
        return f"| {name} | 0 | — | — | — | — | {advice:.1%} | {refused} |"
    pairs = [(nearest(one.option, one.measured), one.measured) for one in seen if one.option]
    errors = np.abs([rate.batches_per_second / measured - 1 for rate, measured in pairs])
    thumb = np.abs([one.thumb / one.measured - 1 for one in seen])
    again = np.abs([each.again - 1 for each in rounds])
    inside = np.mean([rate.low <= measured <= rate.high for rate, measured in pairs])
    return (
        f"| {name} | {len(seen)} | {np.median(errors):.1%}, {np.quantile(errors, 0.95):.0%} | "
        f"{np.median(again):.1%}, {again.max():.0%} | "
        f"{np.median(thumb):.0%}, {np.quantile(thumb, 0.95):.0%} | {inside:.0%} | {advice:.1%} | {refused} |"
    )


def diabetes(home: Path) -> str:
    """The job whose batches are too cheap for workers: what each number of them gives, and what is advised."""
    job = ("-m", "training_harness.jobs", "diabetes", "--sweep", f"0-{DIABETES_WORKERS}")
    tables = load_tables(kept_run(home / "diabetes", [sys.executable, *job]))
    swept = sorted(loops(tables), key=lambda loop: loop.loader)[: DIABETES_WORKERS + 1]
    rates = [rate(loop) for loop in swept]
    advised = [each for each in find_stalls(tables) if each.locus.loader == swept[0].loader]
    words = advised[0].advice[0].text if advised and advised[0].advice else "no advice"
    best = int(np.argmax(rates))
    listed = ", ".join(f"{each:.0f}" for each in rates)
    return (
        f"\n`diabetes`, num_workers 0 to {DIABETES_WORKERS}: {listed} batches/s; the fastest is {best}. "
        f"Advice for the run with 0: {words}."
    )


def page(home: Path, names: Iterable[str], repeats: int) -> str:
    """Measure, and the tables of it."""
    rounds = []
    for name in names:
        for seed in range(max(1, round(REPEATS_SHARE * repeats))):
            rounds.append(one_round(home, name, seed))
            found = {
                one.pair: f"{one.option.batches_per_second / one.measured - 1:+.0%}"
                for one in rounds[-1].held_out
                if one.option
            }
            print(f"{name} {seed}: {found or rounds[-1].outlook}", file=sys.stderr)
    left_out = sum(each.disturbed for each in rounds)
    rounds = [each for each in rounds if not each.disturbed] or rounds
    head = ["loader", "settings predicted", "error: median, p95", "the same setting again: median, worst"]
    head += ["error of max(c, w / N)", "inside the 90 % interval"]
    lines = ["## Other settings", "", "| " + " | ".join([*head, "regret of the advice", "without figures"]) + " |"]
    lines.append("|---" * 8 + "|")
    lines += [
        summary(name, [each for each in rounds if each.name == name])
        for name in dict.fromkeys(each.name for each in rounds)
    ]
    told = [each for each in rounds if each.name != SHARED]
    lines.append(summary("**all**", rounds))
    if 0 < len(told) < len(rounds):
        lines.append(summary(f"**all but {SHARED}**", told))
    lines += ["", f"{left_out} rounds were disturbed by other programs; they are left out unless all were."]
    lines += ["", "| choice | regret: median | worst |", "|---|---|---|"]
    for rule in rounds[0].choices:
        regrets = [each.regret(rule) for each in rounds]
        lines.append(f"| {rule} | {statistics.median(regrets):.1%} | {max(regrets):.0%} |")
    head = [
        "host memory (bar: 15 %)",
        "settings with figures",
        "error: median, p95, worst",
        "the same setting again: median, worst",
    ]
    lines += ["", "| " + " | ".join(head) + " |"]
    lines += ["|---" * 4 + "|", *(memory_row(home, name, repeats) for name in MEMORY)]
    lines.append(diabetes(home))
    return "\n".join(lines)


def main() -> None:
    """The training process."""
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=TRAININGS)
    parser.add_argument("seed", type=int)
    parser.add_argument("asked", type=json.loads)
    options = parser.parse_args()
    expect_many_workers()
    torch.set_num_threads(1)
    training = TRAININGS[options.name](random.Random(f"{options.name} {options.seed}"))
    pairs = options.asked["pairs"]
    settings = training.settings
    with training.closing:
        for workers, prefetch in pairs:
            training.workers = workers
            training.settings = (
                settings | {"prefetch_factor": prefetch}
                if workers
                else {name: value for name, value in settings.items() if name == "in_order"}
            )
            training.first_batch = options.asked["first_batch"]
            train(training, batches=options.asked["batches"])


if __name__ == "__main__":
    main()
