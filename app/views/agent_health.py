"""Agent health: whether the figures of the other pages can be trusted, and what it costs to take them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pandas as pd

from app.blocks import Block, Findings, Metric, Metrics, Note, Table, answer, workers_reporting
from app.figures import agent
from app.moment import Moment, Panel, View
from app.panel import show
from collector.diagnosis.findings import KINDS, Finding
from collector.quantities import MISSING, number, percent, quantity, size
from collector.store import line_queries, moment_queries, queries

NOTHING = "Yes: nothing was lost, and whatever should report does."
#: Events that tell of a part that failed.
TROUBLE = ("collector-problem", "hook-disabled", "records-lost")
MAX_EVENTS = 50
#: How a collector begins and ends, and what it says of a part that failed.
_LIFE = ("collector-start", "collector-stop", "collector-problem")
NO_LAG = "none"
DOCTOR = "tidegauge doctor"


def findings(moment: Moment) -> Iterator[Block]:
    """What speaks against the figures."""
    if moment.verdict is not None:
        yield Findings(findings=_doubts(moment))


def key_figures(moment: Moment) -> Iterator[Block]:
    """The worst host's collector, and who reports."""
    table = queries.agent_summary(moment.snapshot, moment.span)
    if table.empty:
        yield Note(
            text="No collector has followed this run in this window: processes and host were not sampled. Steps "
            "and batches are in the journals. This follows the run, or stores what the journals hold:",
            command=f"tidegauge collect {moment.run_id}",
        )
        return
    n = f"over {int(table['n'].sum()):,} samples"
    slowest = table.iloc[int(table["interval_p95_ms"].fillna(-1).to_numpy().argmax())]
    both = f"{quantity(slowest['interval_ms'], 'ms')} / {quantity(slowest['interval_p95_ms'], 'ms')}"
    yield Metrics(
        items=[
            workers_reporting(moment.verdict, has_loader=moment.has_loader),
            Metric(label="Interval p50 / p95", value=both, help=f"Achieved between two samples, {n}"),
            Metric(
                label="Lag",
                value=_lag(table, _done(moment)),
                help="At its newest sample, age of the oldest record that is not in the lake; none once it has "
                "ended and stored all. The dashboard shows such records all the same",
            ),
            Metric(label="Records lost", value=number(table["lost_count"].max()), help="That could not be written"),
            Metric(
                label="Collector CPU",
                value=percent(table["cpu_ratio"].max()),
                help=f"Of one core, of which {percent(slowest['smaps_ratio'])} reads smaps, {n}",
            ),
            Metric(label="Collector RSS", value=size(table["rss_bytes"].max()), help="Its newest sample"),
        ]
    )


def charts(moment: Moment) -> Iterator[Block]:
    """Interval and lag over time."""
    lines = line_queries.lines(moment.snapshot, moment.span, "agent", agent.LINES, series="host")
    if not lines["interval"].points.empty:
        yield agent.timing(lines, moment.theme, revision=moment.run_id)


def own_memory(moment: Moment) -> Iterator[Block]:
    """The collector's own memory over time."""
    lines = line_queries.lines(moment.snapshot, moment.span, "agent", {"rss": "rss_bytes"}, series="host")["rss"]
    if not lines.points.empty:
        yield agent.own_memory(lines, moment.theme, revision=moment.run_id)


def hosts(moment: Moment) -> Iterator[Block]:
    """One row per host."""
    table = queries.agent_summary(moment.snapshot, moment.span)
    if table.empty:
        return
    done = _done(moment)
    yield Table(
        frame=pd.DataFrame(
            {
                "Host": table["host"],
                "Samples": [number(count) for count in table["n"]],
                "Interval p50": [quantity(value, "ms") for value in table["interval_ms"]],
                "Interval p95": [quantity(value, "ms") for value in table["interval_p95_ms"]],
                "Lag": [_lag(table[table["host"] == host], done) for host in table["host"]],
                "Records in the lake": [number(count) for count in table["ingested_count"]],
                "Records lost": [number(count) for count in table["lost_count"]],
                "CPU": [percent(ratio) for ratio in table["cpu_ratio"]],
                "RSS, last": [size(value) for value in table["rss_bytes"]],
                "RSS, peak": [size(value) for value in table["rss_peak_bytes"]],
            }
        ),
        caption="The collector of each host.",
        download=f"{moment.run_id}-collectors",
    )


def trouble(moment: Moment) -> Iterator[Block]:
    """What failed and was taken out, newest first."""
    told = moment_queries.told(moment.snapshot, *TROUBLE)
    if told.empty:
        yield Note(
            text="No part of Tidegauge failed in this run. This looks at the machine as it is now:", command=DOCTOR
        )
        return
    bodies = [json.loads(body) for body in told["body"]]
    shown = told.head(MAX_EVENTS)
    yield Table(
        frame=pd.DataFrame(
            {
                "At": [quantity(seconds, "seconds") for seconds in moment.span.elapsed(shown["time_ns"])],
                "What": shown["kind"],
                "Process": [f"pid {pid} on {host}" for pid, host in zip(shown["pid"], shown["host"], strict=True)],
                "Part": [_first(body, "part", "hook", "stream") for body in bodies[:MAX_EVENTS]],
                "Why": [_first(body, "error", "reason") for body in bodies[:MAX_EVENTS]],
            }
        ),
        caption=f"{len(told):,} events; at: since the run was made.",
        download=f"{moment.run_id}-trouble",
    )
    yield Note(text="This looks at the machine as it is now:", command=DOCTOR)


def _done(moment: Moment) -> frozenset[str]:
    """Hosts whose collector has ended and stored all: it does so last, and tells of every ingest that fails."""
    if moment.run.is_shared and not moment.manifest.get("is_stored"):
        return frozenset()
    told = moment_queries.told(moment.snapshot, *_LIFE)
    return frozenset(str(host) for host, events in told.groupby("host") if _ended_well(events))


def _ended_well(events: pd.DataFrame) -> bool:
    """Whether a host's newest collector has stopped, and had no trouble to store; its events, newest first."""
    begins = (events["kind"] == "collector-start").to_numpy()
    newest = events.iloc[: int(begins.argmax())] if begins.any() else events
    problems = newest["body"][newest["kind"] == "collector-problem"]
    failed = any(json.loads(body).get("part") == "ingest" for body in problems)
    return bool((newest["kind"] == "collector-stop").any()) and not failed


def _lag(table: pd.DataFrame, done: frozenset[str]) -> str:
    """The longest of these hosts' collectors."""
    behind = table[~table["host"].isin(done)]
    return quantity(behind["lag_seconds"].max(), "seconds") if len(behind) else NO_LAG


def _first(body: dict[str, object], *names: str) -> str:
    return next((str(body[name]) for name in names if name in body), MISSING)


def _doubts(moment: Moment) -> list[Finding]:
    return [f for f in moment.verdict.findings if KINDS[f.kind] == "trust"] if moment.verdict else []


VIEW = View(
    name="agent-health",
    question="Can these figures be trusted, and what do they cost?",
    answer=lambda moment: answer(_doubts(moment), NOTHING),
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Key figures", build=key_figures),),
        (Panel(name="Timing", build=charts), Panel(name="Own memory", build=own_memory)),
        (Panel(name="Hosts", build=hosts),),
        (Panel(name="Trouble", build=trouble),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
