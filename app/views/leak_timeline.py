"""Leak timeline: which process grows, since when, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from app.blocks import Block, Findings, Note, Table, answer
from app.figures import memory
from app.moment import Moment, Panel, View
from app.panel import show
from app.views.oom_risk import open_files, shared_memory
from collector.diagnosis.findings import KINDS, Finding
from collector.diagnosis.trends import MIN_POINTS
from collector.quantities import MISSING, duration, growth, number, size
from collector.store import memory_queries
from training_harness.records import ROLE_COLLECTOR

#: More lines than this can't be told apart; the steepest are drawn.
MAX_LINES = 12
NOTHING = "No leak has been found."
#: What leaks and is no memory of a process: these figures of OOM risk show it.
ELSEWHERE = {"fd-leak": open_files, "shm-leak": shared_memory}


def findings(moment: Moment) -> Iterator[Block]:
    """The leaks that were found."""
    if moment.verdict is not None:
        yield Findings(findings=_leaks(moment))


def beside_memory(moment: Moment) -> Iterator[Block]:
    """Open files and shared memory, where they leak."""
    kinds = {finding.kind for finding in _leaks(moment)}
    for kind, build in ELSEWHERE.items():
        if kind in kinds:
            yield from build(moment)


def per_process(moment: Moment) -> Iterator[Block]:
    """Private dirty memory of each process; RSS, called RSS, where that can't be read."""
    metric = memory_queries.process_metric(moment.snapshot, moment.span, "private_dirty_bytes")
    if metric is None:
        yield Note(text="No process has been sampled in this window: only the collector does that.")
        return
    places = _processes(moment)
    shown = _steepest(places, metric)
    lines = memory_queries.process_lines(moment.snapshot, moment.span, metric, shown)
    yield memory.per_process(
        lines,
        places[places["series"].isin(shown)],
        moment.theme,
        metric=metric,
        revision=moment.run_id,
    )
    if len(shown) == MAX_LINES:
        yield Note(text=f"Only the {MAX_LINES} steepest lines are drawn; the table has the others.")


def total(moment: Moment) -> Iterator[Block]:
    """All processes together, as PSS, which adds up."""
    metric = memory_queries.process_metric(moment.snapshot, moment.span, "pss_bytes")
    if metric is not None:
        yield memory.by_role(
            memory_queries.memory_by_role(moment.snapshot, moment.span, metric),
            moment.theme,
            metric=metric,
            capacity_bytes=None,
            capacity_name="",
            title="Does the total grow?",
            revision=moment.run_id,
            lacking=memory.unread(memory_queries.processes(moment.snapshot, moment.span, fewest=None), metric),
        )


def table(moment: Moment) -> Iterator[Block]:
    """One row per process, steepest first, Tidegauge's own last."""
    found = _processes(moment)
    if found.empty:
        return
    alive = "alive" if moment.verdict is not None and moment.verdict.status == "running" else MISSING
    found["own"] = found["role"] == ROLE_COLLECTOR
    # Smaps are read as often as the budget allows, RSS at each tick: it tells of a trend before they do.
    found["by_rss"] = found["private_dirty_slope"].isna() & found["rss_slope"].notna()
    for what in ("slope", "count"):
        found[what] = found[f"private_dirty_{what}"].where(~found["by_rss"], found[f"rss_{what}"])
    found = found.sort_values(["own", "slope"], ascending=[True, False], na_position="last").head(50)
    slopes = zip(found["slope"], found["by_rss"], strict=True)
    frame = pd.DataFrame(
        {
            "Process": found["series"],
            "Slope": [f"{growth(slope)} (RSS)" if by_rss else growth(slope) for slope, by_rss in slopes],
            "n": [number(count) for count in found["count"]],
            "Pid": found["pid"].astype(str),
            "Seen for": [duration(s) for s in found["last_seconds"] - found["first_seconds"]],
            "State": ["ended" if ended else alive for ended in found["ended"].fillna(False)],
            "Private dirty": [size(value) for value in found["private_dirty_bytes"]],
            "PSS": [size(value) for value in found["pss_bytes"]],
            "RSS": [size(value) for value in found["rss_bytes"]],
        }
    )
    yield Table(frame=frame, caption=_caption(moment), download=f"{moment.run_id}-processes")


def _caption(moment: Moment) -> str:
    return (
        f"Slope: least squares over the n samples of private dirty {_when(moment)}; of RSS, called so, where fewer "
        f"than {MIN_POINTS} of private dirty were read; {MISSING} where n is below that. The rest: last values in "
        "the window."
    )


def _processes(moment: Moment) -> pd.DataFrame:
    """With slopes of as many samples as the diagnosis asks for."""
    return memory_queries.processes(moment.snapshot, moment.span, fewest=MIN_POINTS)


def _when(moment: Moment) -> str:
    """Of which time the slopes are: to start is no trend, and to end neither."""
    training = memory_queries.training(moment.snapshot, moment.span)
    if training is None:
        return "in the window"
    begin, end = ((ns - training.origin_ns) / 1e9 for ns in (training.from_ns, training.to_ns))
    began = "the first step" if training.from_ns > moment.span.from_ns else "the window's begin"
    return f"from {began} on, {duration(begin)} to {duration(end)} after the run was made"


def _leaks(moment: Moment) -> list[Finding]:
    return [f for f in moment.verdict.findings if KINDS[f.kind] == "memory leak"] if moment.verdict else []


def _steepest(places: pd.DataFrame, metric: str) -> list[str]:
    own = places[places["role"].isin([0, 1])]
    chosen = own if not own.empty else places
    slope = f"{metric.removesuffix('_bytes')}_slope"
    steep = chosen.groupby("series", sort=False)[slope].max()
    if len(steep) <= MAX_LINES:
        return [str(name) for name in steep.index]
    return [str(name) for name in steep.sort_values(ascending=False).index[:MAX_LINES]]


VIEW = View(
    name="leak-timeline",
    question="What leaks, in which process, and how fast?",
    answer=lambda moment: answer(_leaks(moment), NOTHING),
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Files and shared memory", build=beside_memory),),
        (Panel(name="Memory per process", build=per_process),),
        (Panel(name="Total", build=total, turn=1),),
        (Panel(name="Processes", build=table),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
