"""Findings that only repeat what another finding says of the same cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collector.diagnosis.findings import Finding
from collector.diagnosis.witnesses import CONFIRMED

#: Host memory that goes with each tensor kept on a device: its objects, its place in the graph, and the freed heap
#: around them that nothing fits into. Measured: 1 KiB where nothing else is allocated, 14 to 18 KiB in a training.
_HOST_BYTES_PER_TENSOR = 32 * 1024


def without_consequences(findings: list[Finding]) -> list[Finding]:
    """Return the findings without those that follow from another one.

    The pinned cache is host memory of its process: no leak of the heap besides. So is what goes with tensors that
    stay on a device: that is information. A limit that was met is no forecast any more.
    """
    remaining = []
    for finding in findings:
        if finding.kind == "main-heap-leak" and _is_pinned_cache(findings, finding):
            continue
        if finding.kind == "gpu-oom-risk" and _is_met(findings, finding):
            continue
        if finding.kind == "main-heap-leak" and _goes_with_tensors(findings, finding):
            summary = f"{finding.summary} It goes with the tensors kept on the GPU: fix gpu-tensor-leak first."
            remaining.append(replace(finding, severity="info", summary=summary))
        else:
            remaining.append(finding)
    return remaining


def _is_pinned_cache(findings: list[Finding], leak: Finding) -> bool:
    caches = _of_process(findings, "pinned-cache-growth", leak)
    return any(c.rate and leak.rate and c.rate.value >= CONFIRMED * leak.rate.value for c in caches)


def _goes_with_tensors(findings: list[Finding], leak: Finding) -> bool:
    rise = next((float(each.value) for each in leak.evidence if each.name.endswith("_rise_bytes")), 0.0)
    counts = (each.value_of("allocation_rise_count") for each in _of_process(findings, "gpu-tensor-leak", leak))
    return any(count and rise <= _HOST_BYTES_PER_TENSOR * count for count in counts)


def _of_process(findings: list[Finding], kind: str, like: Finding) -> Iterator[Finding]:
    """Yield the findings of that kind in the same process."""
    place = like.locus.host, like.locus.pid
    return (each for each in findings if each.kind == kind and (each.locus.host, each.locus.pid) == place)


def _is_met(findings: list[Finding], risk: Finding) -> bool:
    """Whether the training died of this device's memory."""
    place = risk.locus.host, risk.locus.device
    deaths = (each for each in findings if each.kind == "cuda-oom" and each.severity == "critical")
    return any((each.locus.host, each.locus.device) == place for each in deaths)
