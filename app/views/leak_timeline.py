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
from collector.quantities import MISSING, duration, growth, number, size
from collector.store import memory_queries

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
    places = memory_queries.processes(moment.snapshot, moment.span)
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
        )


def table(moment: Moment) -> Iterator[Block]:
    """One row per process, steepest first."""
    found = memory_queries.processes(moment.snapshot, moment.span)
    if found.empty:
        return
    smaps = found["private_dirty_count"].sum() > 0
    base, word = ("private_dirty", "private dirty") if smaps else ("rss", "RSS")
    alive = "alive" if moment.verdict is not None and moment.verdict.status == "running" else MISSING
    found = found.sort_values(f"{base}_slope", ascending=False, na_position="last").head(50)
    frame = pd.DataFrame(
        {
            "Process": found["series"],
            "Pid": found["pid"].astype(str),
            "Seen for": [duration(s) for s in found["last_seconds"] - found["first_seconds"]],
            "State": ["ended" if ended else alive for ended in found["ended"].fillna(False)],
            f"Slope of {word}": [growth(value) for value in found[f"{base}_slope"]],
            "n": [number(count) for count in found[f"{base}_count"]],
            "Private dirty": [size(value) for value in found["private_dirty_bytes"]],
            "PSS": [size(value) for value in found["pss_bytes"]],
            "RSS": [size(value) for value in found["rss_bytes"]],
        }
    )
    yield Table(
        frame=frame,
        caption=f"Last values in the window; slope: least squares over the n samples of {word}.",
        download=f"{moment.run_id}-processes",
    )


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
