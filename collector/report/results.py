"""The result of a run that has ended: the few figures and findings that lists and histories of runs show.

It is made once, with the verdict, and stored with the run (in the shared store for all nodes), so that a page of
hundreds of runs opens no lake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from collector.findings import Identity, finite, identity
from collector.report import wording
from collector.store import RESULT, Run, change_document
from collector.units import counted, is_known, number, size

if TYPE_CHECKING:
    from collector.diagnosis import Machine, RunTables, Verdict

SCHEMA = 1
#: Points of the small curve of memory.
_CURVE_POINTS = 40
_GIB = 2**30
#: Fields that are one number each.
RESULT_FIGURES = (
    "steps",
    "duration_seconds",
    "throughput",
    "data_wait_ratio",
    "host_peak_bytes",
    "device_peak_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFinding:
    """A finding in a result: `place` is that of its identity, `stake` the figure that says how much it matters.

    `known` is the reason for which it is accepted today. It is no part of the stored result.
    """

    kind: str
    place: str
    severity: str
    limited_by: str | None = None
    stake: str = ""
    known: str | None = None

    @property
    def is_urgent(self) -> bool:
        """True if it needs attention."""
        return self.severity != "info" and self.known is None

    @property
    def identity(self) -> Identity:
        """The identity over runs."""
        return Identity(self.kind, self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run; a figure that is not known is None.

    Attributes:
        throughput: samples per second, else batches or steps per second: `throughput_unit`.
        host_peak_bytes: highest PSS of the training's processes together.
        device_peak_bytes: most memory that PyTorch's allocator reserved on a device.
        memory_bytes: small curve of that PSS over the run.
        machine: in words; runs on machines of another size are not compared.
        findings: the gravest first.
    """

    status: str
    steps: float | None = None
    duration_seconds: float | None = None
    throughput: float | None = None
    throughput_unit: str = ""
    data_wait_ratio: float | None = None
    host_peak_bytes: float | None = None
    device_peak_bytes: float | None = None
    memory_bytes: tuple[float, ...] = ()
    machine: str = ""
    findings: tuple[ResultFinding, ...] = ()


def result_of(tables: RunTables, verdict: Verdict) -> Result:
    """Return the result of a run. Pure."""
    from collector.diagnosis import machine_of, memory_curve  # lists of runs do without

    rates, peak = verdict.summary["throughput"], verdict.summary["peak"]
    pace = [
        (rates["samples_per_second"], "samples/second"),
        (rates["batches_per_second"], "batches/second"),
        (rates["steps_per_second"], "steps/second"),
    ]
    throughput, unit = next(((value, unit) for value, unit in pace if is_known(value)), (None, ""))
    return Result(
        status=verdict.status,
        steps=verdict.steps,
        duration_seconds=verdict.duration_seconds,
        throughput=throughput,
        throughput_unit=unit,
        data_wait_ratio=verdict.summary["data_wait_ratio"],
        host_peak_bytes=peak["run_pss_bytes"],
        device_peak_bytes=peak["device_reserved_bytes"],
        memory_bytes=tuple(memory_curve(tables, _CURVE_POINTS)),
        machine=machine_words(machine_of(tables)),
        findings=tuple(
            ResultFinding(
                kind=finding.kind,
                place=identity(finding).place,
                severity=finding.severity,
                limited_by=finding.limited_by,
                stake=wording.stake(finding),
            )
            for finding in verdict.findings
            if not finding.is_healthy
        ),
    )


def machine_words(machine: Machine) -> str:
    """Return the size of a machine in words: `8 cores, 31 GiB, 2 GPUs of 80 GiB`; empty if it is not known."""
    parts = []
    if machine["hosts"] > 1:
        parts.append(f"{machine['hosts']} hosts")
    if machine["cores"] is not None:
        parts.append(f"{number(machine['cores'])} cores")
    if machine["memory_bytes"] is not None:
        # The kernel keeps a little of the memory for itself, which differs from boot to boot.
        rounded_bytes = round(machine["memory_bytes"] / _GIB) * _GIB
        parts.append(size(rounded_bytes or machine["memory_bytes"]))
    if gpus := machine["gpus_bytes"]:
        parts.append(f"{counted(len(gpus), 'GPU')} of {size(gpus[0])}")
    return ", ".join(parts)


def save_result(run: Run, result: Result) -> None:
    """Store the result of a run.

    Raises:
        TidegaugeError: it cannot be stored.
    """
    key = run.run_id if run.is_shared else None
    change_document(run.path, RESULT, lambda _: finite({"schema": SCHEMA, **asdict(result)}), key)


def result_from(body: Mapping[str, Any]) -> Result | None:
    """Return the result in a document, which any program may have written; None if it holds none."""
    if body.get("schema") != SCHEMA or not isinstance(body.get("status"), str):
        return None
    try:
        return Result(
            status=body["status"],
            **{name: body[name] if is_known(body[name]) else None for name in RESULT_FIGURES},
            throughput_unit=str(body["throughput_unit"]),
            memory_bytes=tuple(value for value in body["memory_bytes"] if is_known(value)),
            machine=str(body["machine"]),
            findings=tuple(
                ResultFinding(
                    kind=str(finding["kind"]),
                    place=str(finding["place"]),
                    severity=str(finding["severity"]),
                    limited_by=finding["limited_by"],
                    stake=str(finding["stake"]),
                )
                for finding in body["findings"]
            ),
        )
    except (LookupError, TypeError, ValueError):
        return None
