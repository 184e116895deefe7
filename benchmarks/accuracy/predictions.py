"""Are predictions of other settings right for programs that the rules do not come from?

    python -m benchmarks.accuracy predictions [--repeats 1] [--only PROGRAM …] [--keep DIR]

Each of `programs.PROGRAMS` runs once in its own setting. A second run, on other samples, measures the settings
that are predicted from the first, and its own setting once more. With `--keep` the runs stay there, and existing
runs are only judged again. The benchmark prints a page in Markdown at the end. It takes about 12 minutes on 2
cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.kept import disturbed
from benchmarks.accuracy.programs import PROGRAMS
from benchmarks.accuracy.stalls_settings import Pair, nearest, rate, trained
from collector.diagnosis.tuning.replay import Setting
from collector.diagnosis.tuning.what_if import Forecast, Option, Rate, forecast, option_text

SOURCE_BATCHES = 400
BATCHES = 300


@dataclass(frozen=True)
class Measured:
    """One setting of one program: batches per second as predicted and as measured."""

    pair: Pair
    option: Option
    measured: float

    @property
    def rate(self) -> Rate:
        """The prediction that the measurement is held against."""
        return nearest(self.option, self.measured)

    @property
    def error(self) -> float:
        """Return the error of the prediction, as a ratio of the measurement."""
        return self.rate.batches_per_second / self.measured - 1

    @property
    def is_held(self) -> bool:
        """Return whether the measurement lies in the interval."""
        return self.rate.low <= self.measured <= self.rate.high

    @property
    def width(self) -> float:
        """Width of the interval, as a ratio of the prediction."""
        return (self.rate.high - self.rate.low) / self.rate.batches_per_second


@dataclass(frozen=True)
class Judged:
    """One repeat of one program; `refusal` says why nothing was predicted.

    `repeat_error` is what the program's own setting gave when it was measured once more, as a ratio.
    """

    name: str
    settings: tuple[Measured, ...]
    refusal: str
    repeat_error: float
    is_disturbed: bool


def judge(home: Path, name: str, seed: int) -> Judged:
    """Run a program in its own setting and in the others, unless the runs were kept, and compare."""
    program = PROGRAMS[name]
    folder = home / f"{name}-{seed}"
    tables, (loop,) = trained(folder / "from", name, seed, [program.source], SOURCE_BATCHES)
    pairs = [*program.others, program.source]
    others, measured = trained(folder / "measured", name, seed, pairs, BATCHES, SOURCE_BATCHES)
    rates = dict(zip(pairs, map(rate, measured), strict=True))
    outlook = forecast(loop)
    found = []
    if isinstance(outlook, Forecast):
        in_order = loop.in_order
        asked = [Setting(num_workers=n, prefetch_factor=p, in_order=in_order) for n, p in program.others]
        options = outlook.at(asked)
        found = [Measured(pair, option, rates[pair]) for pair, option in zip(program.others, options, strict=True)]
    return Judged(
        name=name,
        settings=tuple(found),
        refusal=outlook if isinstance(outlook, str) else "",
        repeat_error=rates[program.source] / rate(loop) - 1,
        is_disturbed=any(disturbed(each, loop.main) for each, loop in ((tables, loop), (others, measured[0]))),
    )


def row(name: str, judged: Sequence[Judged]) -> str:
    """A row of the table."""
    again = max((abs(each.repeat_error) for each in judged), default=float("nan"))
    settings = [one for each in judged for one in each.settings]
    if not settings:
        return f"| {name} | 0 | — | — | — | {again:.0%} |"
    errors, widths = [abs(one.error) for one in settings], [one.width for one in settings]
    held = sum(one.is_held for one in settings)
    error, width = (f"{statistics.median(each):.0%}, {max(each):.0%}" for each in (errors, widths))
    return f"| {name} | {len(settings)} | {error} | {held} of {len(settings)} | {width} | {again:.0%} |"


def page(judged: Sequence[Judged]) -> str:
    """The table."""
    head = ["program", "settings", "error: median, worst", "in the interval", "width: median, worst"]
    lines = ["## Other programs", "", "| " + " | ".join([*head, "the same setting again: worst"]) + " |"]
    lines.append("|---" * 6 + "|")
    names = dict.fromkeys(each.name for each in judged)
    lines += [row(name, [each for each in judged if each.name == name]) for name in names]
    lines.append(row("**all**", judged))
    lines += ["", f"{sum(each.is_disturbed for each in judged)} of {len(judged)} rounds were disturbed."]
    return "\n".join([*lines, *(f"{each.name}: {each.refusal}." for each in judged if each.refusal)])


def told(one: Measured) -> str:
    """One setting in a line."""
    words = option_text(one.option).partition(";")[0]
    return f"{one.pair[0]} x {one.pair[1]}: {words}, measured {one.measured:.1f}, {one.error:+.0%}" + (
        "" if one.is_held else " MISSED"
    )


def judge_all(home: Path, names: Iterable[str], repeats: int) -> list[Judged]:
    """Judge programs by turns: side by side they would disturb each other."""
    judged = []
    for name in names:
        for seed in range(repeats):
            judged.append(judge(home, name, seed))
            words = "; ".join(map(told, judged[-1].settings)) or judged[-1].refusal
            hint = " (disturbed)" if judged[-1].is_disturbed else ""
            print(f"{name} {seed}{hint}, again {judged[-1].repeat_error:+.0%}: {words}", file=sys.stderr)
    return judged


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        print(page(judge_all(options.keep or Path(scratch), options.only, options.repeats)))
