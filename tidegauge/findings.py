"""Findings and checks: the typed result of a diagnosis.

Everything is a frozen value. The vocabulary of kinds is closed: `tidegauge.kinds`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tidegauge.kinds import KINDS, Fault

Severity = Literal["info", "warning", "critical"]
#: Side effect of an advice: none, on the memory that the training needs, or on what it computes.
Effect = Literal["safe", "changes memory", "changes results"]
CheckStatus = Literal["fine", "finding", "not judged"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")

#: A window of evidence in seconds from the start of the run, as `columns.window_text` writes it.
_WINDOW = re.compile(r"(\d+)-(\d+) s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measurement: name, value, unit, number of observations and window."""

    name: str
    value: float | str
    unit: str
    n: int
    window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Locus:
    """The place of a finding; a field that does not apply is None.

    `role` is a word of `records.ROLES`. `loader_name` says where the loader was made, with its dataset and batch
    size. `main_pid` is the training process that owns the loader, if ranks do not distinguish processes.
    """

    host: str | None = None
    rank: int | None = None
    device: int | None = None
    role: str | None = None
    pid: int | None = None
    main_pid: int | None = None
    worker: int | None = None
    loader: int | None = None
    loader_name: str | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A growth rate with an interval from a moving block bootstrap.

    Its coverage falls below the nominal 90 % where the samples are autocorrelated beyond a block.
    """

    value: float
    low: float
    high: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limit that a growth runs into."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Eta:
    """Time until the limit is met: 5 %, 50 % and 95 % of the futures, in seconds, and in steps if there are any.

    `high` is infinite if the limit may never be met. There is no Eta if that is likelier than not.
    """

    low_seconds: float
    mid_seconds: float
    high_seconds: float
    low_steps: float | None = None
    mid_steps: float | None = None
    high_steps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One concrete action, the result to expect, and what else it changes."""

    text: str
    expected: str
    effect: Effect = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSite:
    """A line whose allocations stay, and their growth over a window.

    `site` is file:line and function of the innermost frame of the user's code; `callers` are its callers.
    `grown_bytes` is None if autograd alone holds what the line allocated: its bytes are not known line by line.
    """

    site: str
    callers: tuple[str, ...] = ()
    what: str
    grown_bytes: int | None
    grown_count: int
    window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLine:
    """A line of the user's code that the training waits for.

    `site` is file:line and function of the innermost frame of the user's code, and `callers` are its callers.
    `source` is the text of the line and `calls` the library function that it calls, None if not known. `ratio` is
    the line's share of the awaited time, by `n` samples of stacks over a window.
    """

    site: str
    source: str | None = None
    calls: str | None = None
    callers: tuple[str, ...] = ()
    ratio: float
    n: int
    window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One conclusion. A finding other than `cannot-tell` needs two independent measurements.

    `fault` says where the cause lies, None if that is not known. `consequence_of` is the kind of the finding on the
    same process that this one follows from.
    `known` is the reason for which a team accepts it; then it is information.

    Raises:
        ValueError: the kind is not in the vocabulary, or there is too little evidence.
    """

    kind: str
    severity: Severity
    confidence: float
    summary: str
    locus: Locus = Locus()
    since_step: int | None = None
    evidence: tuple[Evidence, ...] = ()
    rate: Rate | None = None
    limit: Limit | None = None
    eta: Eta | None = None
    held_by: tuple[AllocationSite, ...] = ()
    waits_in: tuple[WaitingLine, ...] = ()
    advice: tuple[Advice, ...] = ()
    limited_by: str | None = None
    fault: Fault | None = None
    consequence_of: str | None = None
    known: str | None = None

    @property
    def group(self) -> str:
        """The group that its kind is part of."""
        return KINDS[self.kind].group

    @property
    def steps_before(self) -> int | None:
        """Steps that had ended when it began or, of a death, when its process died; None if that is unknown.

        `since_step` is the number of the step in which it began, from 0; of a death, that of the last step that
        ended. An out-of-memory error of CUDA has the step in which it was raised.
        """
        if self.since_step is None:
            return None
        return self.since_step + (self.group == "death" and self.kind != "cuda-oom")

    def __post_init__(self) -> None:
        """Check the kind, the confidence and the evidence."""
        if self.kind not in KINDS:
            raise ValueError(f"unknown finding kind {self.kind!r}")
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"confidence {self.confidence!r} is outside 0..1")
        names = {evidence.name for evidence in self.evidence}
        if self.kind != "cannot-tell" and len(names) < 2:
            raise ValueError(f"{self.kind} needs two independent measurements, has {sorted(names)}")

    @property
    def is_healthy(self) -> bool:
        """True if the finding only says that something is as it should be."""
        return self.kind == "compute-bound" and self.limited_by is None

    @property
    def suspected(self) -> str:
        """The kind that a finding may be of which cannot tell: a leak, or slow loading; its own kind otherwise."""
        if self.kind != "cannot-tell":
            return self.kind
        if self.rate is None:
            return self.kind if self.locus.loader is None else "workers-too-slow"
        if self.locus.device is not None:
            return "gpu-tensor-leak"
        if self.rate.unit == "count/s":
            return "fd-leak"
        return {None: "shm-leak", "worker": "worker-heap-leak"}.get(self.locus.role, "main-heap-leak")

    @property
    def has_line(self) -> bool:
        """True if a series of stacks can name the lines behind it."""
        return KINDS[self.kind].stacks_of is not None and not self.is_healthy

    @property
    def window_seconds(self) -> tuple[float, float] | None:
        """Time that its measurements span, from the start of the run; None if they name no time."""
        spans = [match for item in self.evidence if (match := _WINDOW.fullmatch(item.window))]
        if not spans:
            return None
        begin, end = min(float(span[1]) for span in spans), max(float(span[2]) for span in spans)
        return (begin, end) if begin < end else None

    def value_of(self, evidence: str) -> float | None:
        """Return the value of the evidence of this name; None without such."""
        values = [item.value for item in self.evidence if item.name == evidence]
        return float(values[0]) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at; `reason` says why it was not judged, or only in part."""

    name: str
    status: CheckStatus
    reason: str = ""


def from_json(body: Mapping[str, Any]) -> Finding:
    """Return the finding that has this public JSON form.

    Raises:
        ValueError: this version of Tidegauge does not know it.
        TypeError: fields are missing or unknown.
    """
    parts: dict[str, Callable[..., Any]] = {"rate": Rate, "limit": Limit, "eta": _eta}
    return Finding(
        **{
            **body,
            **{name: part(**body[name]) for name, part in parts.items() if body[name] is not None},
            "locus": Locus(**body["locus"]),
            "evidence": tuple(map(_evidence, body["evidence"])),
            "held_by": tuple(
                AllocationSite(**{**holder, "callers": tuple(holder["callers"])})
                for holder in body.get("held_by", ())
            ),
            "waits_in": tuple(
                WaitingLine(**{**line, "callers": tuple(line["callers"])}) for line in body.get("waits_in", ())
            ),
            "advice": tuple(Advice(**advice) for advice in body["advice"]),
        }
    )


def _eta(**body: float | None) -> Eta:
    """Return a forecast; JSON has null for a time that may never come."""
    has_steps = body.get("mid_steps") is not None
    return Eta(
        **{  # type: ignore[arg-type]
            name: math.inf if value is None and (has_steps or name.endswith("_seconds")) else value
            for name, value in body.items()
        }
    )


def _evidence(body: Mapping[str, Any]) -> Evidence:
    return Evidence(**{**body, "value": math.nan if body["value"] is None else body["value"]})
