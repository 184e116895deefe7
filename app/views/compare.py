"""Compare: two to four runs side by side, their settings that differ, and the effect.

The baseline is the first of the runs to compare with. Table and answer say how the other runs differ from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from app.blocks import Block, Note
from app.figures import steps
from app.figures.axis import convert_x
from app.figures.base import Axis
from app.figures.memory import METRIC_WORDS
from app.runtime.moment import Moment, Panel, View, once
from app.runtime.refresh import show
from collector import report
from collector.store import queries
from collector.units import MISSING, number, percent

NO_OTHER = Note(
    "No other run is chosen above. Record one with a change, and a tag that names it:",
    command="tidegauge run --tag change=workers-8 -- python train.py",
)
#: Largest difference in samples per step at which steps count as alike: batch sizes may vary a little.
_ALIKE_RATIO = 0.01
#: figure -> words for more, for less and for the same
_SPEED = {"step_p50": ("more time in the median step", "less time in the median step", "as long a median step")}
_RATE = {"samples": ("more samples per second", "fewer samples per second", "as many samples per second")}
_MEMORY = {"host_peak": ("more host memory", "less host memory", "as much host memory")}


def _runs(moment: Moment) -> tuple[Moment, ...]:
    """Return the baseline, the chosen run, and the rest."""
    baseline, *rest = moment.others
    return baseline, moment, *rest


def _names(moment: Moment) -> list[str]:
    """Return the name of each run: the page has no room for ids, which are above it."""
    return report.headings([run.run_id for run in _runs(moment)], short=True)


def _deltas(moment: Moment) -> Iterator[Block]:
    """List the figures of each run, and their difference from the baseline's."""
    if not moment.others:
        yield NO_OTHER
        return
    baseline, *runs = _runs(moment)
    first = _measures(baseline)
    name, *names = _names(moment)
    columns = {report.baseline_words(name): [report.words(measure) for measure in first.values()]}
    for run, name in zip(runs, names, strict=True):
        measured = _measures(run)
        columns[name] = [report.words(measured[name], first[name]) for name in first]
    table = pd.DataFrame({"Figure": [measure.label for measure in first.values()], **columns})
    caption = (
        "In brackets: change against the baseline, and n, the number of steps, batches or samples. Step times and "
        "rates are over the chosen window, the others over the whole run."
    )
    yield moment.table("compared", caption, table[(table[list(columns)] != MISSING).any(axis=1)])


def _unlike_settings(moment: Moment) -> Iterator[Block]:
    if not moment.others:
        return
    unlike = report.differences(map(_settings, _runs(moment)))
    if cautions := list(_cautions(moment, unlike)):
        yield Note(" ".join(cautions), icon=":material/balance:")
    if not unlike:
        yield Note("No recorded setting differs: command, versions, loaders and host are the same.")
        return
    columns = {
        name: [values[position] for values in unlike.values()] for position, name in enumerate(_names(moment))
    }
    yield moment.table("settings", "The settings that differ.", {"Setting": list(unlike), **columns})


def _cautions(moment: Moment, unlike: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield sentences about figures that cannot be compared directly."""
    baseline, *others = _runs(moment)
    names = _names(moment)[1:]
    runs = [name for run, name in zip(others, names, strict=True) if _unlike_steps(run, baseline)]
    if runs:
        yield (
            f"Steps or batches of {', '.join(runs)} have a different number of samples than those of the baseline: "
            "compare samples per second, not steps."
        )
    capacities = [name for name in unlike if name.endswith("capacity")]
    if capacities:
        yield f"The runs differ in {', '.join(capacities)}, so equal bytes are different shares of it."
    if "host" in unlike:
        yield "The runs were on different hosts, which may differ in speed."


def _step_times(moment: Moment) -> Iterator[Block]:
    if not moment.others:
        return
    curves = {}
    for run, name in zip(_runs(moment), _names(moment), strict=True):
        rows = queries.steps(run.snapshot, run.span)
        if not rows.empty:
            curves[name] = rows.assign(x=_to_chosen_axis(run, "step", rows["step"]))
    if len(curves) > 1:
        yield steps.step_times(curves, moment.theme, axis=moment.axis)


def _host_memory(moment: Moment) -> Iterator[Block]:
    if not moment.others:
        return
    curves: dict[str, pd.DataFrame] = {}
    metrics = set()
    for run, name in zip(_runs(moment), _names(moment), strict=True):
        metric = queries.process_metric(run.snapshot, run.span, "pss_bytes")
        if metric is not None:
            grid = queries.memory_by_role(run.snapshot, run.span, metric)
            total = grid.drop(columns="elapsed_seconds").sum(axis=1)
            x = _to_chosen_axis(run, "elapsed", grid["elapsed_seconds"])
            curves[name] = pd.DataFrame({"elapsed_seconds": x, "value": total})
            metrics.add(METRIC_WORDS[metric])
    if len(curves) > 1:
        word = " or ".join(sorted(metrics))
        yield steps.host_memory(curves, moment.theme, axis=moment.axis, metric=word)


def _to_chosen_axis(run: Moment, x_axis: Axis, x: pd.Series) -> Any:
    return convert_x(x, x_axis, run.axis, queries.step_clock(run.snapshot, run.span))


@once
def _measures(moment: Moment) -> dict[str, report.Measure]:
    return report.measures(moment.snapshot, moment.span, moment.verdict)


def _settings(moment: Moment) -> dict[str, str]:
    return report.settings(moment.snapshot, {**moment.manifest, "tags": moment.run.tags})


def _answer(moment: Moment) -> str:
    if not moment.others:
        return ""
    (baseline, *runs), (first, *names) = _runs(moment), _names(moment)
    clauses = "; ".join(f"{name}{_difference(run, baseline)}" for run, name in zip(runs, names, strict=True))
    return f"Against the baseline {first}, {clauses}."


def _difference(run: Moment, baseline: Moment) -> str:
    """Return in words how a run differs from the baseline in speed and host memory.

    Speed is samples per second where known. A median step hides a worker that delays every fourth step, and
    says nothing where the steps of the runs are of different size.
    """
    unlike = _unlike_steps(run, baseline)
    values, first = _measures(run), _measures(baseline)
    speed = _RATE if unlike or report.change_ratio(values["samples"], first["samples"]) is not None else _SPEED
    parts = []
    for name, (more, less, same) in {**speed, **_MEMORY}.items():
        if (ratio := report.change_ratio(values[name], first[name])) is not None:
            change = percent(abs(ratio))
            parts.append(f"{change} {more if ratio > 0 else less}" if round(ratio, 3) else same)
        elif name in _RATE:
            parts.append("no samples per second to compare")
    return f"{unlike} has {', '.join(parts) or 'no figure that was measured in both'}"


def _unlike_steps(run: Moment, baseline: Moment) -> str:
    """Return, in brackets, how the samples per step differ from the baseline's; empty if they are alike."""
    samples, first = _step_samples(run), _step_samples(baseline)
    if samples and first and abs(samples / first - 1) > _ALIKE_RATIO:
        return f" ({number(samples)} samples per step, there {number(first)})"
    values, others = _settings(run), _settings(baseline)
    sizes = [
        name for name in values if name.endswith("batch size") and MISSING not in (values[name], others.get(name))
    ]
    return (
        " (with another batch size)"
        if any(values[name] != others.get(name, values[name]) for name in sizes)
        else ""
    )


@once
def _step_samples(moment: Moment) -> float | None:
    return queries.step_samples(moment.snapshot, moment.span)


VIEW = View(
    name="compare",
    question="Did the change help?",
    answer=_answer,
    rows=(
        (Panel("Figures", _deltas),),
        (Panel("Settings", _unlike_settings),),
        (Panel("Step time", _step_times, turn=1), Panel("Host memory", _host_memory, turn=1)),
    ),
)

if __name__ == "__main__":
    show(VIEW)
