"""Post-mortem: did it die, which process, of what, and what the last minute looked like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from app.blocks import Block, Findings, Metric, Metrics, Note, Table, answer, needs_attention
from app.figures import memory
from app.moment import Moment, Panel, View
from app.panel import show
from collector.diagnosis.findings import KINDS, Finding
from collector.diagnosis.last_minute import WINDOW_SECONDS
from collector.quantities import MISSING, duration, known, number, size
from collector.report import exit_words
from collector.store import memory_queries
from collector.store.queries import Span

#: More lines than this can't be told apart; the largest are drawn.
MAX_LINES = 12


def findings(moment: Moment) -> Iterator[Block]:
    """What died, and the evidence."""
    if moment.verdict is not None:
        yield Findings(findings=_deaths(moment))


def facts(moment: Moment) -> Iterator[Block]:
    """How the command ended."""
    verdict = moment.verdict
    if verdict is None:
        return
    ended = MISSING if verdict.exit_status is None else exit_words(verdict.exit_status)
    yield Metrics(
        items=[
            Metric(label="Status", value=verdict.status, help="Of the command, and of the training under it"),
            Metric(label="Ended with", value=ended, help="Of the command itself, where somebody saw it end"),
            Metric(label="Lasted", value=duration(verdict.duration_seconds), help="From the start of the run"),
            Metric(label="Steps", value=number(verdict.steps), help="Optimizer steps of the last attempt"),
            Metric(
                label="Attempts",
                value=number(verdict.attempts),
                help="How many times the launcher started the ranks",
            ),
        ]
    )


def processes(moment: Moment) -> Iterator[Block]:
    """Each process in the last minute."""
    within = last_minute(moment)
    metric = memory_queries.process_metric(moment.snapshot, within, "pss_bytes")
    if metric is None:
        yield Note(text="No process was sampled in the last minute: only the collector does that.")
        return
    places = memory_queries.processes(moment.snapshot, within)
    largest = places.groupby("series", sort=False)[metric].max().nlargest(MAX_LINES).index.tolist()
    yield memory.per_process(
        memory_queries.process_lines(moment.snapshot, within, metric, largest),
        places[places["series"].isin(largest)],
        moment.theme,
        metric=metric,
        revision=moment.run_id,
        title="What did each process hold in the last minute?",
    )


def limits(moment: Moment) -> Iterator[Block]:
    """The memory that was nearest to its limit, in the last minute."""
    tightest = memory_queries.tightest_limit(moment.snapshot)
    if tightest is not None:
        yield memory.against_limit(
            memory_queries.host_lines(moment.snapshot, last_minute(moment), tightest["limit"], tightest["host"]),
            moment.theme,
            name=memory.LIMIT_WORDS[tightest["limit"]],
            capacity_bytes=tightest["capacity_bytes"],
            revision=moment.run_id,
        )


def table(moment: Moment) -> Iterator[Block]:
    """The same in numbers."""
    within = last_minute(moment)
    found = memory_queries.processes(moment.snapshot, within).sort_values("pss_peak_bytes", ascending=False)
    if found.empty:
        return
    end = (within.to_ns - within.origin_ns) / 1e9
    yield Table(
        frame=pd.DataFrame(
            {
                "Process": found["series"],
                "Pid": found["pid"].astype(str),
                "Host": found["host"],
                "PSS, highest": [size(value) for value in found["pss_peak_bytes"]],
                "PSS, last": [size(value) for value in found["pss_bytes"]],
                "Private dirty, last": [size(value) for value in found["private_dirty_bytes"]],
                "RSS, last": [size(value) for value in found["rss_bytes"]],
                "Last seen before the end": [duration(value) for value in end - found["last_seconds"]],
                "Exit seen": ["yes" if ended else "no" for ended in found["ended"].fillna(False)],
            }
        ),
        caption="The processes sampled in the last minute of records, largest first.",
        download=f"{moment.run_id}-last-minute",
    )


def last_minute(moment: Moment) -> Span:
    """The last 60 s that were recorded, of all ranks."""
    return replace(
        moment.whole, from_ns=max(moment.whole.from_ns, moment.whole.to_ns - int(WINDOW_SECONDS * 1e9)), rank=None
    )


def _deaths(moment: Moment) -> list[Finding]:
    return [f for f in moment.verdict.findings if KINDS[f.kind] == "death"] if moment.verdict else []


def _answer(moment: Moment) -> str:
    assert moment.verdict is not None, "a view without a verdict has no answer"
    if moment.verdict.status == "running":
        return answer(_deaths(moment), "It goes on: no process of it has died.")
    if moment.verdict.status == "finished" and not needs_attention(_deaths(moment)):
        return "No: it came to its end in good order."
    status = moment.verdict.exit_status
    ended = "" if not known(status) else f" with {exit_words(int(status))}"
    return answer(_deaths(moment), f"It ended{ended}, and what ended it was not seen.")


VIEW = View(
    name="post-mortem",
    question="Did it die, which process, and of what?",
    answer=_answer,
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="End", build=facts),),
        (Panel(name="Last minute", build=processes),),
        (Panel(name="Limit", build=limits),),
        (Panel(name="Processes", build=table),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
