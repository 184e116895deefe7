"""`tidegauge tune --batch-size`: short trials of a training at other batch sizes, and what they say of all."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from collector.commands.options import say, show_table
from collector.commands.trials import json_text, raised, try_once
from collector.diagnosis.batch_sizes import Line, Sized, fit, micro_batch, sized
from collector.diagnosis.tables import RunTables
from collector.errors import one_line
from collector.quantities import count, number, size
from training_harness.layout import BATCH_TIMES

#: Times the script's own batch size, in the order in which they are tried.
_FACTORS = (2.0, 0.5, 4.0, 8.0, 0.25, 16.0, 32.0)
#: As good as the fastest.
_AS_FAST = 0.95
_COLUMNS = ("batch size", "samples/s\nmeasured", "memory\npredicted", "\n90% interval", "memory\nmeasured", "\noff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trial: what was predicted for it from those before, and what was measured."""

    size: float
    predicted: tuple[float, float, float] | None
    measured: Sized | None
    failure: str


def try_sizes(
    command: tuple[str, ...],
    home: Path,
    *,
    seconds: float,
    trials: int,
    effective: int | None,
    form: str,
    caught: list[int],
) -> int:
    """Try them, show what is known in the end or when a signal came, and return the exit status."""
    say(f"the script's own batch size, {seconds:g} s of training")
    base, failure = _trial(command, home, None, seconds, caught)
    if caught:
        return 128 + caught[0]
    if base is None or failure or not base.batch_size > 0:
        failure = failure or "how many samples a batch has is not known"
        as_it_is = {"batch_size": None, "predicted": None, "measured": None, "failure": failure}
        nothing = dict.fromkeys(("base_bytes", "sample_bytes", "largest", "accumulate"))
        click.echo(json_text({"trials": [as_it_is], **nothing}) if form == "json" else f"as it is: {failure}")
        return 1
    rows = [Row(size=base.batch_size, predicted=None, measured=base, failure="")]
    say(f"  {_words(base)}")
    tried = [base]
    for factor in _FACTORS:
        size = max(1, round(base.batch_size * factor))
        if len(rows) > trials or size in {row.size for row in rows}:
            continue
        line = fit(tried)
        predicted = None if line is None else line.at(size)
        if predicted is not None and predicted[0] > base.room_bytes:
            rows.append(Row(size=size, predicted=predicted, measured=None, failure="not tried: it would not fit"))
            continue
        say(f"batch size {size}, {seconds:g} s of training")
        found, failure = _trial(command, home, factor, seconds, caught)
        if caught:
            break
        if found is not None and not failure and found.batch_size != size:
            failure = f"could not be made so: batches have {number(found.batch_size)} samples"
        measured = None if failure else found
        rows.append(Row(size=size, predicted=predicted, measured=measured, failure=failure))
        if measured is not None:
            tried.append(measured)
        say(f"  {failure or _words(measured or base)}")
    if form == "json":
        click.echo(json_text(as_json(rows, base, fit(tried), effective)))
    else:
        _show(rows, base, fit(tried), effective)
    return 128 + caught[0] if caught else 0


def _trial(
    command: tuple[str, ...], home: Path, factor: float | None, seconds: float, caught: list[int]
) -> tuple[Sized | None, str]:
    """What was measured, and what went wrong; the latter empty if nothing did."""
    loader = None if factor is None else f"{BATCH_TIMES}{factor:g}"
    name = "tune-batch-size" if factor is None else f"tune-batch-size-x{factor:g}"
    tables, busiest, failed = try_once(command, home, name=name, loader=loader, seconds=seconds, caught=caught)
    failure = raised(tables) or _not_made(tables) or failed
    if busiest is None:
        return None, failure or "no batch"
    found = sized(tables, busiest)
    if math.isnan(found.samples_per_second):
        too_few = f"{len(busiest.batches)} batches in {seconds:g} s are too few; give more --trial-seconds"
        failure = failure or too_few
    return found, failure


def _not_made(tables: RunTables) -> str:
    """What kept a loader from what was asked."""
    for event in tables.events_of("hook-disabled"):
        if event.get("hook") == "trial":
            return one_line(f"could not be made so: {event['error']}")
    return ""


def as_json(rows: list[Row], base: Sized, line: Line | None, effective: int | None) -> dict[str, Any]:
    """The trials and what follows from them, for programs: docs/cli.md."""
    fits = None if line is None else line.largest(base.room_bytes)
    split = None if effective is None else _split(rows, fits, effective)
    return {
        "trials": [
            {
                "batch_size": row.size,
                "predicted": row.predicted
                and dict(zip(("memory_bytes", "low", "high"), row.predicted, strict=True)),
                "measured": row.measured and dataclasses.asdict(row.measured),
                "failure": row.failure or None,
            }
            for row in rows
        ],
        "base_bytes": line and line.base_bytes,
        "sample_bytes": line and line.sample_bytes,
        "largest": fits and {"batch_size": fits[0], "by_line": fits[1]},
        "accumulate": split and {"batch_size": split[0], "steps_count": split[1]},
    }


def _split(rows: list[Row], fits: tuple[int, int] | None, effective: int) -> tuple[int, int]:
    """How to make an effective batch of what fits, or else of what ran; samples, and how many of it."""
    ran = max(row.measured.batch_size for row in rows if row.measured is not None)
    return micro_batch(effective, int(ran if fits is None else max(fits[0], 1)))


def _show(rows: list[Row], base: Sized, line: Line | None, effective: int | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: row.size):
        cells = ["—"] * 5
        if row.measured is not None:
            cells[0] = number(round(row.measured.samples_per_second, 1))
            cells[3] = size(row.measured.memory_bytes)
        if row.predicted is not None:
            middle, low, high = row.predicted
            cells[1] = size(middle)
            if math.isfinite(low):
                cells[2] = f"{size(max(0.0, low))} to {size(high)}"
            if row.measured is not None and row.measured.memory_bytes > 0:
                cells[4] = f"{middle / row.measured.memory_bytes - 1:+.0%}"
        table.add_row(count(row.size), *cells)
    show_table(table)
    for row in rows:
        if row.failure:
            click.echo(f"batch size {count(row.size)}: {row.failure}")
    for words in _conclusion(rows, base, line, effective):
        click.echo(words)


def _conclusion(rows: list[Row], base: Sized, line: Line | None, effective: int | None) -> list[str]:
    known = [row.measured for row in rows if row.measured is not None]
    best = max(known, key=lambda point: point.samples_per_second)
    enough = min(
        (point for point in known if point.samples_per_second >= _AS_FAST * best.samples_per_second),
        key=lambda point: point.batch_size,
    )
    more = enough.samples_per_second / base.samples_per_second - 1
    told = [f"Fastest, within 5%: batch_size={count(enough.batch_size)}, {more:+.0%} samples/s against its own."]
    fits = None if line is None else line.largest(base.room_bytes)
    most = max(point.batch_size for point in known)
    if line is None or fits is None:
        told.append("The largest batch cannot be told: memory does not grow with it, or too few ran.")
    else:
        told += [
            f"Memory ({base.resource}): {size(line.base_bytes)} and {size(line.sample_bytes)} per "
            f"sample; {size(base.room_bytes)} may be used.",
            f"Largest batch that fits: {fits[0]:,} ({fits[1]:,} by the line alone); tried up to {count(most)}.",
        ]
    if effective is not None:
        batch_size, times = _split(rows, fits, effective)
        steps = "step" if times == 1 else "steps"
        told.append(
            f"For an effective batch of {count(effective)}: batch_size={count(batch_size)}, {count(times)} {steps} "
            "accumulated."
        )
    return told


def _words(point: Sized) -> str:
    rate = number(round(point.samples_per_second, 1))
    return f"{count(point.batch_size)} samples a batch, {rate} samples/s, {size(point.memory_bytes)}"
