"""Findings inside the collector: their identity over runs and their public JSON form (docs/report.md).

The dataclasses are part of the Python API: `tidegauge.findings`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from tidegauge.findings import (
    SEVERITIES as SEVERITIES,
    Advice as Advice,
    AllocationSite as AllocationSite,
    Check as Check,
    Effect as Effect,
    Eta as Eta,
    Evidence as Evidence,
    Finding as Finding,
    Limit as Limit,
    Locus as Locus,
    Rate as Rate,
    Severity as Severity,
    WaitingLine as WaitingLine,
    from_json as from_json,
)
from tidegauge.kinds import KINDS as KINDS, Fault as Fault

#: Ends of names of measurements that are units.
_UNITS = ("bytes", "ratio", "seconds", "sigmas", "status")
#: Parts of a loader's name that change from commit to commit: the line that makes it, and the batch size.
_CHANGING_PART = re.compile(r".+:\d+|batch \d+")


def fact(name: str, value: float | str, window: str, *, unit: str | None = None, n: int = 1) -> Evidence:
    """Return a measurement as evidence: a single observation, if `n` is not given.

    Its unit is the end of its name, else it is a count.
    """
    if unit is None:
        suffix = name.rpartition("_")[2]
        unit = "text" if isinstance(value, str) else suffix if suffix in _UNITS else "count"
    return Evidence(name=name, value=value, unit=unit, n=n, window=window)


def measurements(n: int, window: str, seconds_digits: int = 4, /, **values: float) -> tuple[Evidence, ...]:
    """Return numbers as evidence, rounded; their units are as in `fact`."""
    return tuple(
        fact(name, round(float(value), seconds_digits if name.endswith("_seconds") else 4), window, n=n)
        for name, value in values.items()
    )


def advise(*, text: str, expected: str, effect: Effect = "safe") -> tuple[Advice, ...]:
    """Return a single piece of advice, in the form in which a finding has it."""
    return (Advice(text=text, expected=expected, effect=effect),)


def cannot_tell(
    summary: str,
    *evidence: Evidence,
    locus: Locus | None = None,
    advice: tuple[Advice, ...] = (),
    confidence: float = 1.0,
) -> Finding:
    """Return the finding that something is not known, as information."""
    return Finding(
        kind="cannot-tell",
        severity="info",
        confidence=confidence,
        summary=summary,
        locus=locus or Locus(),
        evidence=evidence,
        advice=advice,
    )


def extended(
    finding: Finding, sentence: str, *evidence: Evidence, advice: tuple[Advice, ...] = (), **changes: Any
) -> Finding:
    """Return a finding with a further sentence, if any, further evidence, and advice that comes before its own."""
    return dataclasses.replace(
        finding,
        summary=f"{finding.summary} {sentence.strip()}".rstrip(),
        evidence=(*finding.evidence, *evidence),
        advice=(*advice, *finding.advice),
        **changes,
    )


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """The identity of a finding over runs of one command: its kind, and its place in words that no run changes."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.place}" if self.place else self.kind


def identity(finding: Finding) -> Identity:
    """Return the identity of a finding: no pid, host, rank, worker number, line or figure is in it."""
    where = finding.locus
    loader = _stable_loader(where)
    roles = {"main": "training process", "worker": "workers", "other": "another process"}
    role = roles.get(where.role or "", where.role)
    if where.worker is not None and where.worker >= 0:
        role = "workers"
    parts = [
        f"{role} of {loader}" if role and loader else role or loader,
        f"stage {where.stage}" if where.stage is not None else None,
        f"GPU {where.device}" if where.device is not None else None,
    ]
    return Identity(finding.kind, ", ".join(part for part in parts if part))


def _stable_loader(where: Locus) -> str | None:
    """Return the variable of a loader, else its dataset, else its number: lines and batch sizes change."""
    if where.loader is None:
        return None
    parts = (where.loader_name or "").split(", ")
    names = [part for part in parts if part and not _CHANGING_PART.fullmatch(part)]
    return names[0] if names else f"loader {where.loader}"


def as_json(finding: Finding) -> dict[str, Any]:
    """Return the public JSON form: locus without the fields that do not apply, NaN as null."""
    body = dataclasses.asdict(finding)
    body["locus"] = {key: value for key, value in body["locus"].items() if value is not None}
    for name in ("known", "limited_by", "waits_in", "fault", "consequence_of"):
        if not body[name]:
            del body[name]
    return finite(body)  # type: ignore[no-any-return]


def finite(value: Any) -> Any:
    """Return the value made fit for JSON: NaN and infinity become None, tuples lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
