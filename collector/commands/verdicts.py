"""A run's verdict: judged, kept, and shown as a card or as JSON."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collector.errors import one_line
from training_harness.layout import home_path

if TYPE_CHECKING:
    from collector.diagnosis.verdict import Verdict
    from collector.store.runs import Run


def judge(run: Run) -> Verdict:
    """The verdict on a run; kept for `tidegauge runs` if the run has ended and all of it could be read."""
    from collector.diagnosis.tables import load_tables
    from collector.diagnosis.verdict import diagnose
    from collector.listing import keep_report

    tables = load_tables(run)
    for problem in tables.problems[:5]:
        click.echo(f"tidegauge: {one_line(problem)}", err=True)
    verdict = diagnose(tables)
    if verdict.status != "running" and not tables.problems and not run.is_shared:  # other nodes may go on
        keep_report(run, as_report(run, verdict))
    return verdict


def as_report(run: Run, verdict: Verdict) -> dict[str, Any]:
    """The report in the form of the JSON."""
    from collector.report import report

    return report(verdict, run_id=run.run_id, name=run.manifest["name"])


def show_card(run: Run, verdict: Verdict, *, home: Path, to_stderr: bool) -> None:
    """Print the card."""
    from collector.terminal import Terminal

    Terminal(stderr=to_stderr, highlight=False).print(_card(run, verdict, home))


def card_text(run: Run, verdict: Verdict, *, home: Path) -> str:
    """The card as plain text of 80 columns."""
    from collector.terminal import Terminal

    stream = io.StringIO()
    Terminal(file=stream, width=80, highlight=False).print(_card(run, verdict, home))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def _card(run: Run, verdict: Verdict, home: Path) -> Any:
    from collector.report import card, dashboard_command

    return card(
        verdict, run_id=run.run_id, name=run.manifest["name"], dashboard=dashboard_command(home, home_path())
    )
