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
from collector.diagnosis.batch_sizes import Sized, line_through, micro_batch, next_size, sized
from collector.diagnosis.tables import RunTables
from collector.errors import one_line
from collector.quantities import count, number, size
from training_harness.layout import BATCH_TIMES

#: A trial goes on for about 20 batches, but no longer than 10 times what was asked for.
_BATCHES, _LONGEST = 20, 10
_FEWEST = 3  # batches that show that a size runs
#: As good as the fastest.
_AS_FAST = 0.95
_COLUMNS = ("batch size", "samples/s", "memory\npredicted", "memory\nmeasured", "\noff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trial: the memory that was predicted for it, if it was, and what was measured.

    `ran_out` tells that its memory ran out.
    """

    size: float
    predicted_bytes: float | None = None
    measured: Sized | None = None
    failure: str = ""
    ran_out: bool = False


@dataclass(kw_only=True)
class Search:
    """The trials, in order.

    Attributes:
        rows: one for each size.
        is_complete: whether no larger size is worth a trial; False while trials are left or had to end.

    """

    rows: list[Row]
    is_complete: bool = False

    @property
    def ran(self) -> list[Sized]:
        """Measurements of the sizes that ran."""
        return [row.measured for row in self.rows if row.measured is not None]

    @property
    def largest(self) -> Sized:
        """The largest that ran."""
        return max(self.ran, key=lambda point: point.batch_size)

    @property
    def samples_per_second(self) -> float:
        """Speed of the largest size whose speed is known; infinite if none is."""
        known = [point for point in self.ran if math.isfinite(point.samples_per_second)]
        return max(known, key=lambda point: point.batch_size).samples_per_second if known else math.inf

    def next_size(self) -> int | None:
        """Return what to try next, None if the search is over."""
        found = next_size(self.ran, [row.size for row in self.rows if row.ran_out])
        return None if found in {row.size for row in self.rows} else found


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
    base = _trial(command, home, None, seconds, caught)
    if caught:
        return 128 + caught[0]
    if not base.size > 0 or (base.measured is None and not base.ran_out):
        failure = base.failure or "how many samples a batch has is not known"
        as_it_is = {"batch_size": None, "predicted": None, "measured": None, "failure": failure}
        nothing = dict.fromkeys(("base_bytes", "sample_bytes", "largest", "accumulate"))
        click.echo(json_text({"trials": [as_it_is], **nothing}) if form == "json" else f"as it is: {failure}")
        return 1
    say(f"  {_words(base)}")
    search = Search(rows=[base])
    while len(search.rows) <= trials and not caught:
        size = search.next_size()
        if size is None:
            search.is_complete = True
            break
        enough = max(seconds, min(_BATCHES * size / search.samples_per_second, _LONGEST * seconds))
        say(f"batch size {count(size)}, {enough:.3g} s of training")
        row = _trial(command, home, size / base.size, enough, caught)
        if caught:
            break
        line = line_through(search.ran)
        predicted = None if line is None else line.at(size)
        search.rows.append(dataclasses.replace(row, size=size, predicted_bytes=predicted))
        say(f"  {_words(search.rows[-1])}")
        if row.measured is None and not row.ran_out:  # the dataset has no more, or the loader makes its own batches
            break
    if form == "json":
        click.echo(json_text(as_json(search, effective)))
    else:
        _show(search, effective)
    return 128 + caught[0] if caught else 0


def _trial(command: tuple[str, ...], home: Path, factor: float | None, seconds: float, caught: list[int]) -> Row:
    """Return what was measured, and what went wrong; a trial that failed has no measurement."""
    loader = None if factor is None else f"{BATCH_TIMES}{factor!r}"
    name = "tune-batch-size" if factor is None else f"tune-batch-size-x{factor:.3g}"
    tables, busiest, failed = try_once(command, home, name=name, loader=loader, seconds=seconds, caught=caught)
    ran_out = bool(tables.events_of("cuda-oom"))
    failure = "CUDA memory ran out" if ran_out else raised(tables) or _not_made(tables) or failed
    if busiest is None:
        return Row(size=math.nan, failure=failure or "no batch", ran_out=ran_out)
    found = sized(tables, busiest)
    if len(busiest.batches) < _FEWEST:
        too_few = f"{len(busiest.batches)} batches in {seconds:.3g} s are too few; give more --trial-seconds"
        failure = failure or too_few
    return Row(size=found.batch_size, measured=None if failure else found, failure=failure, ran_out=ran_out)


def _not_made(tables: RunTables) -> str:
    """What kept a loader from what was asked."""
    for event in tables.events_of("hook-disabled"):
        if event.get("hook") == "trial":
            return one_line(f"could not be made so: {event['error']}")
    return ""


def as_json(search: Search, effective: int | None) -> dict[str, Any]:
    """Return the trials and what follows from them, for programs: docs/cli.md."""
    line, split = line_through(search.ran), _split(search, effective)
    largest = (
        {"batch_size": int(search.largest.batch_size), "is_complete": search.is_complete} if search.ran else None
    )
    return {
        "trials": [
            {
                "batch_size": row.size,
                "predicted": row.predicted_bytes and {"memory_bytes": row.predicted_bytes},
                "measured": row.measured and dataclasses.asdict(row.measured),
                "failure": row.failure or None,
            }
            for row in search.rows
        ],
        "base_bytes": line and line.base_bytes,
        "sample_bytes": line and line.sample_bytes,
        "largest": largest,
        "accumulate": split and {"batch_size": split[0], "steps_count": split[1]},
    }


def _split(search: Search, effective: int | None) -> tuple[int, int] | None:
    """Return how to make an effective batch of the largest that ran: its samples, and how many of it."""
    if effective is None or not search.ran:
        return None
    return micro_batch(effective, int(search.largest.batch_size))


def _show(search: Search, effective: int | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in sorted(search.rows, key=lambda row: row.size):
        cells = ["—"] * 4
        if row.measured is not None:
            if math.isfinite(row.measured.samples_per_second):
                cells[0] = number(round(row.measured.samples_per_second, 1))
            cells[2] = size(row.measured.memory_bytes)
        if row.predicted_bytes is not None:
            cells[1] = size(row.predicted_bytes)
            if row.measured is not None and row.measured.memory_bytes > 0:
                cells[3] = f"{row.predicted_bytes / row.measured.memory_bytes - 1:+.0%}"
        table.add_row(count(row.size), *cells)
    show_table(table)
    for row in search.rows:
        if row.failure:
            click.echo(f"batch size {count(row.size)}: {row.failure}")
    for words in _conclusion(search, effective):
        click.echo(words)


def _conclusion(search: Search, effective: int | None) -> list[str]:
    if not search.ran:
        return ["No batch size ran; give more --trials, or make the model smaller."]
    told = []
    largest, base = search.largest, search.rows[0].measured
    rates = {point.batch_size: point.samples_per_second for point in search.ran}
    known = {size: rate for size, rate in rates.items() if math.isfinite(rate)}
    if known:
        enough = min(size for size, rate in known.items() if rate >= _AS_FAST * max(known.values()))
        fastest = f"Fastest, within 5%: batch_size={count(enough)}"
        if base is not None and base.batch_size in known:
            fastest += f", {known[enough] / known[base.batch_size] - 1:+.0%} samples/s against its own"
        told.append(f"{fastest}.")
    if line := line_through(search.ran):
        base_bytes, sample_bytes, room_bytes = map(size, (line.base_bytes, line.sample_bytes, largest.room_bytes))
        told.append(
            f"Memory ({largest.resource}): {base_bytes} and {sample_bytes} per sample; {room_bytes} may be used."
        )
    if not math.isfinite(largest.memory_bytes) or not math.isfinite(largest.room_bytes):
        told.append("The largest batch that fits can't be told: memory, or its limit, was not sampled.")
    elif search.is_complete:
        told.append(f"Largest batch that fits: {count(largest.batch_size)}. It ran.")
    else:
        remedy = "the last trial says what is missing" if search.rows[-1].failure else "give more --trials"
        told.append(f"Batches larger than {count(largest.batch_size)} may fit: {remedy}.")
    if split := _split(search, effective):
        batch_size, times = split
        steps = "step" if times == 1 else "steps"
        told.append(
            f"For an effective batch of {count(effective)}: batch_size={count(batch_size)}, {count(times)} {steps} "
            "accumulated."
        )
    return told


def _words(row: Row) -> str:
    point = row.measured
    if point is None:
        return row.failure
    rate = "speed not known"
    if math.isfinite(point.samples_per_second):
        rate = f"{number(round(point.samples_per_second, 1))} samples/s"
    return f"{count(point.batch_size)} samples a batch, {rate}, {size(point.memory_bytes)}"
