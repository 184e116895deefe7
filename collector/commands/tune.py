"""`tidegauge tune`: short trials of a training in the settings that the replay chooses."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collector.commands.options import PASS_ON, format_option, home_option, say
from collector.commands.trials import Trials, change_text, interruptible, show_trials, write_results
from collector.errors import TidegaugeError
from collector.units import MISSING, is_known, number, size
from training_harness.layout import CEILING, RUN_ID_VARIABLE, STORE_VARIABLE

if TYPE_CHECKING:
    from collector.agent.trial import TrialResult
    from collector.diagnosis.tuning import Calibration, Candidate, Option, Setting

_TRIALS, _BATCH_TRIALS = 4, 10
_AS_IT_IS, _PERFECT = "as it is", "perfect loader"
#: Share of the highest throughput from which a setting counts as equally fast.
_AS_FAST = 0.95
#: Cores that other programs use from which trials may mislead.
_BUSY_CORES = 0.25
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
    """One trial: its setting, if known; its prediction, if any; and its measurement.

    `fits` is False if memory ran out. `other_cores_count` are the cores that other programs used meanwhile, NaN if
    unknown.
    """

    title: str
    setting: Setting | None
    predicted: Option | None
    measured: Calibration | None
    memory_bytes: float | None
    failure: str
    fits: bool
    other_cores_count: float

    @property
    def batches_per_second(self) -> float:
        """Measured throughput, NaN without one."""
        return math.nan if self.measured is None else self.measured.batches_per_second


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
    """Try promising DataLoader settings of COMMAND. Each trains for a few seconds; then compare."""
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
        write_results({"trials": _as_json(rows)})
    elif rows:
        _show(rows)
    if signals:
        sys.exit(128 + signals[0])
    sys.exit(1 if rows[0].failure or any(row.failure and row.fits for row in rows) else 0)


def _try_settings(trials: Trials, *, ceiling: bool) -> list[Row]:
    """Try the training as it is, with a perfect loader if asked to, and in the settings that promise most."""
    from collector.diagnosis.tuning import Outcome, plan_trials

    own, result = _trial(trials, _AS_IT_IS, None)
    if trials.signals:
        return []
    if result.loop is None or own.setting is None or (own.failure and own.fits):
        return [own]
    plan = plan_trials(result.loop)
    rows = [dataclasses.replace(own, predicted=plan.current)]
    if ceiling and own.measured is not None:
        perfect, _ = _trial(trials, _PERFECT, CEILING)
        rows += [] if trials.signals else [perfect]
    if plan.why_unpredicted:
        say(f"no prediction: {plan.why_unpredicted}; more and fewer workers are tried instead")
    outcomes = [Outcome(setting=own.setting, batches_per_second=own.batches_per_second, fits=own.fits)]
    while len(outcomes) <= trials.most and not trials.signals:
        candidate = plan.next(outcomes)
        if candidate is None:
            say("no further trial: no other setting is likely to gain")
            break
        setting = candidate.setting
        loader = f"{setting.num_workers},{setting.prefetch_factor}"
        row, _ = _trial(trials, _title(setting), loader, candidate)
        if trials.signals:
            break
        rows.append(row)
        outcomes.append(Outcome(setting=setting, batches_per_second=row.batches_per_second, fits=row.fits))
    return rows


def _trial(
    trials: Trials, title: str, loader: str | None, candidate: Candidate | None = None
) -> tuple[Row, TrialResult]:
    """Run a trial and report its progress; return its row, and its run for predictions."""
    from collector.diagnosis.loading import cores_of_other_programs
    from collector.diagnosis.tuning import calibrate, held_memory, setting_of

    say(f"{title}, {trials.seconds:g} s of training")
    result = trials.once(f"tune-{title}", loader, trials.seconds)
    loop, failure = result.loop, result.failure
    measured = "no batch" if loop is None else calibrate(loop)
    setting = candidate.setting if candidate else None if loop is None else setting_of(loop)
    if isinstance(measured, str):
        failure = failure or f"nothing to compare: {measured}; give more --trial-seconds"
    elif candidate is not None and measured.setting != candidate.setting:
        failure = failure or f"the loader did not get this setting, but {_title(measured.setting)}"
    row = Row(
        title=title,
        setting=setting,
        predicted=candidate.predicted if candidate else None,
        measured=None if failure or isinstance(measured, str) else measured,
        memory_bytes=None if loop is None else held_memory(loop).usual,
        failure=failure,
        fits=result.fits,
        other_cores_count=math.nan if loop is None else cores_of_other_programs(loop),
    )
    if not trials.signals:
        say(f"  {row.failure or _rate(row)}")
    return row, result


def _as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows in their JSON form (docs/cli.md)."""
    trials = []
    for row in rows:
        predicted = None if row.predicted is None else dataclasses.asdict(row.predicted)
        if predicted is not None:
            del predicted["setting"]
        measured = None
        if row.measured is not None:
            names = ("batches_per_second", "samples_per_batch", "wait_ratio")
            measured = {name: getattr(row.measured, name) for name in names}
            measured |= {"memory_bytes": row.memory_bytes, "other_cores_count": row.other_cores_count}
        trials.append(
            {
                "title": row.title,
                "setting": None if row.setting is None else dataclasses.asdict(row.setting),
                "predicted": predicted,
                "measured": measured,
                "fits": row.fits if row.measured or not row.fits else None,
                "failure": row.failure or None,
            }
        )
    return trials


def _show(rows: list[Row]) -> None:
    if any(row.measured for row in rows):
        show_trials(_COLUMNS, map(_cells, rows), names="left")
    if any(row.predicted and (row.predicted.if_shared or row.predicted.if_apart) for row in rows):
        click.echo("or: prediction with the opposite assumption about shared waits")
    for row in rows:
        if row.failure:
            setting = "" if row.setting is None or row.title != _AS_IT_IS else f" ({_title(row.setting)})"
            click.echo(f"{row.title}{setting}: {row.failure}")
    if words := _conclusion(rows):
        click.echo(words)
    others = [row.other_cores_count for row in rows if row.measured and row.other_cores_count >= _BUSY_CORES]
    if others:
        say(
            f"other programs used up to {max(others):.1f} cores meanwhile; without them another setting may be best"
        )


def _cells(row: Row) -> list[str]:
    option, cells = row.predicted, [MISSING] * 6
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
    """Return which setting is the fastest with the fewest workers; empty if no other than the own was measured."""
    own = rows[0].measured
    measurements = [row.measured for row in rows if row.measured is not None and row.title != _PERFECT]
    if all(measured is own for measured in measurements):
        return ""
    fastest = max(measured.batches_per_second for measured in measurements)
    fast = [measured for measured in measurements if measured.batches_per_second >= _AS_FAST * fastest]
    best = min(fast, key=lambda measured: (measured.setting.num_workers, measured.setting.in_flight))
    if best is own:
        return f"The script's own {_title(best.setting)} is as fast as any that was tried, within 5%."
    text = f"Fastest, within 5%: DataLoader(…, {_title(best.setting)})"
    if own is None:
        return f"{text}."
    change = change_text(best.batches_per_second, own.batches_per_second)
    return f"{text}, {change} batches/s against the script's own {_title(own.setting)}."


def _rate(row: Row) -> str:
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
    if title == _AS_IT_IS and row.setting is not None:
        title = f"{title}: {_title(row.setting)}"
    return title.replace("num_workers=", "").replace(", prefetch_factor=", " x ")
