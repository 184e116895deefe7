"""The card of a run that goes on. It imports no diagnosis, since the collector draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from collector.findings import Finding
from collector.report.html.finding_box import finding_box
from collector.report.html.frame import card, table


def live_card(
    *, run_id: str, name: str, values: Iterable[tuple[str, str]], findings: Sequence[Finding] | None, judged: str
) -> str:
    """Return the card.

    Args:
        run_id: id of the run.
        name: name of the run.
        values: label and value of what is known of it now.
        findings: those of the last verdict; None before the first.
        judged: words on the time of that verdict.
    """
    urgent = [finding for finding in findings or () if finding.severity != "info"]
    calm = "" if urgent or findings is None else "<p><b>No warnings so far.</b></p>"
    return card(
        f"<p><b>{escape(name)}</b> · running</p>",
        calm,
        *map(finding_box, urgent),
        table(values),
        f'<p class="quiet">{escape(judged)} · run <code>{escape(run_id)}</code></p>',
    )
