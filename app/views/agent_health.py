"""Agent health: reasons to trust or doubt the figures of the other pages, and the cost of collecting them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pandas as pd

from app.blocks import Block, Findings, Metric, Metrics, Note, Table, answer, workers_reporting
from app.figures import samples
from app.runtime.moment import Moment, Panel, View
from app.runtime.refresh import show
from collector.findings import KINDS, Finding
from collector.store import queries
from collector.units import MISSING, number, percent, quantity, size

NOTHING = "Yes: nothing was lost, and whatever should report does."
#: Events that report a part of Tidegauge that failed.
FAILURES = ("collector-problem", "hook-disabled", "records-lost")
MAX_EVENTS = 50
#: Events of a collector: its start, its end and the failures that it reports.
_COLLECTOR_EVENTS = ("collector-start", "collector-stop", "collector-problem")
NO_LAG = "none"
DOCTOR = "tidegauge doctor"


def findings(moment: Moment) -> Iterator[Block]:
    """Show the findings that cast doubt on the figures."""
    if moment.verdict is not None:
        yield Findings(findings=_trust_findings(moment))


def key_figures(moment: Moment) -> Iterator[Block]:
    """Show the figures of the worst host's collector, and how many workers report."""
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
    p50_p95 = f"{quantity(slowest['interval_ms'], 'ms')} / {quantity(slowest['interval_p95_ms'], 'ms')}"
    yield Metrics(
        items=[
            workers_reporting(moment.verdict, has_loader=moment.has_loader),
            Metric(label="Interval p50 / p95", value=p50_p95, help=f"Achieved between two samples, {n}"),
            Metric(
                label="Lag",
                value=_lag(table, _finished_hosts(moment)),
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


def timing(moment: Moment) -> Iterator[Block]:
    """Draw interval and lag over time."""
    lines = queries.collector_lines(moment.snapshot, moment.span)
    if not lines["interval"].points.empty:
        yield samples.collector_timing(lines, moment.theme)


def collector_memory(moment: Moment) -> Iterator[Block]:
    """Draw the collector's own memory over time."""
    lines = queries.collector_lines(moment.snapshot, moment.span)["rss"]
    if not lines.points.empty:
        yield samples.collector_memory(lines, moment.theme)


def hosts(moment: Moment) -> Iterator[Block]:
    """List the collector of each host."""
    table = queries.agent_summary(moment.snapshot, moment.span)
    if table.empty:
        return
    finished = _finished_hosts(moment)
    yield Table(
        frame=pd.DataFrame(
            {
                "Host": table["host"],
                "Samples": [number(count) for count in table["n"]],
                "Interval p50": [quantity(value, "ms") for value in table["interval_ms"]],
                "Interval p95": [quantity(value, "ms") for value in table["interval_p95_ms"]],
                "Lag": [_lag(table[table["host"] == host], finished) for host in table["host"]],
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


def failures(moment: Moment) -> Iterator[Block]:
    """List the parts that failed and were switched off, newest first."""
    events = queries.events(moment.snapshot, *FAILURES)
    if events.empty:
        yield Note(
            text="No part of Tidegauge failed in this run. This looks at the machine as it is now:", command=DOCTOR
        )
        return
    bodies = [json.loads(body) for body in events["body"]]
    shown = events.head(MAX_EVENTS)
    yield Table(
        frame=pd.DataFrame(
            {
                "At": [quantity(seconds, "seconds") for seconds in moment.span.elapsed(shown["time_ns"])],
                "What": shown["kind"],
                "Process": [f"pid {pid} on {host}" for pid, host in zip(shown["pid"], shown["host"], strict=True)],
                "Part": [_first_value(body, "part", "hook", "stream") for body in bodies[:MAX_EVENTS]],
                "Why": [_first_value(body, "error", "reason") for body in bodies[:MAX_EVENTS]],
            }
        ),
        caption=f"{len(events):,} events; at: since the run was made.",
        download=f"{moment.run_id}-trouble",
    )
    yield Note(text="This looks at the machine as it is now:", command=DOCTOR)


def _finished_hosts(moment: Moment) -> frozenset[str]:
    """Return the hosts whose collector has ended and stored all records.

    A collector stores the last records just before it ends, and reports every ingest that fails.
    """
    if moment.run.is_shared and not moment.manifest.get("is_stored"):
        return frozenset()
    by_host = queries.events(moment.snapshot, *_COLLECTOR_EVENTS).groupby("host")
    return frozenset(str(host) for host, events in by_host if _ended_well(events))


def _ended_well(events: pd.DataFrame) -> bool:
    """Return True if a host's newest collector stopped and stored all; `events` are newest first."""
    begins = (events["kind"] == "collector-start").to_numpy()
    newest = events.iloc[: int(begins.argmax())] if begins.any() else events
    problems = newest["body"][newest["kind"] == "collector-problem"]
    failed = any(json.loads(body).get("part") == "ingest" for body in problems)
    return bool((newest["kind"] == "collector-stop").any()) and not failed


def _lag(table: pd.DataFrame, finished: frozenset[str]) -> str:
    """Return the longest lag of the collectors that have not finished."""
    behind = table[~table["host"].isin(finished)]
    return quantity(behind["lag_seconds"].max(), "seconds") if len(behind) else NO_LAG


def _first_value(body: dict[str, object], *names: str) -> str:
    return next((str(body[name]) for name in names if name in body), MISSING)


def _trust_findings(moment: Moment) -> list[Finding]:
    return [f for f in moment.verdict.findings if KINDS[f.kind] == "trust"] if moment.verdict else []


VIEW = View(
    name="agent-health",
    question="Can these figures be trusted, and what do they cost?",
    answer=lambda moment: answer(_trust_findings(moment), NOTHING),
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Key figures", build=key_figures),),
        (Panel(name="Timing", build=timing), Panel(name="Own memory", build=collector_memory)),
        (Panel(name="Hosts", build=hosts),),
        (Panel(name="Trouble", build=failures),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
