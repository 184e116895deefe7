"""`tidegauge tune --batch-size`: short trials of a training at other batch sizes, and the conclusion."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import click

from collector.commands.options import say
from collector.commands.trials import Trials, change_text, show_trials, write_results
from collector.diagnosis.tuning import BatchSizeRun, batch_size_run, line_through, micro_batch, next_size
from collector.errors import one_line
from collector.units import count, counted, number, size
from training_harness.layout import BATCH_TIMES

#: A trial lasts about 20 batches, but at most 10 times the requested duration.
_BATCHES, _LONGEST = 20, 10
#: Batches that show that a size runs.
_LEAST_BATCHES = 3
#: Share of the highest speed from which a size counts as equally fast.
_AS_FAST = 0.95
_COLUMNS = ("batch size", "samples/s", "memory\npredicted", "memory\nmeasured", "\noff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trial: its predicted memory, if any, and its measurement.

    `ran_out` is True if memory ran out.
    """

    size: float
    predicted_bytes: float | None = None
    measured: BatchSizeRun | None = None
    failure: str = ""
    ran_out: bool = False


@dataclass(kw_only=True)
class Search:
    """The trials, in order.

    Attributes:
        is_complete: whether no larger size is worth a trial; False if the search ended before.
    """

    rows: list[Row]
    is_complete: bool = False

    @property
    def measurements(self) -> list[BatchSizeRun]:
        """Measurements of the sizes that ran."""
        return [row.measured for row in self.rows if row.measured is not None]

    @property
    def largest(self) -> BatchSizeRun:
        """Measurement of the largest size that ran."""
        return max(self.measurements, key=lambda point: point.batch_size)

    @property
    def samples_per_second(self) -> float:
        """Speed of the largest size whose speed is known; infinite if none is."""
        points = [point for point in self.measurements if math.isfinite(point.samples_per_second)]
        return max(points, key=lambda point: point.batch_size).samples_per_second if points else math.inf

    def next_size(self) -> int | None:
        """Return the size to try next; None if the search is over."""
        size = next_size(self.measurements, [row.size for row in self.rows if row.ran_out])
        return None if size in {row.size for row in self.rows} else size


def try_sizes(trials: Trials, effective: int | None) -> int:
    """Try batch sizes, show the results in the end or after a signal, and return the exit status.

    Args:
        trials: what is tried.
        effective: samples of an effective batch, which is to be accumulated; None if none is asked for.
    """
    say(f"the script's own batch size, {trials.seconds:g} s of training")
    signals = trials.signals
    base = _trial(trials, None, trials.seconds)
    if signals:
        return 128 + signals[0]
    if not base.size > 0 or (base.measured is None and not base.ran_out):
        failure = base.failure or "the number of samples in a batch is not known"
        own_size = {"batch_size": None, "predicted": None, "measured": None, "failure": failure}
        no_result = dict.fromkeys(("base_bytes", "sample_bytes", "largest", "accumulate"))
        if trials.as_json:
            write_results({"trials": [own_size], **no_result})
        else:
            click.echo(f"the script's own batch size: {failure}")
        return 1
    say(f"  {_words(base)}")
    search = Search(rows=[base])
    while len(search.rows) <= trials.most and not signals:
        size = search.next_size()
        if size is None:
            search.is_complete = True
            break
        longest = min(_BATCHES * size / search.samples_per_second, _LONGEST * trials.seconds)
        trial_seconds = max(trials.seconds, longest)
        say(f"batch size {count(size)}, {trial_seconds:.3g} s of training")
        row = _trial(trials, size / base.size, trial_seconds)
        if signals:
            break
        line = line_through(search.measurements)
        predicted = None if line is None else line.at(size)
        search.rows.append(dataclasses.replace(row, size=size, predicted_bytes=predicted))
        say(f"  {_words(search.rows[-1])}")
        # The dataset has no more samples, or the loader makes its own batches.
        if row.measured is None and not row.ran_out:
            break
    if trials.as_json:
        write_results(as_json(search, effective))
    else:
        _show(search, effective)
    return 128 + signals[0] if signals else 0


def _trial(trials: Trials, factor: float | None, seconds: float) -> Row:
    """Run a trial; return its measurement and what went wrong. A trial that failed has no measurement."""
    loader = None if factor is None else f"{BATCH_TIMES}{factor!r}"
    name = "tune-batch-size" if factor is None else f"tune-batch-size-x{factor:.3g}"
    result = trials.once(name, loader, seconds)
    caught = bool(result.tables.events_of("cuda-oom"))  # the training may catch the error and go on
    failure = "does not fit: CUDA memory ran out" if caught else result.failure
    for event in result.tables.events_of("hook-disabled"):
        if not failure and event.get("hook") == "trial":
            failure = one_line(f"the loader did not get this batch size: {event['error']}")
    ran_out = caught or not result.fits
    if result.loop is None:
        return Row(size=math.nan, failure=failure or "no batch", ran_out=ran_out)
    measured = batch_size_run(result.loop)
    if len(result.loop.batches) < _LEAST_BATCHES:
        too_few = f"{len(result.loop.batches)} batches in {seconds:.3g} s are too few; give more --trial-seconds"
        failure = failure or too_few
    return Row(size=measured.batch_size, measured=None if failure else measured, failure=failure, ran_out=ran_out)


def as_json(search: Search, effective: int | None) -> dict[str, Any]:
    """Return the trials and the conclusion in their JSON form (docs/cli.md)."""
    line, split = line_through(search.measurements), _split(search, effective)
    largest = None
    if search.measurements:
        largest = {"batch_size": int(search.largest.batch_size), "is_complete": search.is_complete}
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
    """Return how to make an effective batch of the largest size that ran: micro-batch size, and their number."""
    if effective is None or not search.measurements:
        return None
    return micro_batch(effective, int(search.largest.batch_size))


def _show(search: Search, effective: int | None) -> None:
    rows = sorted(search.rows, key=lambda row: row.size)
    show_trials(_COLUMNS, map(_cells, rows), names="right")
    for row in search.rows:
        if row.failure:
            click.echo(f"batch size {count(row.size)}: {row.failure}")
    for text in _conclusion(search, effective):
        click.echo(text)


def _cells(row: Row) -> list[str]:
    cells = ["—"] * 4
    if row.measured is not None:
        if math.isfinite(row.measured.samples_per_second):
            cells[0] = number(round(row.measured.samples_per_second, 1))
        cells[2] = size(row.measured.memory_bytes)
    if row.predicted_bytes is not None:
        cells[1] = size(row.predicted_bytes)
        if row.measured is not None and row.measured.memory_bytes > 0:
            cells[3] = change_text(row.predicted_bytes, row.measured.memory_bytes)
    return [count(row.size), *cells]


def _conclusion(search: Search, effective: int | None) -> list[str]:
    if not search.measurements:
        return ["No batch size ran; give more --trials, or make the model smaller."]
    lines = []
    largest, base = search.largest, search.rows[0].measured
    rates = {point.batch_size: point.samples_per_second for point in search.measurements}
    rates = {size: rate for size, rate in rates.items() if math.isfinite(rate)}
    if rates:
        fastest = min(size for size, rate in rates.items() if rate >= _AS_FAST * max(rates.values()))
        text = f"Fastest, within 5%: batch_size={count(fastest)}"
        if base is not None and base.batch_size in rates:
            text += f", {change_text(rates[fastest], rates[base.batch_size])} samples/s against the script's own"
        lines.append(f"{text}.")
    if line := line_through(search.measurements):
        base_bytes, sample_bytes, room_bytes = map(size, (line.base_bytes, line.sample_bytes, largest.room_bytes))
        lines.append(
            f"Memory ({largest.resource}): {base_bytes} plus {sample_bytes} per sample; {room_bytes} may be used."
        )
    if not math.isfinite(largest.memory_bytes) or not math.isfinite(largest.room_bytes):
        lines.append("The largest batch that fits is not known: memory or its limit was not sampled.")
    elif search.is_complete:
        lines.append(f"Largest batch that fits: {count(largest.batch_size)}. It ran.")
    else:
        remedy = "see why the last trial failed" if search.rows[-1].failure else "give more --trials"
        lines.append(f"Batches larger than {count(largest.batch_size)} may fit: {remedy}.")
    if split := _split(search, effective):
        batch_size, times = split
        lines.append(
            f"For an effective batch of {count(effective)}: batch_size={count(batch_size)}, "
            f"{counted(times, 'step')} accumulated."
        )
    return lines


def _words(row: Row) -> str:
    point = row.measured
    if point is None:
        return row.failure
    rate = "speed not known"
    if math.isfinite(point.samples_per_second):
        rate = f"{number(round(point.samples_per_second, 1))} samples/s"
    return f"{count(point.batch_size)} samples a batch, {rate}, {size(point.memory_bytes)}"
