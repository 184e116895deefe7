"""Leak timeline: which process grows, since when, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from app.blocks import Block, Note, answer
from app.figures import memory
from app.runtime.moment import FINDINGS, Moment, Panel, View
from app.runtime.refresh import show
from app.shared_panels import NO_PROCESS, open_files, shared_memory
from collector.diagnosis import MIN_POINTS
from collector.store import queries
from collector.units import MISSING, duration, growth, is_known, number, size
from training_harness.records import ROLE_MAIN, ROLE_WORKER

#: Number of lines that a reader can tell apart; the steepest are drawn.
MAX_LINES = 12
NOTHING = "No leak has been found."
#: kind of a leak that is not memory of a process -> the panel of OOM risk that shows it.
_OTHER_LEAKS = {"fd-leak": open_files, "shm-leak": shared_memory}


def _other_leaks(moment: Moment) -> Iterator[Block]:
    """Draw open files and shared memory, where they leak."""
    kinds = {finding.suspected for finding in moment.findings}
    for kind, build in _OTHER_LEAKS.items():
        if kind in kinds:
            yield from build(moment)


def _per_process(moment: Moment) -> Iterator[Block]:
    """Draw private dirty memory of each process; RSS, marked as such, where that can't be read."""
    metric = queries.process_metric(moment.snapshot, moment.span, "private_dirty_bytes")
    if metric is None:
        yield NO_PROCESS
        return
    places = _processes(moment)
    shown = _steepest(places, metric)
    lines = queries.process_lines(moment.snapshot, moment.span, metric, shown)
    yield memory.per_process(lines, places[places["series"].isin(shown)], moment.theme, metric=metric)
    if len(shown) == MAX_LINES:
        yield Note(f"Only the {MAX_LINES} steepest lines are drawn; the table has the others.")


def _total(moment: Moment) -> Iterator[Block]:
    """Draw the PSS of the training's processes together; PSS adds up."""
    metric = queries.process_metric(moment.snapshot, moment.span, "pss_bytes")
    if metric is not None:
        yield memory.by_role(
            queries.memory_by_role(moment.snapshot, moment.span, metric),
            moment.theme,
            metric=metric,
            title="Does the total grow?",
            lacking=memory.unread(queries.processes(moment.snapshot, moment.span, fewest=None), metric),
        )


def _table(moment: Moment) -> Iterator[Block]:
    """List the processes, steepest slope first."""
    rows = _processes(moment)
    if rows.empty:
        return
    alive = "alive" if moment.is_running else MISSING
    rows = rows.sort_values(["private_dirty_slope", "rss_slope"], ascending=False, na_position="last").head(50)
    has_slope = rows[["private_dirty_slope", "rss_slope"]].notna().any(axis=None)
    caption = (
        f"Slope: least squares over n samples {_slope_window(moment)}; {MISSING} for fewer than {MIN_POINTS}. "
        "RSS is blind to copy-on-read growth. Other columns: last values."
        if has_slope
        else f"Last values. No slope yet: it needs {MIN_POINTS} samples from the first step on."
    )
    yield moment.table(
        "processes",
        caption,
        {
            "Process": rows["series"],
            "Slope, private dirty": _slopes(rows, "private_dirty"),
            "Slope, RSS": _slopes(rows, "rss"),
            "Pid": rows["pid"].astype(str),
            "Seen for": [duration(s) for s in rows["last_seconds"] - rows["first_seconds"]],
            "State": ["ended" if ended else alive for ended in rows["ended"].fillna(False)],
            "Private dirty": [size(value) for value in rows["private_dirty_bytes"]],
            "PSS": [size(value) for value in rows["pss_bytes"]],
            "RSS": [size(value) for value in rows["rss_bytes"]],
        },
    )


def _processes(moment: Moment) -> pd.DataFrame:
    """Return the processes; a slope has at least as many samples as the diagnosis needs."""
    return queries.processes(moment.snapshot, moment.span, fewest=MIN_POINTS)


def _slopes(rows: pd.DataFrame, metric: str) -> list[str]:
    """Return slopes in words: `+2.95 MiB/s (n = 12)`."""
    pairs = zip(rows[f"{metric}_slope"], rows[f"{metric}_count"], strict=True)
    return [f"{growth(slope)} (n = {number(n)})" if is_known(slope) else MISSING for slope, n in pairs]


def _slope_window(moment: Moment) -> str:
    """Return the window of the slopes in words: start-up and shutdown are not part of a trend."""
    training = queries.training(moment.snapshot, moment.span)
    if training is None:
        return "in the window"
    begin, end = ((ns - training.origin_ns) / 1e9 for ns in (training.from_ns, training.to_ns))
    start = "the first step" if training.from_ns > moment.span.from_ns else "the start of the window"
    return f"from {start} ({duration(begin)} to {duration(end)})"


def _steepest(places: pd.DataFrame, metric: str) -> list[str]:
    of_training = places[places["role"].isin([ROLE_MAIN, ROLE_WORKER])]
    candidates = places if of_training.empty else of_training
    slope = f"{metric.removesuffix('_bytes')}_slope"
    slopes = candidates.groupby("series", sort=False)[slope].max()
    if len(slopes) <= MAX_LINES:
        return [str(name) for name in slopes.index]
    return [str(name) for name in slopes.sort_values(ascending=False, kind="stable").index[:MAX_LINES]]


def _answer(moment: Moment) -> str:
    unjudged = moment.unjudged("training process's memory", "workers' memory", "GPU memory")
    return answer(moment.findings, NOTHING + unjudged)


VIEW = View(
    name="leak-timeline",
    question="What leaks, in which process, and how fast?",
    answer=_answer,
    own_first=True,
    rows=(
        (FINDINGS,),
        (Panel("Files and shared memory", _other_leaks),),
        (Panel("Memory per process", _per_process),),
        (Panel("Total", _total, turn=1),),
        (Panel("Processes", _table),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
