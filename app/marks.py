"""Marks on the figures over time: epochs, restarts of the job, and since when a finding holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from app.blocks import evidence_page, needs_attention
from app.figures.marks import Mark
from app.pages import POST_MORTEM, Page
from collector.diagnosis.findings import Finding
from collector.store import device_queries, loading_queries, moment_queries
from collector.store.queries import Queryable, Span
from collector.wording import since as words_since

#: More labels would leave the figure no room: of findings the gravest, of restarts the last.
MAX_FINDINGS, MAX_RESTARTS = 4, 2


def epochs(snapshot: Queryable, within: Span) -> list[Mark]:
    """Return where the epochs of the span begin."""
    begun = moment_queries.epoch_starts(snapshot, within)
    several = begun["loader"].nunique() > 1
    return [
        Mark(at_seconds=at, words=f"loader {loader} epoch {epoch}" if several else f"epoch {epoch}")
        for at, loader, epoch in begun.itertuples(index=False)
    ]


def restarts(snapshot: Queryable, within: Span, address: Callable[[Page], str]) -> list[Mark]:
    """Return when a launcher began the job again, with the address of the post-mortem."""
    begun: dict[int, int] = {}
    told = loading_queries.starts(snapshot)
    told = told[told["kind"] == "process-start"]
    for time_ns, body in zip(told["time_ns"], told["body"], strict=True):  # in order of time
        if (attempt := json.loads(body).get("attempt")) is not None:
            begun.setdefault(int(attempt), int(time_ns))
    later = sorted(begun.items())[1:]
    return [
        Mark(at_seconds=(time_ns - within.origin_ns) / 1e9, words=f"restart {number}", address=address(POST_MORTEM))
        for number, (_, time_ns) in enumerate(later, start=1)
    ][-MAX_RESTARTS:]


def since(
    findings: Sequence[Finding], snapshot: Queryable, within: Span, address: Callable[[Page], str]
) -> list[Mark]:
    """Return since when findings that need attention hold: the earliest of each kind, with its page.

    Findings about other ranks than a chosen one are left out. An out-of-memory error of CUDA has a time of its own:
    its step never ended.
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
    has_gpu = any(finding.locus.device is not None for finding in chosen)
    has_gpus = has_gpu and len(device_queries.devices(snapshot)) > 1
    at_errors = [_error_seconds(finding, snapshot, within) for finding in chosen]
    return [
        Mark(
            at_seconds=at,
            words=f"{finding.kind} {words_since(finding)}{_gpu(finding) if has_gpus else ''}",
            address=address(evidence_page(finding.kind)),
        )
        for finding, at_error, at_step in zip(chosen, at_errors, times, strict=True)
        if (at := at_step if at_error is None else at_error) is not None
    ]


def _error_seconds(finding: Finding, snapshot: Queryable, within: Span) -> float | None:
    """Return when the error of a `cuda-oom` was raised; None of other findings."""
    if finding.kind != "cuda-oom":
        return None
    errors = device_queries.cuda_errors(snapshot, within)
    of_step = errors.loc[errors["step"] == finding.since_step, "elapsed_seconds"]
    return float(of_step.iloc[-1]) if len(of_step) else None


def _gpu(finding: Finding) -> str:
    return "" if finding.locus.device is None else f" on GPU {finding.locus.device}"
