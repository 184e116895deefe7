"""CUDA out-of-memory errors of a run, and the use of the device's memory at the moment of each."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from collector.diagnosis.loading.loaders import worker_slots
from collector.diagnosis.run.allocators import (
    Allocator,
    allocators,
    capacity_of,
    devices,
    record_at,
    without_errors,
)
from collector.diagnosis.run.columns import SECOND_NS, floats, peak, whole, written
from collector.diagnosis.run.cuda_message import ROUNDED_BYTES, message_figures, tells_out_of_memory
from collector.diagnosis.run.lifecycle import SPAWN_MODULE, lifecycle_of
from collector.diagnosis.run.processes import rank_of
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.findings import Locus
from collector.store import ProcessKey

#: Figures of the observer and the allocator at the moment of the error.
_AT_ERROR = ("requested_bytes", "free_bytes", "limit_bytes", "allocated_bytes", "reserved_bytes")
#: Memory of the device.
TOTAL = "device_total_bytes"
#: Highest use by tensors so far, where the use at the error is not known.
ALLOCATED_PEAK = "allocated_peak_bytes"
#: DataLoader raises a worker's error again in the training process (torch/_utils.py, `ExceptionWrapper`).
_RAISED_AGAIN = re.compile(r"Caught \S+ in DataLoader worker process (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaError:
    """A CUDA out-of-memory error.

    Attributes:
        key: the process that requested memory.
        device: its number in that process, None if not known.
        event: the `cuda-oom` event. If a worker's error ended the training, the training's record of it is added.
        slot: (training process, loader, worker id) of a worker; the loader is None if not known.
        caught_count: errors of the process on that device that it caught, this one among them.
    """

    key: ProcessKey
    device: int | None
    event: Mapping[str, Any]
    slot: tuple[ProcessKey, int | None, int] | None
    caught_count: int

    @property
    def at_ns(self) -> float:
        """Time at which it was raised."""
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


class OptimizerRise(NamedTuple):
    """A rise of what tensors hold from one begin of the optimizer to the next, in bytes; NaN if not known.

    Attributes:
        rise: the rise up to the step of an error.
        usual: the largest one before it.
    """

    rise: float = math.nan
    usual: float = math.nan


def cuda_errors(tables: RunTables) -> list[CudaError]:
    """Return the last error of each process and device; one that ended the training goes before caught ones."""
    slots = worker_slots(tables)
    last: dict[tuple[ProcessKey, int | None], CudaError] = {}
    caught: Counter[tuple[ProcessKey, int | None]] = Counter()
    for event in sorted(_events(tables), key=lambda event: event.get("caught") is not True):
        key, device = writer_of(event), whole(event.get("device"))
        if device is None and not _RAISED_AGAIN.match(str(event.get("message") or "")):
            device = _only_device(tables, key)
        if event.get("caught") is True:
            caught[key, device] += whole(event.get("errors_count")) or 1
        last[key, device] = CudaError(
            key=key, device=device, event=event, slot=slots.get(key[:2]), caught_count=caught[key, device]
        )
    return _of_workers(list(last.values()))


def _only_device(tables: RunTables, key: ProcessKey) -> int | None:
    """Return the device that a process uses, None if there are several."""
    used = {a.device for a in allocators(tables.stream("device_memory")) if a.key == key}
    return used.pop() if len(used) == 1 else None


def _of_workers(errors: list[CudaError]) -> list[CudaError]:
    """Merge errors that the training process raised again into the errors of the workers that they came from."""
    copies = {}
    for error in errors:
        match = _RAISED_AGAIN.match(str(error.event.get("message") or ""))
        if match and error.slot is None:
            copies[error.key, int(match[1])] = error
    result = [error for error in errors if error not in copies.values()]
    for (main, worker), copy in copies.items():
        fields = {name: copy.event[name] for name in ("caught", "type", "message") if name in copy.event}
        origin = next((e for e in result if e.slot and (e.slot[0], e.slot[2]) == (main, worker)), None)
        if origin is None:
            result.append(replace(copy, slot=(main, None, worker)))
        else:
            result[result.index(origin)] = replace(origin, event={**origin.event, **fields})
    return result


def figures_at(tables: RunTables, error: CudaError) -> dict[str, float]:
    """Return the figures of memory at the moment of an error, in bytes.

    Returns:
        requested, free, limit, allocated and reserved, each with `_bytes`, from the observer, else from the
        message, which rounds them, else from the allocator's record; `TOTAL`; and the use of memory outside this
        process's PyTorch. Unknown figures are absent.
    """
    event, message = error.event, message_figures(str(error.event.get("message") or ""))
    figures = {name: float(event[name]) for name in _AT_ERROR if whole(event.get(name)) is not None}
    differ = (abs(figures[name] - message[name]) > ROUNDED_BYTES for name in figures.keys() & message.keys())
    if (whole(event.get("errors_count")) or 1) > 1 and any(differ):
        # The error that ended the training is an earlier one, raised again after attempts that failed as well.
        figures = {name: figures[name] for name in figures.keys() & {"limit_bytes"}}
    figures = {name: message[name] for name in ("requested_bytes", "free_bytes") if name in message} | figures
    limits = [message[name] for name in ("allowed_bytes", "total_bytes") if name in message]
    if limits:
        figures.setdefault("limit_bytes", min(limits))
    if "allocated_bytes" not in figures and "allocated_bytes" in message:
        figures["allocated_bytes"] = message["allocated_bytes"]
        if "unallocated_bytes" in message:
            figures["reserved_bytes"] = message["allocated_bytes"] + message["unallocated_bytes"]
    own = [a for a in allocators(tables.stream("device_memory")) if (a.key, a.device) == (error.key, error.device)]
    if own and (pools := record_at(own[0].rows, error.at_ns).get("private_pool_bytes")):
        figures["private_pool_bytes"] = pools  # at the last step: an error does not tell it
    if own and not message and "reserved_bytes" not in figures:
        figures |= _recorded_figures(tables, own[0], error.at_ns) | figures
    sample: Mapping[str, float | None] = {}
    for host, number, samples, _ in devices(tables):
        if (host, number) == (error.key[0], error.device):
            sample = record_at(samples, error.at_ns)
    total = sample.get("total_bytes") or message.get("total_bytes")
    if total is None:
        return figures
    figures[TOTAL] = total
    return figures | _elsewhere(tables, error, figures, sample, message.get("process_used_bytes"))


def device_peaks(tables: RunTables, error: CudaError, records: list[Allocator]) -> tuple[float, float]:
    """Return the peaks of tensors on the error's device and on the fullest other one, NaN without DataParallel."""
    if error.device is None or "gather" not in set(written(tables, "stage", error.key)["stage"]):
        return np.nan, np.nan
    peaks = {a.device: peak(a.column("allocated_peak_bytes")) for a in records}
    return peaks.pop(error.device, np.nan), peak(np.array([*peaks.values()]))


def rise_at_optimizer(tables: RunTables, error: CudaError, own: Allocator, before: Allocator) -> OptimizerRise:
    """Return how much more tensors held when the optimizer began than when it began in the step before.

    New gradients are left out: layers that train from this step on have some.

    Args:
        tables: the run.
        error: an error in the optimizer's step.
        own: the allocator's records until the error.
        before: those of them until the last step ended.
    """
    before = replace(before, rows=without_errors(before.rows))
    levels = before.column("allocated_bytes")
    if not len(levels):
        return OptimizerRise()
    rise = floats(without_errors(own.rows), "allocated_bytes")[-1] - levels[-1]
    usual = peak(np.diff(levels)[1:])  # the first rise is the state of the optimizer
    return OptimizerRise(float(rise) - _new_gradients_bytes(tables, error, before), usual)


def _new_gradients_bytes(tables: RunTables, error: CudaError, before: Allocator) -> float:
    """Return a lower bound of the gradients at an error that the step before did not have, 0 if not known.

    The last reading of the optimizers may be some steps old. Gradients that came since then, but before the last
    step, have raised the level of tensors by that step.
    """
    rows = written(tables, "optimizer", error.key)
    rows = rows[floats(rows, "device") == error.device]
    gradients, seconds = floats(rows, "gradients_bytes"), floats(rows, "time_ns") / SECOND_NS
    earlier, later = seconds <= before.seconds[-1], seconds >= error.at_ns / SECOND_NS
    if not (earlier.any() and later.any()):
        return 0.0
    level_then = before.at(seconds[earlier][-1:], "allocated_bytes")[0]
    risen_since = np.maximum(0.0, before.column("allocated_bytes")[-1] - level_then)
    return float(np.fmax(0.0, gradients[later][0] - gradients[earlier][-1] - risen_since))


def _recorded_figures(tables: RunTables, allocator: Allocator, at_ns: float) -> dict[str, float]:
    """Return what the allocator's last record says of an error whose message has no figures.

    The record was made after the error: its tensors are gone, and what the allocator reserved is still there.
    """
    record, (total, share) = record_at(allocator.rows, at_ns), capacity_of(tables, allocator)
    known = {
        "limit_bytes": float(np.fmin(total, share)),
        "reserved_bytes": record.get("reserved_bytes"),
        ALLOCATED_PEAK: record.get("allocated_peak_bytes"),
    }
    return {name: value for name, value in known.items() if value is not None and np.isfinite(value)}


def _elsewhere(
    tables: RunTables,
    error: CudaError,
    figures: Mapping[str, float],
    sample: Mapping[str, float | None],
    process_used: float | None,
) -> dict[str, float]:
    """Return the use of memory outside this process's PyTorch, in bytes; unknown figures are absent.

    The memory in use is the device's total less the memory that was free at the error. PyTorch's message gives the
    part of this process. The driver's last sample gives the part of programs outside the run, which no step of this
    process changes. The rest belongs to the run's other processes, if it has any on this device.
    """
    reserved, free = figures.get("reserved_bytes"), figures.get("free_bytes")
    if reserved is None or free is None:
        return {}
    outside = figures[TOTAL] - free - reserved - (sample.get("reserved_bytes") or 0.0)
    others = sample.get("other_used_bytes")
    users = {a.key for a in allocators(tables.stream("device_memory")) if a.device == error.device}
    is_alone = error.slot is None and users <= {error.key}  # no other process of the run is known to use it
    if process_used is None:
        if others is None:
            return {"unattributed_bytes": max(0.0, outside)}
        rest = max(0.0, outside - others)
        return {"outside_pytorch_bytes" if is_alone else "rest_of_run_bytes": rest, "other_processes_bytes": others}
    result = {"outside_pytorch_bytes": max(0.0, process_used - reserved)}
    rest = max(0.0, outside - (process_used - reserved))
    rest = rest if rest > 2 * ROUNDED_BYTES else 0.0
    if is_alone:
        return result | {"other_processes_bytes": rest}
    if others is None:
        return result | {"unattributed_bytes": rest}
    return result | {"run_processes_bytes": max(0.0, rest - others), "other_processes_bytes": others}


def ended_by_cuda_oom(tables: RunTables) -> frozenset[ProcessKey]:
    """Return the training processes that such an error ended."""
    return frozenset(writer_of(event) for event in _events(tables) if event.get("caught") is False)


def _events(tables: RunTables) -> Iterator[Mapping[str, Any]]:
    """Yield the `cuda-oom` events, with what the end of the process says of an error that it may have caught."""
    life = lifecycle_of(tables)
    for event in tables.events_of("cuda-oom"):
        key = writer_of(event)
        if event.get("thread"):
            # The main thread may have begun another one that trains.
            steps_ns = floats(written(tables, "step", key), "time_ns")
            if (steps_ns > event["time_ns"]).any():
                event = {**event, "caught": None}
        elif event.get("caught") is None:
            # A spawned process ends by a second `sys.exit`, in which nothing is handled any more.
            exits = [each for each in tables.events_of("exit-message", by=key) if each.get("handled")]
            # Shortly before a normal end no request comes in which the process could say that it went on.
            if life.exit_status == 0 and key not in life.exceptions:
                event = {**event, "caught": True}
            elif exits and tells_out_of_memory(str(exits[-1]["handled"])):
                by_script = SPAWN_MODULE not in str(exits[-1].get("site"))  # else torch reports it to the parent
                event = {**event, "caught": False, "ends_itself": by_script}
        yield event
