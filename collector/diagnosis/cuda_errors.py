"""The errors by which CUDA memory ran out: in which process, and where the memory of the device was then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from collector.diagnosis.device_rows import allocators, devices, record_at
from collector.diagnosis.findings import Locus
from collector.diagnosis.frames import key_of, whole
from collector.diagnosis.loops import worker_slots
from collector.diagnosis.oom_message import message_figures
from collector.diagnosis.tables import RunTables
from collector.diagnosis.victims import rank_of
from collector.store.runs import ProcessKey

#: Figures of the observer and the allocator at the moment of the error.
_AT_ERROR = ("requested_bytes", "free_bytes", "limit_bytes", "allocated_bytes", "reserved_bytes")
#: Memory of the device.
TOTAL = "device_total_bytes"
#: Figures of PyTorch's message are rounded to 0.01 GiB.
_ROUNDED_BYTES = 0.01 * (1 << 30)
#: DataLoader raises a worker's error again in the training process (torch/_utils.py, `ExceptionWrapper`).
_RAISED_AGAIN = re.compile(r"Caught \S+ in DataLoader worker process (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaError:
    """An error by which CUDA memory ran out.

    Attributes:
        key: the process that asked for memory.
        device: as that process numbers it, None if not known.
        event: the `cuda-oom` event; of a worker's error that ended the training, with what the training told of it.
        slot: (training process, loader, worker id) of a worker; the loader is None if not known.

    """

    key: ProcessKey
    device: int | None
    event: Mapping[str, Any]
    slot: tuple[ProcessKey, int | None, int] | None

    @property
    def at_ns(self) -> float:
        """When it was raised."""
        return float(self.event.get("error_time_ns") or self.event["time_ns"])

    def locus(self, tables: RunTables) -> Locus:
        """Return its place in the run."""
        if self.slot is None:
            rank = rank_of(tables, self.key)
            return Locus(host=self.key[0], rank=rank, device=self.device, role="main", pid=self.key[1])
        main, loader, worker = self.slot
        pid = self.key[1] if self.key != main else None
        return Locus(
            host=main[0],
            rank=rank_of(tables, main),
            device=self.device,
            role="worker",
            pid=pid,
            loader=loader,
            worker=worker,
        )


def cuda_errors(tables: RunTables) -> list[CudaError]:
    """Return the last error of each process and device; one that ended the training goes before caught ones."""
    slots = worker_slots(tables)
    last: dict[tuple[ProcessKey, int | None], CudaError] = {}
    for event in sorted(tables.events_of("cuda-oom"), key=lambda event: event.get("caught") is not True):
        if (key := key_of(event)) is not None:
            device = whole(event.get("device"))
            last[key, device] = CudaError(key=key, device=device, event=event, slot=slots.get(key[:2]))
    return _of_workers(list(last.values()))


def _of_workers(errors: list[CudaError]) -> list[CudaError]:
    """Return the errors with those of workers that were raised again in the training process told once."""
    raised_again = {}
    for error in errors:
        named = _RAISED_AGAIN.match(str(error.event.get("message") or ""))
        if named and error.slot is None:
            raised_again[error.key, int(named[1])] = error
    found = [error for error in errors if error not in raised_again.values()]
    for (main, worker), again in raised_again.items():
        told = {name: again.event[name] for name in ("caught", "type", "message") if name in again.event}
        origin = next((e for e in found if e.slot and (e.slot[0], e.slot[2]) == (main, worker)), None)
        if origin is None:
            found.append(replace(again, slot=(main, None, worker)))
        else:
            found[found.index(origin)] = replace(origin, event={**origin.event, **told})
    return found


def figures_at(tables: RunTables, error: CudaError) -> dict[str, float]:
    """Return the bytes that were known at the moment of an error.

    Returns:
        those of the observer, else of the message, which are rounded: requested, free, limit, allocated, reserved,
        each with `_bytes`; `TOTAL`; and where the memory was that this process's PyTorch did not have. What is not
        known is not there.

    """
    event, said = error.event, message_figures(str(error.event.get("message") or ""))
    figures = {name: float(event[name]) for name in _AT_ERROR if whole(event.get(name)) is not None}
    figures = {name: said[name] for name in ("requested_bytes", "free_bytes") if name in said} | figures
    limits = [said[name] for name in ("allowed_bytes", "total_bytes") if name in said]
    if limits:
        figures.setdefault("limit_bytes", min(limits))
    if "allocated_bytes" not in figures and "allocated_bytes" in said:
        figures["allocated_bytes"] = said["allocated_bytes"]
        if "unallocated_bytes" in said:
            figures["reserved_bytes"] = said["allocated_bytes"] + said["unallocated_bytes"]
    sample: Mapping[str, float | None] = {}
    for host, number, samples, _ in devices(tables):
        if (host, number) == (error.key[0], error.device):
            sample = record_at(samples, error.at_ns)
    total = sample.get("total_bytes") or said.get("total_bytes")
    if total is None:
        return figures
    figures[TOTAL] = total
    return figures | _elsewhere(tables, error, figures, sample, said.get("process_used_bytes"))


def _elsewhere(
    tables: RunTables,
    error: CudaError,
    figures: Mapping[str, float],
    sample: Mapping[str, float | None],
    process_used: float | None,
) -> dict[str, float]:
    """Return where the memory was that this process's PyTorch did not have; what is not known is not there.

    All that was in use is the device's total less what was free at the error. Of that, the message says what this
    process had, and the driver's last sample what processes of others hold: no step of this one changes that. The
    rest is that of the run's other processes, if it has any on this device.
    """
    reserved, free = figures.get("reserved_bytes"), figures.get("free_bytes")
    if reserved is None or free is None:
        return {}
    outside = figures[TOTAL] - free - reserved - (sample.get("reserved_bytes") or 0.0)
    others, is_alone = sample.get("other_used_bytes"), _is_alone(tables, error)
    if process_used is None:
        if others is None:
            return {"unattributed_bytes": max(0.0, outside)}
        rest = max(0.0, outside - others)
        return {"outside_pytorch_bytes" if is_alone else "rest_of_run_bytes": rest, "other_processes_bytes": others}
    found = {"outside_pytorch_bytes": max(0.0, process_used - reserved)}
    not_mine = max(0.0, outside - (process_used - reserved))
    not_mine = not_mine if not_mine > 2 * _ROUNDED_BYTES else 0.0
    if is_alone:
        return found | {"other_processes_bytes": not_mine}
    if others is None:
        return found | {"unattributed_bytes": not_mine}
    return found | {"run_processes_bytes": max(0.0, not_mine - others), "other_processes_bytes": others}


def _is_alone(tables: RunTables, error: CudaError) -> bool:
    """Whether no other process of the run is known to use the device."""
    users = {one.key for one in allocators(tables.stream("device_memory")) if one.device == error.device}
    return error.slot is None and users <= {error.key}
