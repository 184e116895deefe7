"""The result of a diagnosis: the closed vocabulary of findings and their shape.

Everything is a frozen value. `as_json` returns the public form (docs/report.md).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
#: Side effect of an advice: none, on the memory that the training needs, or on what it computes.
Effect = Literal["safe", "changes memory", "changes results"]
#: Place of a finding's cause.
Fault = Literal["your code", "your settings", "this machine", "outside"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")

#: Group of findings -> its kinds. There are no other kinds.
_GROUPS = {
    "memory forecast": "gpu-oom-risk host-oom-risk shm-exhaustion-risk fd-exhaustion-risk",
    "memory leak": "gpu-tensor-leak gpu-non-pytorch-growth gpu-fragmentation pinned-cache-growth main-heap-leak "
    "worker-heap-leak copy-on-read-growth fd-leak shm-leak",
    "growth that is no leak": "bounded-growth",
    "data loading": "workers-too-slow slow-worker straggler-samples collate-bound copy-bound pin-bound "
    "sampler-bound worker-startup epoch-refill inline-loading shard-skew idle-workers caught-errors",
    "training": "main-thread-pause rank-straggler compute-bound",
    "death": "cuda-oom host-oom-kill worker-killed shm-bus-error crashed killed hang",
    "trust": "workers-not-reporting samples-lost cannot-tell",
}
#: Kind of finding -> its group.
KINDS = {kind: group for group, kinds in _GROUPS.items() for kind in kinds.split()}

#: Parts of a loader's name that change from commit to commit: the line that makes it, and the batch size.
_CHANGING_PART = re.compile(r".+:\d+|batch \d+")

#: A window of evidence in seconds from the start of the run, as `columns.window_text` writes it.
_WINDOW = re.compile(r"(\d+)-(\d+) s")
#: Slowdowns whose lines a series of stacks can name.
LINE_KINDS = (
    "workers-too-slow",
    "slow-worker",
    "collate-bound",
    "sampler-bound",
    "inline-loading",
    "main-thread-pause",
    "compute-bound",  # only if it is oversubscribed
)
#: Leaks whose allocating lines a process can report.
TRACEABLE_LEAKS = ("main-heap-leak", "worker-heap-leak", "gpu-tensor-leak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measurement: name, value, unit, number of observations and window."""

    name: str
    value: float | str
    unit: str
    n: int
    window: str


def measurements(n: int, window: str, seconds_digits: int = 4, /, **values: float) -> tuple[Evidence, ...]:
    """Return numbers as evidence, rounded; a name ends in its unit, or else it is a count."""
    found = []
    for name, value in values.items():
        word = name.rpartition("_")[2]
        unit = word if word in ("seconds", "bytes", "ratio", "sigmas") else "count"
        rounded = round(float(value), seconds_digits if unit == "seconds" else 4)
        found.append(Evidence(name=name, value=rounded, unit=unit, n=n, window=window))
    return tuple(found)


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
    def steps_before(self) -> int | None:
        """Steps that had ended when it began or, of a death, when its process died; None if that is unknown.

        `since_step` is the number of the step in which it began, from 0; of a death, that of the last step that
        ended. An out-of-memory error of CUDA has the step in which it was raised.
        """
        if self.since_step is None:
            return None
        return self.since_step + (KINDS[self.kind] == "death" and self.kind != "cuda-oom")

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
        return self.kind in LINE_KINDS and not self.is_healthy

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
    role = {"main": "training process", "worker": "workers"}.get(where.role or "", where.role)
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


def from_json(body: Mapping[str, Any]) -> Finding:
    """Return the finding that has this public JSON form.

    Raises:
        ValueError: this version of Tidegauge does not know it.
        TypeError: fields are missing or unknown.

    """
    parts = {"rate": Rate, "limit": Limit, "eta": Eta}
    return Finding(
        **{
            **body,
            **{name: part(**body[name]) for name, part in parts.items() if body[name] is not None},
            "locus": Locus(**body["locus"]),
            "evidence": tuple(Evidence(**evidence) for evidence in body["evidence"]),
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


def finite(value: Any) -> Any:
    """Return the value made fit for JSON: NaN and infinity become None, tuples lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
