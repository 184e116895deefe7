"""Ranks that dumps of PyTorch's Flight Recorder name, with the stacks of a hang or without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from collector.diagnosis.hangs import catalogue
from collector.diagnosis.hangs.stuck_process import Process
from collector.diagnosis.run.columns import ITERATIONS, floats
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.processes import last_step, rank_of, sentence
from collector.diagnosis.run.tables import RunTables
from collector.findings import SEVERITIES, Evidence, Finding, Locus, Severity, extended, fact
from collector.flight_recorder import Standstill, find_standstills, from_event, ranks_words
from collector.store import ProcessKey
from collector.units import duration

#: Times the budget that a process is given whose long phase may simply be long: it computes, sleeps, or waits for
#: the disk, the network or another program.
LONG_PATIENCE = 4.0
#: Confidence in a rank that dumps of the Flight Recorder name, and in a process of which they tell otherwise.
_RECORDED_CONFIDENCE, _DOUBTED_CONFIDENCE = 0.98, 0.5
#: Training process that is silent -> since when, how long its pace explains, and its longest pause before.
Silent: TypeAlias = Mapping[ProcessKey, Mapping[str, Any]]


def recorded_standstill(tables: RunTables, since_ns: float) -> Standstill | None:
    """Return the first collective that ranks have not entered, by the Flight Recorder's dumps since that time."""
    dumps = {
        dump.rank: dump
        for event in tables.events_of("flight-recorder")
        if (dump := from_event(event)) and dump.written_ns > since_ns
    }
    return next(iter(find_standstills([*dumps.values()])), None)


def without_progress(process: Process, standstill: Standstill) -> Process:
    """Return a training process without the files that it read or wrote, if its rank is missing in a collective.

    Another thread of it may write them. Data from the network may be what the rank waits for.
    """
    if process.locus.role != "main" or process.locus.rank not in standstill.missing:
        return process
    return replace(process, moved_seconds_ago=None)


def compared(found: Sequence[tuple[Process, Finding]], standstill: Standstill) -> list[Finding]:
    """Return the findings of stacks, besides the dumps, without those of ranks that only wait for a missing one."""
    return [
        with_standstill(finding, standstill, agrees=standstill.may_be_due_to(finding.locus.rank))
        for culprit, finding in found
        if not (standstill.missing and _waits_in(culprit, standstill))
    ]


def with_standstill(finding: Finding, standstill: Standstill, *, agrees: bool = True) -> Finding:
    """Return a finding with what the Flight Recorder tells; it is in doubt if that is of another process."""
    return extended(
        finding,
        f"{'' if agrees else 'But '}PyTorch's Flight Recorder: {standstill.words}.",
        *_recorder_evidence(standstill),
        confidence=finding.confidence if agrees else min(finding.confidence, _DOUBTED_CONFIDENCE),
    )


def _waits_in(process: Process, standstill: Standstill) -> bool:
    """Return whether a training process waits in a collective by the dumps, and its stack fits that."""
    rank = process.locus.rank
    if rank not in standstill.waiting or process.locus.role == "worker" or process.is_suspended:
        return False
    place = standstill.entered[rank].place
    frames = process.main.frames if process.main else ()
    is_at_its_line = place is not None and any(frame[1:] == place[1:] for frame in frames)
    return process.is_in_collective or process.is_busy or is_at_its_line


def of_rank(life: Lifecycle, standstill: Standstill, silent: Silent, waiting: Sequence[Finding]) -> Finding:
    """Return the finding on a rank that others wait for; its severity is that of their own findings."""
    main, silence = max(silent.items(), key=lambda item: item[1]["silent_seconds"])
    seconds = silence["lasted_seconds"]
    is_plain = silence["silent_seconds"] >= LONG_PATIENCE * silence["budget_seconds"]
    severities = [finding.severity for finding in waiting] or ["critical" if is_plain else "info"]
    return _missing_rank(
        life,
        standstill,
        fact("silent_seconds", round(seconds, 1), "since the last step or batch of a waiting rank"),
        severity=min(severities, key=SEVERITIES.index),
        since_step=last_step(life.tables, main),
        since=f"no step or batch for {duration(seconds)}",
    )


def timed_out(life: Lifecycle) -> list[Finding]:
    """Find the rank for which a collective waited in vain until its timeout ended the training."""
    if life.status() not in ("failed", "killed"):
        return []
    times = [times[-1] for name in ITERATIONS if len(times := floats(life.tables.stream(name), "time_ns"))]
    standstill = recorded_standstill(life.tables, max(times, default=0.0))
    if standstill is None or not standstill.missing:
        return []
    expired = [one for one in standstill.entered.values() if one.has_timed_out]
    if not expired:
        return []
    timeout_seconds = expired[0].timeout_seconds or 0.0
    steps = [step for key in life.mains if (step := last_step(life.tables, key)) is not None]
    return [
        _missing_rank(
            life,
            standstill,
            fact("timeout_seconds", timeout_seconds, "timeout of the collective"),
            severity="critical",
            since_step=max(steps, default=None),
            since=f"it timed out after {duration(timeout_seconds)}",
        )
    ]


def _missing_rank(
    life: Lifecycle,
    standstill: Standstill,
    measured: Evidence,
    *,
    severity: Severity,
    since_step: int | None,
    since: str,
) -> Finding:
    rank, last = next(iter(standstill.missing.items()))
    key = next((key for key in life.mains if rank_of(life.tables, key) == rank), None)
    return catalogue.HANG_OF_RANK.finding(
        locus=Locus(rank=rank, role="main") if key is None else life.locus(key),
        since_step=since_step,
        evidence=(measured, *_recorder_evidence(standstill)),
        severity=severity,
        confidence=_RECORDED_CONFIDENCE,
        what=sentence(standstill.words),
        since=since,
        rank=rank,
        last=last.words if last else "it has joined the group",
    )


def _recorder_evidence(standstill: Standstill) -> list[Evidence]:
    """Return the collective, its line, the missing ranks, and the last collective of the first of them."""
    ranks = {*standstill.entered, *standstill.missing}
    called = next((one for one in standstill.entered.values() if one.place is not None), None)
    last = next(iter(standstill.missing.values()), None)
    values = {
        "collective": standstill.name,
        "missing_ranks": ", ".join(map(str, standstill.missing)),
        "called_in": called.at.strip(" ()") if called else "",
        "last_collective": last.words if last else "",
    }
    window = f"Flight Recorder of {ranks_words(ranks)}"
    return [fact(name, value, window, n=len(ranks)) for name, value in values.items() if value]
