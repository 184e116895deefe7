"""The verdict on a run as a card for a notebook, with the words of the terminal's card."""

from __future__ import annotations

from html import escape

from collector.diagnosis import Verdict
from collector.report import wording
from collector.report.card import calm_words, figures, headline
from collector.report.html.finding_box import finding_box, inline
from collector.report.html.frame import card, table


def verdict_card(verdict: Verdict, *, run_id: str, name: str) -> str:
    """Return the verdict on a run: its state, the findings with what to do, and the figures of the whole run."""
    urgent = [finding for finding in verdict.findings if finding.severity != "info"]
    others = [finding for finding in verdict.findings if finding.severity == "info" and not finding.is_healthy]
    ending = wording.exit_record(verdict.ending.record) if verdict.ending is not None else []
    return card(
        f"<p><b>{escape(name)}</b> · {escape(headline(verdict).plain)}</p>",
        table(ending),
        "" if urgent else f"<p><b>{inline(calm_words(verdict))}</b></p>",
        *map(finding_box, urgent),
        *(
            _fold(f"{finding.severity}: {wording.finding_heading(finding)}", finding_box(finding))
            for finding in wording.grouped(others)
        ),
        table(figures(verdict)),
        *(f'<p class="quiet">{inline(words)}</p>' for words in wording.check_words(verdict.checks) if words),
        f'<p class="quiet">run <code>{escape(run_id)}</code></p>',
    )


def _fold(label: str, content: str) -> str:
    return f"<details><summary>{escape(label)}</summary>{content}</details>"
