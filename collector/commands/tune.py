"""`tidegauge tune`: short trials of a training in the settings that the replay chooses."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collector.commands.options import PASS_ON, format_option, home_option, say
from collector.commands.trials import Trials, change_text, interruptible, show_trials
from collector.errors import TidegaugeError
from training_harness.layout import CEILING, RUN_ID_VARIABLE, STORE_VARIABLE

if TYPE_CHECKING:
    from collector.diagnosis.tuning import Calibration, Forecast, Option, Setting

_TRIALS, _BATCH_TRIALS = 4, 10
_AS_IT_IS, _PERFECT = "as it is", "perfect loader"
#: Headers of a table within 80 columns.
_COLUMNS = (
    "num_workers x\nprefetch_factor",
    "batches/s\npredicted",
    "batches/s\nmeasured",
    "\noff",
    "\nwaited",
    "memory\npredicted",
    "memory\nmeasured",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial: its prediction, if any, and its measurement."""

    title: str
    predicted: Option | None
    measured: Calibration | None
    memory_bytes: float | None
    failure: str


@click.command(context_settings=PASS_ON)
@click.option(
    "--trial-seconds",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    metavar="S",
    help="Seconds of training per trial.",
)
@click.option(
    "--trials",
    "trials_count",
    type=click.IntRange(1, 50),
    metavar="N",
    help="Number of trials [default: 4, or 10 with --batch-size].",
)
@click.option("--ceiling", is_flag=True, help="Also train on one repeated batch: no loader can be faster.")
@click.option(
    "--batch-size", is_flag=True, help="Try batch sizes: show the memory of each, and the largest that fits."
)
@click.option(
    "--effective-batch",
    type=click.IntRange(1),
    metavar="N",
    help="With --batch-size: split a batch of N samples into several that fit.",
)
@format_option("text", "json")
@home_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def tune(
    trial_seconds: float,
    trials_count: int | None,
    ceiling: bool,
    batch_size: bool,
    effective_batch: int | None,
    form: str,
    home: Path,
    command: tuple[str, ...],
) -> None:
    """Train COMMAND for a few seconds with each promising setting of its DataLoader, and compare."""
    if ceiling and batch_size:
        raise TidegaugeError("--ceiling and --batch-size need different trials; give one of them")
    if effective_batch is not None and not batch_size:
        raise TidegaugeError("--effective-batch needs batch sizes to choose from; give --batch-size too")
    if shutil.which(command[0]) is None:
        raise TidegaugeError(f"{command[0]}: command not found; give the command that trains, as in a shell")
    for variable in (STORE_VARIABLE, RUN_ID_VARIABLE):  # Trials belong to this machine alone.
        os.environ.pop(variable, None)
    with interruptible() as signals:
        trials = Trials(
            command=command,
            home=home,
            seconds=trial_seconds,
            most=trials_count or (_BATCH_TRIALS if batch_size else _TRIALS),
            as_json=form == "json",
            signals=signals,
        )
        if batch_size:
            from collector.commands.batch_trials import try_sizes

            sys.exit(try_sizes(trials, effective_batch))
        rows = _try_settings(trials, ceiling=ceiling)
    if trials.as_json:
        from collector.agent.trial import json_text

        click.echo(json_text({"trials": _as_json(rows)}))
    elif rows:
        _show(rows)
    if signals:
        sys.exit(128 + signals[0])
    sys.exit(1 if rows[0].failure else 0)


def _try_settings(trials: Trials, *, ceiling: bool) -> list[Row]:
    """Try the training as it is, with a perfect loader if asked to, and in the settings that promise most."""
    rows: list[Row] = []
    plan: list[tuple[str, str | None, Option | None]] = [(_AS_IT_IS, None, None)]
    plan += [(_PERFECT, CEILING, None)] if ceiling else []
    while plan and not trials.signals:
        title, loader, option = plan.pop(0)
        say(f"{title}, {trials.seconds:g} s of training")
        row, outlook = _trial(trials, title, loader, option)
        if trials.signals:
            break
        rows.append(row)
        say(f"  {row.failure or _rate(row)}")
        if title == _AS_IT_IS:
            if row.failure:
                break
            chosen = _choose(outlook, row)[: trials.most]
            plan += [(_title(setting), _loader(setting), prediction) for setting, prediction in chosen]
            if not isinstance(outlook, str):
                rows = [dataclasses.replace(row, predicted=outlook.current)]
    return rows


def _trial(trials: Trials, title: str, loader: str | None, option: Option | None) -> tuple[Row, Forecast | str]:
    from collector.agent.trial import training_error
    from collector.diagnosis.tuning import calibrate, forecast, held_memory

    tables, busiest, trial_failure = trials.once(f"tune-{title}", loader, trials.seconds)
    measured = "no batch" if busiest is None else calibrate(tables, busiest)
    failure = trial_failure or training_error(tables)
    if isinstance(measured, str):
        failure = failure or f"nothing to compare: {measured}; give more --trial-seconds"
    elif loader not in (None, CEILING, _loader(measured.setting)):
        failure = f"the loader did not get this setting, but {_title(measured.setting)}"
    row = Row(
        title=title,
        predicted=option,
        measured=None if failure or isinstance(measured, str) else measured,
        memory_bytes=None if busiest is None else held_memory(tables, busiest).usual,
        failure=failure,
    )
    return row, "no batch" if busiest is None else forecast(tables, busiest)


def _choose(outlook: Forecast | str, base: Row) -> list[tuple[Setting, Option | None]]:
    """Choose the settings to try: first the recommendation, then the front of throughput and memory.

    If the replay does not reproduce the training, choose more and more workers.
    """
    from collector.diagnosis.tuning import Setting

    assert base.measured is not None
    setting = base.measured.setting
    if isinstance(outlook, str):
        say(f"  no prediction: {outlook}; more workers are tried instead")
        more = [max(1, setting.num_workers) * 2**power for power in range(setting.num_workers > 0, 8)]
        return [
            (Setting(num_workers=workers, prefetch_factor=2, in_order=setting.in_order), None) for workers in more
        ]
    best = [] if outlook.best is None else [outlook.best]
    front = sorted(outlook.front, key=lambda option: -option.batches_per_second)
    options = [*best, *(option for option in front if option not in best and option.setting != setting)]
    return [(option.setting, option) for option in options]


def _as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows in their JSON form (docs/cli.md)."""
    trials = []
    for row in rows:
        predicted = None if row.predicted is None else dataclasses.asdict(row.predicted)
        setting = None if predicted is None else predicted.pop("setting")
        measured = None
        if row.measured is not None:
            setting = dataclasses.asdict(row.measured.setting)
            names = ("batches_per_second", "samples_per_batch", "wait_ratio")
            measured = {name: getattr(row.measured, name) for name in names} | {"memory_bytes": row.memory_bytes}
        trials.append(
            {
                "title": row.title,
                "setting": setting,
                "predicted": predicted,
                "measured": measured,
                "failure": row.failure or None,
            }
        )
    return trials


def _show(rows: list[Row]) -> None:
    show_trials(_COLUMNS, map(_cells, rows), names="left")
    if any(row.predicted and (row.predicted.if_shared or row.predicted.if_apart) for row in rows):
        click.echo("or: prediction with the opposite assumption about shared waits")
    if words := _conclusion(rows):
        click.echo(words)
    for row in rows:
        if row.failure:
            click.echo(f"{row.title}: {row.failure}")


def _cells(row: Row) -> list[str]:
    from collector.units import number, size

    option, cells = row.predicted, ["—"] * 6
    if option is not None:
        rate, low, high = map(number, (option.batches_per_second, option.low, option.high))
        other = option.if_shared or option.if_apart
        or_else = "" if other is None else f"\nor {number(other.batches_per_second)}"
        cells[0] = f"{rate} ({low}-{high}){or_else}"
        cells[4] = size(option.memory_bytes)
    if row.measured is not None:
        cells[1] = number(row.measured.batches_per_second)
        cells[3] = f"{row.measured.wait_ratio:.0%}"
        cells[5] = size(row.memory_bytes)
        if option is not None:
            cells[2] = change_text(option.batches_per_second, row.measured.batches_per_second)
    return [_short_title(row), *cells]


def _conclusion(rows: list[Row]) -> str:
    """Return which setting was the fastest, and by how much; empty if only one was measured."""
    measurements = [row.measured for row in rows if row.measured is not None and row.title != _PERFECT]
    if len(measurements) < 2:
        return ""
    base, best = measurements[0], max(measurements, key=lambda measured: measured.batches_per_second)
    if best is base:
        return f"The script's own {_title(base.setting)} was the fastest of those tried."
    faster = change_text(best.batches_per_second, base.batches_per_second)
    return f"Fastest: DataLoader(…, {_title(best.setting)}), {faster} batches/s against the script's own."


def _rate(row: Row) -> str:
    from collector.units import is_known, number

    assert row.measured is not None
    batches, samples = row.measured.batches_per_second, row.measured.samples_per_batch
    words = f"{batches:.3g} batches/s"
    return f"{words}, {number(round(batches * samples))} samples/s" if is_known(samples) else words


def _title(setting: Setting) -> str:
    if not setting.num_workers:
        return "num_workers=0"
    return f"num_workers={setting.num_workers}, prefetch_factor={setting.prefetch_factor}"


def _short_title(row: Row) -> str:
    title = row.title
    if title == _AS_IT_IS and row.measured is not None:
        title = f"{title}: {_title(row.measured.setting)}"
    return title.replace("num_workers=", "").replace(", prefetch_factor=", " x ")


def _loader(setting: Setting) -> str:
    return f"{setting.num_workers},{setting.prefetch_factor}"
