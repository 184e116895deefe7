"""Explain CUDA out-of-memory errors: the request, the free memory, the use of the rest, and the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from collector.diagnosis.loading.loaders import worker_slots
from collector.diagnosis.memory.gpu_growth import has_more_tensors, tensors_of
from collector.diagnosis.run.allocators import allocators, devices, record_at
from collector.diagnosis.run.columns import floats, peak, whole, written
from collector.diagnosis.run.cuda_message import (
    ROUNDED_BYTES,
    first_sentences,
    message_figures,
    tells_out_of_memory,
)
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.processes import rank_of
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.diagnosis.statistics.growth import Growth
from collector.findings import Advice, Evidence, Fault, Finding, Limit, Locus, Severity, fact
from collector.store import ProcessKey
from collector.units import counted, plain_text, size

_MESSAGE_CHARACTERS = 500
#: Smallest gain of an advice worth giving, as a share of the limit.
_LEAST_GAIN_RATIO = 0.01
#: Figures of the observer and the allocator at the moment of the error.
_AT_ERROR = ("requested_bytes", "free_bytes", "limit_bytes", "allocated_bytes", "reserved_bytes")
#: Memory of the device.
TOTAL = "device_total_bytes"
#: DataLoader raises a worker's error again in the training process (torch/_utils.py, `ExceptionWrapper`).
_RAISED_AGAIN = re.compile(r"Caught \S+ in DataLoader worker process (\d+)")
#: Advice; `{room}` is the memory that becomes usable.
_TENSORS_GREW = Advice(
    text="See gpu-tensor-leak first: live tensors were growing until the error",
    expected="the {room} by which they grew become free",
)
_TENSOR_GREW = Advice(
    text="Find what grew: live tensors took more and more memory until the error, and not because there were more "
    "of them, as far as is known. Usual: batches that grow, or one tensor that is made again, larger each time "
    "(torch.cat of predictions, a cache of keys and values)",
    expected="the {room} by which they grew become free",
)
_LARGER_SHARE = Advice(
    text="Give the process a larger share of the device: torch.cuda.set_per_process_memory_fraction",
    expected="up to {room} become usable",
    effect="changes memory",
)
_EXPANDABLE_SEGMENTS = Advice(
    text="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator held enough unused memory, in "
    "pieces that were too small",
    expected="up to {room} become usable",
)
_END_OTHERS = Advice(
    text="End the other processes on this device, or use another device", expected="{room} become free"
)
_BOUND_BATCHES = Advice(
    text="Bound the size of a batch (sort or bucket by length, crop, limit the tokens per batch): the last one was "
    "the largest so far",
    expected="no batch is larger than {room}, which fitted",
    effect="changes results",
)
_RELEASE_BATCHES = Advice(
    text="Let go of each batch's tensors before the next one: in an evaluation, use torch.no_grad() and move "
    "outputs to the CPU; in gradient accumulation, call backward() on the loss of each batch",
    expected="up to {room} become free",
)
_LEAVE_HANDLER = Advice(
    text="Retry after the `except` block, not in it: there the first error still holds the tensors of the step "
    "that failed (its traceback has their frames)",
    expected="up to {room} become free before the retry",
)
_NO_CUDA_IN_WORKERS = Advice(
    text="Keep CUDA out of the DataLoader workers: make tensors on the CPU there, and move batches to the device "
    "in the training process",
    expected="the workers need no CUDA context, tensors and cache: this one held {room}",
)
_SMALLER_STEP = Advice(
    text="Make a step smaller: a smaller batch with gradient accumulation (`tidegauge tune --batch-size` finds the "
    "largest that fits), activation checkpointing, bfloat16",
    expected="activations shrink in proportion to the batch",
    effect="changes results",
)
_SMALLER_STATE = Advice(
    text="Take an optimizer whose step needs less: foreach=False (fewer temporaries), SGD, Adafactor or an 8-bit "
    "Adam (less state), or shard its state over several devices (FSDP)",
    expected="its state and temporaries fit beside parameters and gradients",
    effect="changes results",
)
_SMALLER_MODEL = Advice(
    text="No step came before it: if the model itself does not fit, load it in bfloat16, shard it over several "
    "devices (FSDP), or make it smaller; if the batch does not fit beside it, make the batch smaller",
    expected="parameters, gradients, the optimizer's state and one step fit together",
    effect="changes results",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """One error, and the state at its moment.

    Attributes:
        error: its process, device and event.
        figures: name -> bytes, of `figures_at`.
        growth: the growth of live tensors before it, None if they did not grow.
        has_more_tensors: whether their number grew too.
        taken_bytes: what tensors took since the last step, NaN if not known.
        batch_bytes: sizes of the last batch, and of the largest before it; NaN if not known.
        batch_counts: batches of the last one's loader since the last step, and the most in any step before.
        phase: phase of the framework, None if it recorded none.
        is_first: True if the process had no whole step before it.
        in_optimizer: True if the optimizer's step had begun.
    """

    error: CudaError
    figures: Mapping[str, float]
    growth: Growth | None
    has_more_tensors: bool
    taken_bytes: float
    batch_bytes: tuple[float, float]
    batch_counts: tuple[int, int]
    phase: str | None
    is_first: bool
    in_optimizer: bool

    def of(self, name: str) -> float:
        """Return a figure, NaN if it is not known."""
        return self.figures.get(name, math.nan)

    @property
    def is_caught(self) -> bool:
        """True if the training caught the error and went on."""
        return self.error.event.get("caught") is True

    @property
    def holds_batches(self) -> bool:
        """True if more batches of its loader came since the last step than in any step before."""
        count, most = self.batch_counts
        return count > most > 0

    @property
    def unallocated_bytes(self) -> float:
        """Memory that the allocator held and no tensor used."""
        return self.of("reserved_bytes") - self.of("allocated_bytes")

    @property
    def room_bytes(self) -> float:
        """Memory that the allocator could still reserve."""
        return float(np.fmin(self.of("free_bytes"), self.of("limit_bytes") - self.of("reserved_bytes")))

    @property
    def is_limited(self) -> bool:
        """True if the process reached its own share of the device, while the device had room.

        The allocator then refuses requests that would exceed its limit (c10/cuda/CUDACachingAllocator.cpp,
        `alloc_block`).
        """
        request, held = self.of("requested_bytes"), np.fmax(self.of("reserved_bytes"), self.of("allocated_bytes"))
        return bool(held + request > self.of("limit_bytes") and self.of("free_bytes") >= request)


def find_cuda_ooms(tables: RunTables) -> list[Finding]:
    """Find `cuda-oom`, once per process and device: the last error, or the one that ended the training."""
    return [_finding(tables, error) for error in cuda_errors(tables)]


def ended_by_cuda_oom(tables: RunTables) -> frozenset[ProcessKey]:
    """Return the training processes that such an error ended."""
    return frozenset(writer_of(event) for event in _events(tables) if event.get("caught") is False)


def _events(tables: RunTables) -> Iterator[Mapping[str, Any]]:
    """Yield the `cuda-oom` events, with what the end of the process says of an error that it may have caught."""
    life = lifecycle_of(tables)
    for event in tables.events_of("cuda-oom"):
        if event.get("caught") is None:
            key = writer_of(event)
            handled = [str(each.get("handled")) for each in tables.events_of("exit-message", by=key)]
            # Shortly before a normal end no request comes in which the process could say that it went on.
            if life.exit_status == 0 and key not in life.exceptions:
                event = {**event, "caught": True}
            elif handled and tells_out_of_memory(handled[-1]):
                event = {**event, "caught": False, "ends_itself": True}
        yield event


def _finding(tables: RunTables, error: CudaError) -> Finding:
    scene = _scene(tables, error)
    event = error.event
    severity: Severity = "info" if scene.is_caught else "critical" if event.get("caught") is False else "warning"
    limit, (advice, fault) = scene.of("limit_bytes"), _remedy(scene)
    return Finding(
        kind="cuda-oom",
        severity=severity,
        confidence=0.97,
        summary=_summary(scene, lifecycle_of(tables).name(error.key)),
        locus=error.locus(tables),
        since_step=whole(event.get("step")),
        evidence=_evidence(scene),
        limit=Limit(name="CUDA memory", value=limit, unit="bytes") if math.isfinite(limit) else None,
        advice=advice,
        fault=fault,
    )


def _scene(tables: RunTables, error: CudaError) -> _Scene:
    key, at_ns, event = error.key, error.at_ns, error.event
    records = allocators(tables.stream("device_memory"))
    own = next((a.before(at_ns) for a in records if (a.key, a.device) == (key, error.device)), None)
    batches, steps_ns = written(tables, "batch", key), floats(written(tables, "step", key), "time_ns")
    batches, steps_ns = batches[floats(batches, "time_ns") <= at_ns], steps_ns[steps_ns <= at_ns]
    payload, figures = floats(batches, "payload_bytes"), figures_at(tables, error)
    of_loader = batches[floats(batches, "loader") == batches["loader"].iloc[-1]] if len(batches) else batches
    counts = np.diff(np.searchsorted(floats(of_loader, "time_ns"), [0.0, *steps_ns, at_ns + 1]))
    before = own.before(steps_ns[-1]) if own is not None and len(steps_ns) else None
    level = before.column("allocated_bytes")[-1] if before is not None and len(before.rows) else math.nan
    taken = figures.get("allocated_bytes", math.nan) - level
    phases = [each for each in tables.events_of("phase", by=key) if each["time_ns"] <= at_ns]
    return _Scene(
        error=error,
        figures=figures,
        growth=tensors_of(tables, own).growth() if own is not None else None,
        has_more_tensors=own is not None and has_more_tensors(tables, own),
        taken_bytes=taken if taken > 0 else math.nan,
        batch_bytes=(float(payload[-1]) if len(payload) else math.nan, peak(payload[:-1])),
        batch_counts=(int(counts[-1]), int(counts[:-1].max(initial=0))),
        phase=str(phases[-1]["phase"]) if phases else None,
        is_first=error.slot is None and not len(steps_ns),
        # Without an observer the allocators were recorded after the error, in whatever phase.
        in_optimizer=own is not None and "error_time_ns" in event and own.before_optimizer_of(event["step"]),
    )


def _summary(scene: _Scene, process: str) -> str:
    request, error = scene.of("requested_bytes"), scene.error
    if error.slot is not None:
        main, loader, worker = error.slot
        process = f"DataLoader worker {worker}"
        process += (
            f" of loader {loader} (pid {error.key[1]})"
            if error.key != main
            else f" of the process with pid {main[1]}"
        )
    text = f"CUDA memory ran out in {process}"
    text += f" in its {scene.phase} phase" if scene.phase else ""
    if math.isfinite(request):
        text += f": {size(request)} were requested, {size(scene.of('free_bytes'))} were free"
        if scene.is_limited:
            text += f" on the device, but the process may use {size(scene.of('limit_bytes'))} of it"
    if math.isfinite(scene.unallocated_bytes):
        text += f". Tensors held {size(scene.of('allocated_bytes'))}"
        text += f", the allocator {size(scene.unallocated_bytes)} more"
    if scene.holds_batches:
        text += f". {counted(scene.batch_counts[0], 'batch')} came without a step"
        text += f", in which tensors took {size(scene.taken_bytes)}" if math.isfinite(scene.taken_bytes) else ""
    text += ". The training caught the error and went on" if scene.is_caught else ""
    return f"{text}. The script caught the error and ended." if error.event.get("ends_itself") else f"{text}."


def _evidence(scene: _Scene) -> tuple[Evidence, ...]:
    last, before = scene.batch_bytes
    count, most = scene.batch_counts
    figures = (
        ("batch_payload_bytes", last, "last batch before it"),
        ("earlier_batch_payload_peak_bytes", before, "run"),
        *(
            (name, value, "at the error")
            for name, value in scene.figures.items()
            if name != TOTAL or scene.is_limited
        ),
        ("allocated_since_step_bytes", scene.taken_bytes, "since the last step"),
    )
    evidence = [fact(name, value, window) for name, value, window in figures if math.isfinite(value)]
    if scene.holds_batches:
        evidence.append(fact("batches_since_step_count", count, "since the last step"))
        evidence.append(fact("batches_of_a_step_peak_count", most, "run"))
    errors = whole(scene.error.event.get("errors_count")) or 1
    evidence.append(fact("errors_count", errors, "since the last such event"))
    if scene.error.event.get("message"):
        message = first_sentences(plain_text(str(scene.error.event["message"])))
        evidence.append(fact("exception", message[:_MESSAGE_CHARACTERS], "uncaught"))
    else:
        caught = scene.error.event.get("caught")
        went_on = "not known, the process ended after it" if caught is None else "yes, and then the process exited"
        went_on = "yes, the training went on" if caught else went_on
        evidence.append(fact("caught", went_on, "the error"))
    if scene.growth is not None:
        evidence.append(fact("allocated_rise_bytes", round(scene.growth.rise), "before it", n=scene.growth.n))
    return tuple(evidence)


def _remedy(scene: _Scene) -> tuple[tuple[Advice, ...], Fault]:
    """Return the advice that the figures support, by gain in bytes, and where the first cause lies.

    Growth that made most of the tensors comes first: it fills whatever another advice gains. A smaller step always
    helps, and comes last; before the first step it may be the model that is too large.
    """
    request, others = scene.of("requested_bytes"), scene.of("other_processes_bytes")
    last, before = scene.batch_bytes
    count, most = scene.batch_counts
    # The part of what this step took that a step of the usual size, in bytes or batches, would not have taken.
    excess = scene.taken_bytes * (1 - before / last) if last > before else math.nan
    more_batches = scene.taken_bytes * (1 - most / max(count, 1))
    holds_batches = scene.holds_batches and math.isfinite(scene.taken_bytes)
    rise = math.nan if scene.growth is None else scene.growth.rise
    growth_gain = math.inf if rise >= scene.of("allocated_bytes") / 2 else rise
    more = scene.of(TOTAL) - scene.of("limit_bytes")
    own = scene.of("reserved_bytes") + float(np.nan_to_num(scene.of("outside_pytorch_bytes")))
    unused = scene.unallocated_bytes
    # The request fits into what is unused and what is free, and most of it into what is unused.
    fits_in_pieces = unused >= max(request - max(scene.room_bytes, 0.0), request / 2)
    event = scene.error.event
    is_raised_again = event.get("allocated_bytes") not in (None, scene.of("allocated_bytes"))
    in_handler = (event.get("in_handler") is True or is_raised_again) and math.isfinite(scene.taken_bytes)
    in_worker = scene.error.slot is not None and math.isfinite(own)
    # Advice, whose fault, whether the figures support it, its gain, and the memory that it names.
    options: tuple[tuple[Advice, Fault, bool, float, float], ...] = (
        (_TENSORS_GREW, "your code", scene.growth is not None and scene.has_more_tensors, growth_gain, rise),
        (_TENSOR_GREW, "your code", scene.growth is not None and not scene.has_more_tensors, growth_gain, rise),
        (_LARGER_SHARE, "your settings", scene.is_limited, more, min(more, scene.of("free_bytes"))),
        (_EXPANDABLE_SEGMENTS, "your settings", fits_in_pieces, unused, unused),
        (_END_OTHERS, "outside", others >= request, others, others),
        (_BOUND_BATCHES, "your code", last > before, float(np.fmax(last - before, excess)), before),
        (_RELEASE_BATCHES, "your code", holds_batches, more_batches, more_batches),
        (_LEAVE_HANDLER, "your code", in_handler, scene.taken_bytes, scene.taken_bytes),
        (_NO_CUDA_IN_WORKERS, "your code", in_worker, own, own),
    )
    least = _LEAST_GAIN_RATIO * scene.of("limit_bytes")
    supported = [
        (gain, fault, replace(advice, expected=advice.expected.format(room=size(room))))
        for advice, fault, is_supported, gain, room in options
        if is_supported and not gain < least
    ]
    supported.sort(key=lambda option: -option[0])
    fault = supported[0][1] if supported else "your settings"
    last_resort = _SMALLER_MODEL if scene.is_first else _SMALLER_STEP
    last_resort = _SMALLER_STATE if scene.in_optimizer else last_resort
    return (*(advice for _, _, advice in supported), last_resort), fault


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaError:
    """A CUDA out-of-memory error.

    Attributes:
        key: the process that requested memory.
        device: its number in that process, None if not known.
        event: the `cuda-oom` event. If a worker's error ended the training, the training's record of it is added.
        slot: (training process, loader, worker id) of a worker; the loader is None if not known.
    """

    key: ProcessKey
    device: int | None
    event: Mapping[str, Any]
    slot: tuple[ProcessKey, int | None, int] | None

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


def cuda_errors(tables: RunTables) -> list[CudaError]:
    """Return the last error of each process and device; one that ended the training goes before caught ones."""
    slots = worker_slots(tables)
    last: dict[tuple[ProcessKey, int | None], CudaError] = {}
    for event in sorted(_events(tables), key=lambda event: event.get("caught") is not True):
        key, device = writer_of(event), whole(event.get("device"))
        if device is None and not _RAISED_AGAIN.match(str(event.get("message") or "")):
            device = _only_device(tables, key)
        last[key, device] = CudaError(key=key, device=device, event=event, slot=slots.get(key[:2]))
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
        message, which rounds them; `TOTAL`; and the use of memory outside this process's PyTorch. Unknown figures
        are absent.
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
    sample: Mapping[str, float | None] = {}
    for host, number, samples, _ in devices(tables):
        if (host, number) == (error.key[0], error.device):
            sample = record_at(samples, error.at_ns)
    total = sample.get("total_bytes") or message.get("total_bytes")
    if total is None:
        return figures
    figures[TOTAL] = total
    return figures | _elsewhere(tables, error, figures, sample, message.get("process_used_bytes"))


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
    others, is_alone = sample.get("other_used_bytes"), _is_alone(tables, error)
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


def _is_alone(tables: RunTables, error: CudaError) -> bool:
    """Return whether no other process of the run is known to use the device."""
    users = {a.key for a in allocators(tables.stream("device_memory")) if a.device == error.device}
    return error.slot is None and users <= {error.key}
