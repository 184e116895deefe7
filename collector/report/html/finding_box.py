"""A finding as HTML: a box with what to do and the measurements. All text in it is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from collector.findings import Evidence, Finding
from collector.report import wording


def finding_box(finding: Finding, *, has_summary: bool = True) -> str:
    """Return a finding as an `article` whose class is its severity; `has_summary` adds the sentence on it."""
    title = f"{finding.severity}: {escape(wording.finding_heading(finding))}"
    parts = [
        f'<article class="{finding.severity}"><h3>{title}</h3>',
        f'<p class="quiet">{escape(wording.scope_words(finding))}</p>',
    ]
    if has_summary:  # the answer of the view has that of the first one
        parts.append(f"<p>{inline(finding.summary)}</p>")
    if finding.held_by:
        lines = (
            f"<li><code>{escape(site.site)}</code> {inline(wording.site_words(site))}</li>"
            for site in finding.held_by
        )
        parts.append(f"<p>Held by</p><ul>{''.join(lines)}</ul>")
    if finding.waits_in:
        items = (f"<li>{inline(words)}</li>" for words in wording.line_words(finding.waits_in))
        parts.append(f"<p>Waits in</p><ul>{''.join(items)}</ul>")
    if finding.advice:
        items = (
            f"<li>{inline(advice.text)} — <i>{inline(advice.expected)}</i> "
            f'<span class="quiet">[{advice.effect}]</span></li>'
            for advice in finding.advice
        )
        parts.append(f"<ol>{''.join(items)}</ol>")
    if finding.eta is not None and finding.eta.mid_steps is not None:  # the heading has the time
        parts.append(f"<p>Time to the limit: {escape(wording.eta(finding.eta))}</p>")
    decisive = wording.decisive(finding)
    parts.append(_evidence_table(decisive))
    if len(decisive) < len(finding.evidence):
        everything = _evidence_table(finding.evidence)
        parts.append(f"<details><summary>All {len(finding.evidence)} measurements</summary>{everything}</details>")
    return "".join([*parts, "</article>"])


def _evidence_table(measurements: Sequence[Evidence]) -> str:
    rows = (
        f'<tr><td>{inline(name)}<td><b>{inline(value)}</b><td class="quiet">{inline(sample)}'
        for name, value, sample in wording.evidence_rows(measurements)
    )
    return f"<table>{''.join(rows)}</table>"


def inline(text: str) -> str:
    """Return a text from outside as HTML, with `code` as an element."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
