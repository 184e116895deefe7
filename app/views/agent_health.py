"""Agent health: reasons to trust or doubt the figures of the other pages, and the cost of collecting them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pandas as pd

from app.blocks import Block, Metric, Metrics, Note, answer, workers_reporting
from app.figures import samples
from app.runtime.moment import FINDINGS, Moment, Panel, View
from app.runtime.refresh import show
from collector.store import queries
from collector.units import MISSING, counted, number, percent, quantity, size

NOTHING = "Yes. No records lost; every process reports."
#: Events that report a part of Tidegauge that failed.
FAILURES = ("collector-problem", "hook-disabled", "records-lost")
MAX_EVENTS = 50
#: Events of a collector: its start, its end and the failures that it reports.
_COLLECTOR_EVENTS = ("collector-start", "collector-stop", "collector-problem")
NO_LAG = "none"
DOCTOR = "tidegauge doctor"


def _key_figures(moment: Moment) -> Iterator[Block]:
    """Show the figures of the worst host's collector, and how many workers report."""
    table = queries.agent_summary(moment.snapshot, moment.span)
    if table.empty:
        yield Note(
            "No collector was running in this window, so processes and host were not sampled. Steps and batches "
            "are in the journals. Follow the run, or store what the journals hold:",
            command=f"tidegauge collect {moment.run_id}",
        )
        return
    n = f"over {counted(table['n'].sum(), 'sample')}"
    slowest = table.iloc[int(table["interval_p95_ms"].fillna(-1).to_numpy().argmax())]
    p50_p95 = f"{quantity(slowest['interval_ms'], 'ms')} / {quantity(slowest['interval_p95_ms'], 'ms')}"
    yield Metrics(
        items=[
            workers_reporting(moment.verdict, has_loader=moment.has_loader),
            Metric("Interval p50 / p95", p50_p95, f"Achieved between two samples, {n}"),
            Metric(
                "Lag",
                _lag(table, _finished_hosts(moment)),
                "Age of the oldest record that is not in the lake yet, at the newest sample. The dashboard shows "
                "these records too. None once the run has ended and all is stored",
            ),
            Metric("Records lost", number(table["lost_count"].max()), "Records that could not be written"),
            Metric(
                "Collector CPU",
                percent(table["cpu_ratio"].max()),
                f"Share of one core; reading smaps takes {percent(slowest['smaps_ratio'])}, {n}",
            ),
            Metric(
                "Collector memory",
                size(table["private_peak_bytes"].max()),
                "Peak of its private dirty memory: what the machine gets back when it ends",
            ),
        ]
    )


def _timing(moment: Moment) -> Iterator[Block]:
    lines = queries.collector_lines(moment.snapshot, moment.span)
    if not lines["interval"].points.empty:
        yield samples.collector_timing(lines, moment.theme)


def _collector_memory(moment: Moment) -> Iterator[Block]:
    lines = queries.collector_memory(moment.snapshot, moment.span)
    if not lines.points.empty:
        yield samples.collector_memory(lines, moment.theme)


def _hosts(moment: Moment) -> Iterator[Block]:
    table = queries.agent_summary(moment.snapshot, moment.span)
    if table.empty:
        return
    finished = _finished_hosts(moment)
    yield moment.table(
        "collectors",
        "The collector of each host.",
        {
            "Host": table["host"],
            "Samples": [number(count) for count in table["n"]],
            "Interval p50": [quantity(value, "ms") for value in table["interval_ms"]],
            "Interval p95": [quantity(value, "ms") for value in table["interval_p95_ms"]],
            "Lag": [_lag(table[table["host"] == host], finished) for host in table["host"]],
            "Records in the lake": [number(count) for count in table["ingested_count"]],
            "Records lost": [number(count) for count in table["lost_count"]],
            "CPU": [percent(ratio) for ratio in table["cpu_ratio"]],
            "Private dirty, peak": [size(value) for value in table["private_peak_bytes"]],
            "RSS, peak": [size(value) for value in table["rss_peak_bytes"]],
        },
    )


def _failures(moment: Moment) -> Iterator[Block]:
    """List the parts that failed and were switched off, newest first."""
    events = queries.events(moment.snapshot, *FAILURES)
    if events.empty:
        text = "No part of Tidegauge failed in this run. Check the machine now:"
        yield Note(text, command=DOCTOR)
        return
    shown = events.head(MAX_EVENTS)
    bodies = [json.loads(body) for body in shown["body"]]
    yield moment.table(
        "trouble",
        f"{len(events):,} events; at: since the run was made.",
        {
            "At": [quantity(seconds, "seconds") for seconds in moment.span.elapsed(shown["time_ns"])],
            "What": shown["kind"],
            "Process": [f"pid {pid} on {host}" for pid, host in zip(shown["pid"], shown["host"], strict=True)],
            "Part": [_first_value(body, "part", "hook", "stream") for body in bodies],
            "Why": [_first_value(body, "error", "reason") for body in bodies],
        },
    )
    yield Note("Check the machine now:", command=DOCTOR)


def _finished_hosts(moment: Moment) -> frozenset[str]:
    """Return the hosts whose collector has ended and stored all records.

    A collector stores the last records just before it ends, and reports every ingest that fails.
    """
    if moment.run.awaits_store:
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


VIEW = View(
    name="agent-health",
    question="Can these figures be trusted, and what do they cost?",
    answer=lambda moment: answer(moment.findings, NOTHING),
    rows=(
        (FINDINGS,),
        (Panel("Key figures", _key_figures),),
        (Panel("Timing", _timing), Panel("Own memory", _collector_memory)),
        (Panel("Hosts", _hosts),),
        (Panel("Trouble", _failures),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
