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
from collector.diagnosis.trends import MIN_POINTS
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
    last = (
        [Metric(label="So far", value=duration(verdict.duration_seconds), help="Since the start of the run")]
        if _goes_on(moment)
        else [
            Metric(label="Ended with", value=ended, help="Of the command itself, where somebody saw it end"),
            Metric(label="Lasted", value=duration(verdict.duration_seconds), help="From the start of the run"),
        ]
    )
    yield Metrics(
        items=[
            Metric(label="Status", value=verdict.status, help="Of the command, and of the training under it"),
            *last,
            Metric(label="Steps", value=number(verdict.steps), help="Steps of the last attempt"),
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
    places = memory_queries.processes(moment.snapshot, within, fewest=MIN_POINTS)
    held = places[metric].fillna(places["rss_bytes"])  # who died young may have no PSS
    largest = held.groupby(places["series"], sort=False).max().nlargest(MAX_LINES).index.tolist()
    places = places[places["series"].isin(largest)]
    resident = None
    if memory.unread(places, metric):
        resident = memory_queries.process_lines(moment.snapshot, within, "rss_bytes", largest, lacking=metric)
    yield memory.per_process(
        memory_queries.process_lines(moment.snapshot, within, metric, largest),
        places,
        moment.theme,
        metric=metric,
        revision=moment.run_id,
        resident=resident,
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
    found = memory_queries.processes(moment.snapshot, within, fewest=None)
    if found.empty:
        return
    # The last record of a process may be the one that found it gone.
    found = found.merge(memory_queries.last_alive(moment.snapshot, within), how="left", on=["host", "pid", "ticks"])
    found["highest"] = found["pss_peak_bytes"].fillna(found["rss_peak_bytes"])
    found = found.sort_values("highest", ascending=False)
    lacking = (
        memory.unread(found, "pss_bytes") and "; (RSS): no PSS was read of it, and RSS counts shared pages fully"
    )
    yield Table(
        frame=pd.DataFrame(
            {
                "Process": found["series"],
                "Pid": found["pid"].astype(str),
                "Host": found["host"],
                "PSS, highest": _pss(found, "peak_bytes"),
                "PSS, last": _pss(found, "bytes"),
                "Private dirty, last": [size(value) for value in found["private_dirty_bytes"]],
                "RSS, last": [size(value) for value in found["rss_bytes"]],
                **_ends(moment, found, (within.to_ns - within.origin_ns) / 1e9),
            }
        ),
        caption=f"The processes sampled in the last minute of records, largest first{lacking}.",
        download=f"{moment.run_id}-last-minute",
    )


def _pss(found: pd.DataFrame, what: str) -> list[str]:
    """In words, with RSS, called so, where no PSS was read."""
    both = zip(found[f"pss_{what}"], found[f"rss_{what}"], strict=True)
    return [size(pss) if known(pss) or not known(rss) else f"{size(rss)} (RSS)" for pss, rss in both]


def _ends(moment: Moment, found: pd.DataFrame, end_seconds: float) -> dict[str, list[str]]:
    """When each process was last seen alive, and whether it was seen to be gone."""
    ago = [f"{max(s, 0.0):.1f} s" if known(s) else MISSING for s in end_seconds - found["alive_seconds"]]
    ended = found["ended"].fillna(False)
    if _goes_on(moment):
        return {
            "Last seen": [text if text == MISSING else f"{text} ago" for text in ago],
            "State": ["ended" if gone else "alive" for gone in ended],
        }
    return {"Last seen before the end": ago, "Exit seen": ["yes" if gone else "no" for gone in ended]}


def _goes_on(moment: Moment) -> bool:
    if moment.verdict is None:  # not drawn up yet
        return moment.manifest.get("end_time_ns") is None
    return moment.verdict.status == "running"


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
