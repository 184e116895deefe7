"""The card of a run as a piece of HTML, for a notebook: it brings its style, and loads nothing.

Colours are those of the page around it, with accents that can be read on a light and on a dark one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from collector.diagnosis import Verdict
from collector.findings import Finding
from collector.report import wording
from collector.report.card import calm_words, figures, headline
from collector.report.html.finding_box import finding_box, inline

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


def verdict_card(verdict: Verdict, *, run_id: str, name: str) -> str:
    """Return the verdict on a run: its state, the findings with what to do, and the figures of the whole run."""
    urgent = [finding for finding in verdict.findings if finding.severity != "info"]
    rest = [finding for finding in verdict.findings if finding.severity == "info" and not finding.is_healthy]
    ending = wording.exit_record(verdict.ending.record) if verdict.ending is not None else []
    return _card(
        f"<p><b>{escape(name)}</b> · {escape(headline(verdict).plain)}</p>",
        table(ending),
        "" if urgent else f"<p><b>{inline(calm_words(verdict))}</b></p>",
        *map(finding_box, urgent),
        *(
            _fold(f"{finding.severity}: {wording.finding_heading(finding)}", finding_box(finding))
            for finding in rest
        ),
        table(figures(verdict)),
        *(f'<p class="quiet">{inline(words)}</p>' for words in wording.check_words(verdict.checks) if words),
        f'<p class="quiet">run <code>{escape(run_id)}</code></p>',
    )


def live_card(
    *,
    run_id: str,
    name: str,
    state: str,
    values: Iterable[tuple[str, str]],
    findings: Sequence[Finding] | None,
    judged: str,
) -> str:
    """Return the card of a run that goes on.

    Args:
        run_id: id of the run.
        name: name of the run.
        state: words on how far it is.
        values: label and value of what is known of it now.
        findings: those of the last verdict; None before the first.
        judged: words on when that was.
    """
    urgent = [finding for finding in findings or () if finding.severity != "info"]
    calm = "" if urgent or findings is None else "<p><b>No warnings so far.</b></p>"
    return _card(
        f"<p><b>{escape(name)}</b> · {escape(state)}</p>",
        table(values),
        calm,
        *map(finding_box, urgent),
        f'<p class="quiet">{escape(judged)} · run <code>{escape(run_id)}</code></p>',
    )


def table(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table of labels and values; empty without any."""
    rows = "".join(
        f'<tr><td class="quiet">{escape(label)}</td><td>{inline(value)}</td></tr>' for label, value in pairs
    )
    return f"<table>{rows}</table>" if rows else ""


def _fold(label: str, content: str) -> str:
    return f"<details><summary>{escape(label)}</summary>{content}</details>"


def _card(*parts: str) -> str:
    return f'<div class="tidegauge"><style>{_STYLE}</style>{"".join(parts)}</div>'
