"""`tidegauge mcp`: a server of the Model Context Protocol, so that an assistant can read runs and verdicts.

It only reads. Texts are compact, since an assistant pays for each word (https://modelcontextprotocol.io/).
"""

from __future__ import annotations

import functools
import html
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from collector import store
from collector.commands.options import home_option
from collector.commands.report import as_report, card_text, judge, the_app
from collector.errors import TidegaugeError
from collector.findings import KINDS
from collector.units import number
from training_harness.records import NAME, STREAMS

_INSTRUCTIONS = (
    "Tidegauge watches memory and data loading of PyTorch training. Begin with `runs`, then `report` for the "
    "verdict on one; `findings` has every measurement and advice; `series` has what was recorded over time, "
    "and `charts` the figures of a page."
)
_LATEST = "latest"
_RUN_LIMIT = 200
_POINT_LIMIT = 500


@click.command()
@home_option
def mcp(home: Path) -> None:
    """Serve runs and verdicts to an assistant. It speaks MCP over stdin and stdout."""
    try:
        library: Any = importlib.import_module("mcp.server.mcpserver")
        error: type[Exception] = importlib.import_module("mcp.server.mcpserver.exceptions").ToolError
        reads_only = importlib.import_module("mcp.types").ToolAnnotations(read_only_hint=True)
    except ImportError:
        raise TidegaugeError("the server needs the package mcp: pip install 'tidegauge[mcp]'") from None
    serving = library.MCPServer("tidegauge", instructions=_INSTRUCTIONS)
    for tool in Tools(home).all():
        words = inspect.getdoc(tool)
        serving.tool(description=words, annotations=reads_only)(_reporting(tool, error))
    serving.run("stdio")


def _reporting(tool: Callable[..., str], error: type[Exception]) -> Callable[..., str]:
    """Wrap a tool so that the assistant reads what was wrong with its question."""

    @functools.wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> str:
        try:
            return tool(*args, **kwargs)
        except TidegaugeError as problem:
            raise error(str(problem)) from None

    return answer


def _chart_text(chart: Any, limit: int) -> str:
    lines = [chart.title, chart.caption]
    axes = chart.figure.layout.xaxis.title.text, chart.figure.layout.yaxis.title.text
    if any(axes):
        lines.append(f"x: {axes[0]}, y: {axes[1]}")
    for trace in chart.figure.data:
        if trace.type == "icicle":
            lines += _boxes(trace)
        elif trace.type == "heatmap":
            lines += [
                f"{trace.name}, y = {y}: {_points(trace.x, zs, limit)}"
                for y, zs in zip(trace.y, trace.z, strict=True)
            ]
        else:
            lines.append(f"{trace.name}: {_points(trace.x, trace.y, limit)}")
    return "\n".join(str(line) for line in lines if line)


def _boxes(trace: Any) -> Iterator[str]:
    """Return the boxes of a flame graph, one a line, each indented below the box that it is a part of."""
    depths = {"": -1}
    for place, parent, label, value in zip(trace.ids, trace.parents, trace.labels, trace.values, strict=True):
        depths[place] = depths[parent] + 1
        yield f"{'  ' * depths[place]}{html.unescape(label)}: {_value_text(value)}"


def _points(xs: Sequence[Any], ys: Sequence[Any], limit: int) -> str:
    """Return points as x:y; of more points than `limit`, the mean and maximum of each of `limit` parts."""
    pairs = [(_value_text(x), y) for x, y in zip(xs, ys, strict=False)]
    if len(pairs) <= limit or any(isinstance(y, str) for y in ys):
        return " ".join(f"{x}:{_value_text(y)}" for x, y in pairs)
    texts = []
    for part in range(limit):
        chosen = pairs[part * len(pairs) // limit : (part + 1) * len(pairs) // limit]
        known = [float(y) for _, y in chosen if y is not None and not math.isnan(y)]
        mean, maximum = (sum(known) / len(known), max(known)) if known else (None, None)
        texts.append(f"{chosen[0][0]}:{_value_text(mean)} (max {_value_text(maximum)})")
    return " ".join(texts)


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return number(None if value is None else float(value)).replace(",", "")


class Tools:
    """Questions that an assistant can ask about the runs of a home; it reads the docstrings.

    Every tool takes `run` as the command line does: an id, a part of one, a name, or `latest`.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    def all(self) -> tuple[Callable[..., str], ...]:
        """Return the tools."""
        return self.runs, self.report, self.findings, self.series, self.charts

    def runs(self, limit: int = 20) -> str:
        """List the newest runs: id, name, status, steps, duration in seconds, gravest finding."""
        from collector.report.listing import list_entry

        lines = []
        for found in store.list_runs(self._home)[: min(max(limit, 1), _RUN_LIMIT)]:
            entry = list_entry(found)
            steps, seconds = (entry.result.steps, entry.result.duration_seconds) if entry.result else (None, None)
            parts = (entry.run_id, entry.name, entry.status, steps, seconds, entry.gravest)
            lines.append(" | ".join("—" if part is None else str(part) for part in parts))
        return "\n".join(lines) or f"no runs in {self._home}"

    def report(self, run: str = _LATEST, verbose: bool = False) -> str:
        """Return the verdict on a run as a text: findings with their cause and advice, and the main figures."""
        found = self._find(run)
        return card_text(found, judge(found), home=self._home, verbose=verbose)

    def findings(self, run: str = _LATEST, kind: str | None = None) -> str:
        """Return the findings of a run as JSON, those of one kind or all, with every measurement and advice."""
        if kind is not None and kind not in KINDS:
            raise TidegaugeError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
        found = self._find(run)
        body = as_report(found, judge(found))["findings"]
        return json.dumps([finding for finding in body if kind in (None, finding["kind"])])

    def series(self, run: str, stream: str, column: str, points: int = 60) -> str:
        """Return a recorded column over time as CSV: seconds from the start, pid, mean, maximum.

        Where they are recorded, device and loader come after the pid.
        The time is cut into `points` parts. Streams and columns are those of docs/streams.md, such as
        `process.pss_bytes`, `host.memory_available_bytes`, `step.duration_ns`, `device_memory.allocated_bytes`.
        """
        from collector.store import queries

        if stream not in STREAMS:
            raise TidegaugeError(f"no stream {stream!r}; there are {', '.join(STREAMS)}")
        columns = [one.name for one in STREAMS[stream].columns if one.code != NAME]
        if column not in columns:
            raise TidegaugeError(f"{stream} has no column of numbers {column!r}, but {', '.join(columns)}")
        found, parts = self._find(run), min(max(points, 1), _POINT_LIMIT)
        owner = "process_pid" if "process_pid" in columns else "pid"
        keys = ", ".join(["pid", *(key for key in ("device", "loader") if key in columns)])
        select = keys.replace("pid", f"{owner} AS pid")
        with store.read(found) as snapshot:
            origin_ns = queries.origin_ns(found.manifest)
            table = snapshot.query(
                "WITH span AS (SELECT coalesce($origin, min(time_ns)) AS begin_ns, max(time_ns) AS end_ns "
                f'FROM "{stream}"), '
                f'part AS (SELECT {select}, time_ns - begin_ns AS since_ns, "{column}" AS value, '
                "least(floor((time_ns - begin_ns) * $parts / greatest(end_ns - begin_ns, 1)), $parts - 1) AS place "
                f'FROM "{stream}", span) SELECT round(min(since_ns) / 1e9, 1) AS seconds, {keys}, '
                f"avg(value) AS mean, max(value) AS maximum FROM part GROUP BY place, {keys} "
                f"ORDER BY place, {keys}",
                {"origin": origin_ns, "parts": parts},
            )
        return str(table.to_csv(index=False))

    def charts(self, page: str, run: str = _LATEST, points: int = 20) -> str:
        """Return the charts of a page of the dashboard in numbers: question, caption, axes, and points of lines.

        The pages are overview, oom-risk, leak-timeline, gpu-memory, worker-stalls, pipeline-stages, post-mortem and
        agent-health. Points are given as x:y. Where a line has more than `points`, it is cut into that number of
        parts: x of the first point, mean and maximum. A flame graph is given as its boxes, with samples.
        """
        found, limit = self._find(run), min(max(points, 1), _POINT_LIMIT)
        with the_app("app.run_charts", "charts need") as app:
            charts = app.charts_of(found, judge(found), path=page, theme="light")
        return "\n\n".join(_chart_text(chart, limit) for _, chart in charts) or f"no charts on {page}"

    def _find(self, run: str) -> store.Run:
        return store.find_run(self._home, run)
