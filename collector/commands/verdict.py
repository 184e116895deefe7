"""The verdict on a run: made, saved, and shown as a card or as JSON."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collector.errors import one_line
from training_harness.layout import home_path

if TYPE_CHECKING:
    from collector.diagnosis import Verdict
    from collector.store import Run


def judge(run: Run) -> Verdict:
    """Return the verdict on a run; save it for `tidegauge runs` if the run has ended and was read without fault."""
    from collector.diagnosis import diagnose, load_tables
    from collector.report.listing import save_report

    tables = load_tables(run)
    for problem in tables.problems[:5]:
        click.echo(f"tidegauge: {one_line(problem)}", err=True)
    verdict = diagnose(tables)
    if verdict.status != "running" and not tables.problems and not run.is_shared:  # Other nodes may go on.
        save_report(run, as_report(run, verdict))
    return verdict


def as_report(run: Run, verdict: Verdict) -> dict[str, Any]:
    """Return the report in its JSON form."""
    from collector.report.card import report

    return report(verdict, run_id=run.run_id, name=run.manifest["name"])


def show_card(run: Run, verdict: Verdict, *, home: Path, to_stderr: bool) -> None:
    """Print the card."""
    from collector.report.terminal import Terminal

    Terminal(stderr=to_stderr, highlight=False).print(_card(run, verdict, home))


def card_text(run: Run, verdict: Verdict, *, home: Path) -> str:
    """Return the card as plain text of 80 columns."""
    from collector.report.terminal import Terminal

    stream = io.StringIO()
    Terminal(file=stream, width=80, highlight=False).print(_card(run, verdict, home))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def _card(run: Run, verdict: Verdict, home: Path) -> Any:
    from collector.report.card import card, dashboard_command

    return card(
        verdict, run_id=run.run_id, name=run.manifest["name"], dashboard=dashboard_command(home, home_path())
    )
