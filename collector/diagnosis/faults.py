"""Say where the cause of a finding lies, for the kinds of which it is always the same.

Other rules know it from what they measure, and set it. Else it stays unknown.
"""

from __future__ import annotations

from dataclasses import replace

from collector.findings import Fault, Finding

_KINDS: dict[Fault, str] = {
    "your code": "main-heap-leak worker-heap-leak copy-on-read-growth gpu-tensor-leak fd-leak "
    "straggler-samples collate-bound copy-bound sampler-bound shard-skew main-thread-pause "
    "caught-errors",
    "your settings": "worker-startup epoch-refill idle-workers pin-bound gpu-fragmentation",
    "this machine": "shm-bus-error",
}
_FAULTS = {kind: fault for fault, kinds in _KINDS.items() for kind in kinds.split()}


def add_fault(finding: Finding) -> Finding:
    """Return the finding with the place of its cause, if its kind tells it and its rule has not."""
    return finding if finding.fault else replace(finding, fault=_FAULTS.get(finding.kind))
