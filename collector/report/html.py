"""Findings, and the cards of a run for a notebook, as HTML. All foreign text is escaped.

A card brings its style, and loads nothing. Its colours are those of the page around it, with accents that can be
read on a light and on a dark one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from collector.findings import Evidence, Finding
from collector.report import wording

if TYPE_CHECKING:
    from collector.diagnosis import Verdict

#: The doubled class wins over a notebook's own rules for tables and headings.
_STYLE = """
.tidegauge.tidegauge { max-width: 62rem; font: 14px/1.45 system-ui, sans-serif; color: inherit;
border: 1px solid rgba(128,128,128,.4); border-radius: 6px; padding: .6rem .9rem; margin: .25rem 0 }
.tidegauge.tidegauge p { margin: .3rem 0 } .tidegauge.tidegauge h3 { font-size: 1em; margin: .1rem 0 }
.tidegauge.tidegauge article { border: 1px solid rgba(128,128,128,.35); border-left: 4px solid #3A8FC7;
border-radius: 4px; padding: .4rem .8rem; margin: .5rem 0 }
.tidegauge.tidegauge article.critical { border-left-color: #E5484D }
.tidegauge.tidegauge article.warning { border-left-color: #D9730D }
.tidegauge.tidegauge .quiet { opacity: .72; font-size: .92em }
.tidegauge.tidegauge ol, .tidegauge.tidegauge ul { margin: .3rem 0; padding-left: 1.4rem }
.tidegauge.tidegauge table { border-collapse: collapse; border: 0; margin: .3rem 0; font-size: 1em;
display: block; overflow-x: auto }
.tidegauge.tidegauge tr { background: none } .tidegauge.tidegauge td { border: 0; text-align: left;
vertical-align: top; white-space: normal; max-width: none; padding: .1rem 1.2rem .1rem 0 }
.tidegauge.tidegauge code { background: rgba(128,128,128,.18); color: inherit; border-radius: 3px;
padding: 0 .25em; overflow-wrap: anywhere } .tidegauge.tidegauge summary { cursor: pointer }
"""


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


def live_card(
    *, run_id: str, name: str, values: Iterable[tuple[str, str]], findings: Sequence[Finding] | None, judged: str
) -> str:
    """Return the card of a run that goes on.

    Args:
        run_id: id of the run.
        name: name of the run.
        values: label and value of what is known of it now.
        findings: those of the last verdict; None before the first.
        judged: words on the time of that verdict.
    """
    urgent = [finding for finding in findings or () if finding.severity != "info"]
    calm = "" if urgent or findings is None else "<p><b>No warnings so far.</b></p>"
    return _frame(
        f"<p><b>{escape(name)}</b> · running</p>",
        calm,
        *map(finding_box, urgent),
        _table(values),
        f'<p class="quiet">{escape(judged)} · run <code>{escape(run_id)}</code></p>',
    )


def verdict_card(verdict: Verdict, *, run_id: str, name: str) -> str:
    """Return the verdict on a run: its state, the findings with what to do, and the figures of the whole run."""
    from collector.report.card import calm_words, figures, headline  # the live card does without diagnosis

    urgent = [finding for finding in verdict.findings if finding.severity != "info"]
    others = [finding for finding in verdict.findings if finding.severity == "info" and not finding.is_healthy]
    ending = wording.exit_record(verdict.ending.record) if verdict.ending is not None else []
    return _frame(
        f"<p><b>{escape(name)}</b> · {escape(headline(verdict).plain)}</p>",
        _table(ending),
        "" if urgent else f"<p><b>{inline(calm_words(verdict))}</b></p>",
        *map(finding_box, urgent),
        *(
            f"<details><summary>{finding.severity}: {escape(wording.finding_heading(finding))}</summary>"
            f"{finding_box(finding)}</details>"
            for finding in wording.grouped(others)
        ),
        _table(figures(verdict)),
        *(f'<p class="quiet">{inline(words)}</p>' for words in wording.check_words(verdict.checks) if words),
        f'<p class="quiet">run <code>{escape(run_id)}</code></p>',
    )


def _frame(*parts: str) -> str:
    """Return the parts of a card in its frame."""
    return f'<div class="tidegauge"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _table(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table of labels and values; empty without any."""
    rows = "".join(
        f'<tr><td class="quiet">{escape(label)}</td><td>{inline(value)}</td></tr>' for label, value in pairs
    )
    return f"<table>{rows}</table>" if rows else ""
