"""A judged budget as a table, as text below it, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from collector.budget.judgement import Judgement
from collector.findings import Finding, as_json as finding_json, finite
from collector.report import labels, wording
from collector.report.terminal import markdown_text, plain_table
from collector.units import quantity

SCHEMA = 1
_MARKS = {"within": "✔ within", "beyond": "✖ beyond", "not judged": "? not judged"}


def table(judgements: Iterable[Judgement]) -> Table:
    """Draw one row per measure; its result is a word, not the mark alone."""
    rows = plain_table()
    for head in ("", "budget", "measured", "result"):
        rows.add_column(head, no_wrap=head != "measured", overflow="fold")
    for each in judgements:
        limit = f"{'at least' if each.measure.is_floor else 'at most'} {each.limit_words}"
        rows.add_row(each.measure.title, limit, each.measured_words, _MARKS[each.status])
    return rows


def details(judgement: Judgement) -> list[str]:
    """Return the sentence of a judgement, then what explains it: the finding and its measurements, a line each."""
    finding = judgement.figure.finding
    if judgement.status != "beyond" or finding is None:
        return [judgement.sentence]
    advice = [f"Do: {each.text.removesuffix('.')}. Expected: {each.expected}" for each in finding.advice[:1]]
    return [judgement.sentence, f"{wording.title(finding)}: {finding.summary}", *advice, *_evidence(finding)]


def all_details(judgements: Iterable[Judgement]) -> Iterator[list[str]]:
    """Yield the details of each judgement that is not `within`; a finding that explains several is shown once."""
    shown: list[Finding] = []
    for each in judgements:
        lines, finding = details(each), each.figure.finding
        if finding is not None and finding in shown:
            lines[1:] = [f"{wording.title(finding)}: as above"]
        elif finding is not None and len(lines) > 1:
            shown.append(finding)
        if each.status != "within":
            yield lines


def markdown_details(judgements: Iterable[Judgement]) -> str:
    """Return the judgements that are not `within` as Markdown: a sentence each, and a list of what explains it."""
    parts = []
    for lines in all_details(judgements):
        sentence, *rest = map(markdown_text, lines)
        parts.append("\n".join([f"**{sentence}**", "", *(f"- {line}" for line in rest)]).rstrip())
    return "\n\n".join(parts)


def as_json(run_id: str, baseline: str | None, judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Return the public JSON form (docs/ci.md); an unknown value is null."""
    is_beyond = any(each.status == "beyond" for each in judgements)
    body = {
        "schema": SCHEMA,
        "run_id": run_id,
        "baseline": baseline,
        "status": "beyond" if is_beyond else "within",
        "measures": [
            {
                "name": each.measure.name,
                "unit": each.measure.unit,
                "limit": each.limit,
                "value": each.figure.value,
                "low": each.figure.low,
                "high": each.figure.high,
                "n": each.figure.n,
                "status": each.status,
                "reason": each.reason or None,
                "text": details(each),
                "finding": None if each.figure.finding is None else finding_json(each.figure.finding),
            }
            for each in judgements
        ],
    }
    return finite(body)  # type: ignore[no-any-return]


def _evidence(finding: Finding) -> list[str]:
    return [
        f"{labels.label(item.name)}: {quantity(item.value, item.unit)} ({wording.observed(item)})"
        for item in wording.decisive(finding)
    ]
