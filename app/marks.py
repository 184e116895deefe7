"""What is marked on the figures over time: where epochs begin, and since when a finding holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.blocks import evidence_page, needs_attention
from app.figures.marks import Mark
from app.pages import Page
from collector.diagnosis.findings import Finding
from collector.store import moment_queries
from collector.store.queries import Queryable, Span

#: More labels would hide the figure.
MAX_FINDINGS = 4


def epochs(snapshot: Queryable, within: Span) -> list[Mark]:
    """Where the epochs of the span begin."""
    begun = moment_queries.epoch_starts(snapshot, within)
    several = begun["loader"].nunique() > 1
    return [
        Mark(at_seconds=at, words=f"loader {loader} epoch {epoch}" if several else f"epoch {epoch}")
        for at, loader, epoch in begun.itertuples(index=False)
    ]


def since(
    findings: Sequence[Finding], snapshot: Queryable, within: Span, address: Callable[[Page], str]
) -> list[Mark]:
    """Since when what needs attention goes on: the earliest of each kind, with the way to its evidence.

    Of a chosen rank, what is of another one is left out.
    """
    first: dict[str, Finding] = {}
    for finding in needs_attention(findings):
        step = finding.since_step
        elsewhere = None not in (within.rank, finding.locus.rank) and within.rank != finding.locus.rank
        if step is not None and not elsewhere and step <= (first.get(finding.kind, finding).since_step or 0):
            first[finding.kind] = finding
    chosen = list(first.values())[:MAX_FINDINGS]
    steps = [finding.since_step for finding in chosen if finding.since_step is not None]
    times = moment_queries.steps_elapsed(snapshot, within, steps) if steps else []
    return [
        Mark(
            at_seconds=at,
            words=f"{finding.kind} since step {finding.since_step:,}",
            address=address(evidence_page(finding.kind)),
        )
        for finding, at in zip(chosen, times, strict=True)
        if at is not None
    ]
