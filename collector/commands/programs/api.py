"""`tidegauge api`: answers one question of the package `tidegauge`, the Python API, and ends.

The API runs in the user's process, which may have its own packages `app` and `collector`, and may be training. So
it asks a process of Tidegauge. Tables are answered as Arrow's stream format, all else as JSON.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import click

from collector import store
from collector.commands.dashboard import DashboardServer
from collector.commands.options import home_option, say
from collector.commands.report import as_report, card_text, judge, the_app
from collector.errors import TidegaugeError
from training_harness.records import STREAMS


@click.command(hidden=True)
@click.argument("question", type=click.Choice(["find", "list", "report", "query", "charts", "dashboard"]))
@click.argument("details", default="{}")
@home_option
def api(question: str, details: str, home: Path) -> None:
    """Answer a QUESTION of the Python API (docs/python.md) on stdout; DETAILS are JSON."""
    answer = sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):  # what a library prints is no part of the answer
        wanted = json.loads(details)
        if question == "query":
            _write_rows(_find(home, wanted), wanted, answer)
            return
        if question == "dashboard":
            _serve(home, answer)
            return
        from collector.findings import finite

        body = _ANSWERS[question](home, wanted)
        answer.write(json.dumps(finite(body), allow_nan=False).encode())


def _find(home: Path, wanted: Mapping[str, Any]) -> store.Run:
    return store.find_run(home, wanted["run"])


def _describe(run: store.Run) -> dict[str, Any]:
    from collector.report.listing import as_json, list_entry

    return {**as_json(list_entry(run)), "path": str(run.path)}


def _list(home: Path, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_describe(run) for run in store.list_runs(home) if wanted["trials"] or not store.is_trial(run)]


def _report(home: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    from collector.report.html import verdict_card

    run = _find(home, wanted)
    verdict = judge(run)
    return {
        **as_report(run, verdict),
        "text": card_text(run, verdict, home=run.home, verbose=False),
        "html": verdict_card(verdict, run_id=run.run_id, name=run.name),
    }


def _charts(home: Path, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    run = _find(home, wanted)
    with the_app("app.run_charts", "charts need") as app:
        charts = app.charts_of(run, judge(run), path=wanted["page"], theme=wanted["theme"])
        return [
            {
                "page": page.path,
                "title": chart.title,
                "caption": chart.caption,
                "figure": json.loads(chart.figure.to_json()),
            }
            for page, chart in charts
        ]


_ANSWERS = {
    "find": lambda home, wanted: _describe(_find(home, wanted)),
    "list": _list,
    "report": _report,
    "charts": _charts,
}


def _write_rows(run: store.Run, wanted: Mapping[str, Any], answer: BinaryIO) -> None:
    """Write the rows of a stream, or of a query, as they come: they may be more than memory holds.

    Raises:
        TidegaugeError: there is no such stream, or the SQL is wrong.
    """
    sql, stream = wanted["sql"], wanted["stream"]
    if sql is None:
        if stream not in (*STREAMS, "event"):
            raise TidegaugeError(f"no stream {stream!r}; there are {', '.join(STREAMS)} and event")
        sql = f'SELECT * FROM "{stream}" ORDER BY time_ns'
    with store.read(run) as snapshot:
        snapshot.write_arrow(sql, wanted["params"], answer)
        for problem in snapshot.problems:
            say(problem)


def _serve(home: Path, answer: BinaryIO) -> None:
    """Serve the dashboard, write its address once it answers, and end with the input: when the caller ends."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    with DashboardServer(home, port) as server:
        server.await_ready()
        answer.write(json.dumps(server.address).encode() + b"\n")
        answer.flush()
        sys.stdin.read()
