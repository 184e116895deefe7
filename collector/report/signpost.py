"""The way from a verdict into the dashboard: the page to open first, and a run in a few lines."""

from __future__ import annotations

from urllib.parse import urlencode

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from collector.diagnosis import Verdict
from collector.findings import KINDS, Finding
from collector.report import card
from collector.report.terminal import grid
from collector.units import counted, duration

_HEALTHY = ("overview", "the key figures of the run")


def gravest(verdict: Verdict) -> Finding | None:
    """Return the gravest finding that asks for action; None if there is none."""
    return next((finding for finding in verdict.findings if finding.severity != "info"), None)


def link(verdict: Verdict, run_id: str, address: str) -> tuple[str, str]:
    """Return the address of the page to open first in the dashboard at `address`, and what it shows."""
    finding = gravest(verdict)
    kind = None if finding is None else KINDS[finding.kind]
    path, shows = _HEALTHY if kind is None else (kind.pages[0], kind.shows)
    return f"{address}/{path}?{urlencode({'run': run_id})}", shows


def look_first(verdict: Verdict, run_id: str, address: str, *, command: str) -> str:
    """Return the line that says what to click first; `command` opens the dashboard where it is not served yet."""
    page, shows = link(verdict, run_id, address)
    return f"Look first: {f'{command}, then ' if command else ''}{page} ({shows})"


def short_card(verdict: Verdict, *, run_id: str, name: str, address: str) -> Group:
    """Draw a run in a few lines: its end, the gravest finding, what to do, and the page to open."""
    finding = gravest(verdict)
    how = f"{verdict.status}, {counted(verdict.steps, 'step')}, {duration(verdict.duration_seconds)}"
    lines: list[RenderableType] = [Text.assemble((name, "bold"), (f"  {how}", "dim")), _heading(verdict)]
    if finding is not None and finding.advice:
        advice = ("  Do", f"{finding.advice[0].text.removesuffix('.')}.")
        lines.append(grid(Column(style="dim", width=5, no_wrap=True), Column(overflow="fold"), rows=[advice]))
    page, _ = link(verdict, run_id, address)
    # One line, so that a terminal finds the whole address.
    lines.append(Text.assemble(("  See  ", "dim"), page, no_wrap=True, overflow="ignore"))
    return Group(*lines, Text())


def _heading(verdict: Verdict) -> Text:
    finding = gravest(verdict)
    if finding is not None:
        return Text("  ").append(card.heading(finding))
    words, has_more, _ = card.calm_words(verdict).partition(". ")  # the rest names a line of the whole card
    words += "." if has_more else ""
    return Text(f"  {words}", style="bold green" if words.startswith("✔") else "bold")
