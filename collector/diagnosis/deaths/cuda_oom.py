"""Explain CUDA out-of-memory errors: the request, the free memory, the use of the rest, and the cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from collector.diagnosis.deaths.cuda_errors import (
    ALLOCATED_PEAK,
    TOTAL,
    CudaError,
    OptimizerRise,
    cuda_errors,
    device_peaks,
    figures_at,
    rise_at_optimizer,
)
from collector.diagnosis.loading.loaders import joined_batches
from collector.diagnosis.memory.gpu_memory import more_tensors, step_peak_of, tensors_of
from collector.diagnosis.run.allocators import allocators
from collector.diagnosis.run.columns import floats, peak, whole, written
from collector.diagnosis.run.cuda_message import first_sentences
from collector.diagnosis.run.exceptions import at_line
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.statistics.growth import Floats, Growth
from collector.findings import Advice, Evidence, Fault, Finding, Limit, Severity, fact
from collector.units import counted, plain_text, size
from training_harness.records import UNIT_OPTIMIZER

_MESSAGE_CHARACTERS = 500
#: Smallest gain of an advice worth giving, as a share of the limit.
_LEAST_GAIN_RATIO = 0.01
#: A step that takes this many times what any before it took is unusual; where sizes vary, many are the largest yet.
_UNUSUAL_RATIO = 2.0
#: Memory of others that is named if it is as large as the request -> who holds it.
_OTHERS = {"run_processes_bytes": "The run's other processes", "other_processes_bytes": "Processes outside the run"}
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
_BOUND_STEPS = Advice(
    text="Bound what a step takes (sort or bucket by length, crop, limit the tokens per batch): the steps took "
    "more and more memory until the error, and gave it back",
    expected="the {room} by which a step's peak grew become free",
    effect="changes results",
)
_UNUSUAL_STEP = Advice(
    text="Find what this step took: far more than any before it. Usual: a long request or sequence, an input that "
    "the loop makes itself, a second model, a copy of one, a branch that is seldom taken",
    expected="the {room} that it took beyond them become free",
)
_RELEASE_COPY = Advice(
    text="Let go of what was made since the step before, or keep it on the CPU. Usual: a copy of the model or of "
    "its optimizer's state, for a checkpoint or an average of weights",
    expected="{room} become free",
)
_DISTRIBUTE = Advice(
    text="Use DistributedDataParallel: DataParallel gathers the outputs on this device, and their loss is computed "
    "here. Or compute the loss in the module, and return it alone",
    expected="this device needs as much as the others: up to {room} less",
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
_RELEASE_STATE = Advice(
    text="Load the checkpoint on the CPU (torch.load(…, map_location='cpu')), or let go of it after "
    "load_state_dict(), which copied it into the model: its tensors were still on the device",
    expected="{room} become free",
)
_SMALLER_STEP = Advice(
    text="Make a step smaller: a smaller batch with gradient accumulation (`tidegauge tune --batch-size` finds the "
    "largest that fits), activation checkpointing, bfloat16",
    expected="activations shrink in proportion to the batch",
    effect="changes results",
)
_SMALLER_EVALUATION = Advice(
    text="Make the batches of this evaluation or inference smaller, and run it under torch.no_grad()",
    expected="outputs and activations shrink in proportion to the batch",
)
_SMALLER_FIRST_BATCH = replace(
    _SMALLER_EVALUATION,
    text="Make the batches of this loader smaller: the first one did not fit. If it is an evaluation or inference, "
    "run it under torch.no_grad()",
)
_SMALLER_STATE = Advice(
    text="Take an optimizer whose step needs less: foreach=False (fewer temporaries), SGD, Adafactor or an 8-bit "
    "Adam (less state), or shard its state over several devices (FSDP)",
    expected="its state and temporaries fit next to parameters and gradients",
    effect="changes results",
)
_SMALLER_MODEL = Advice(
    text="No step came before it: if the model itself does not fit, load it in bfloat16, shard it over several "
    "devices (FSDP), or make it smaller; if the batch does not fit next to it, make the batch smaller",
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
        has_more_tensors: whether their number grew too, as for `gpu-tensor-leak`.
        step_growth: the growth of what a step takes and gives back, None if it did not grow.
        taken_bytes: what tensors took since the last step, NaN if not known.
        usual_bytes: the most that a step before can have taken, for a batch as large as the last one; NaN if not
            known.
        batch_bytes: sizes of the last batch, and of the largest before it; NaN if not known.
        batch_counts: batches of the last one's loader since the last step, and the most in any step before.
        phase: phase of the framework, None if it recorded none.
        is_first: True if the process had no whole step before it.
        in_optimizer: True if the optimizer's step had begun.
        at_optimizer: the rise of tensors from the begin of the last optimizer to that of this one.
        device_peaks: what tensors took at most before it on this device, and on the fullest other one of a
            DataParallel; NaN without one.
        in_evaluation: True if the process never went backward, or its last batches are of a loader whose batches no
            step ever followed.
        begins_loader: True if its last batch is the first of such a loader: an evaluation, or a further training.
    """

    error: CudaError
    figures: Mapping[str, float]
    growth: Growth | None
    has_more_tensors: bool
    step_growth: Growth | None
    taken_bytes: float
    usual_bytes: float
    batch_bytes: tuple[float, float]
    batch_counts: tuple[int, int]
    phase: str | None
    is_first: bool
    in_optimizer: bool
    at_optimizer: OptimizerRise
    device_peaks: tuple[float, float]
    in_evaluation: bool
    begins_loader: bool

    def of(self, name: str) -> float:
        """Return a figure, NaN if it is not known."""
        return self.figures.get(name, math.nan)

    @property
    def is_caught(self) -> bool:
        """True if the training caught the error and went on."""
        return self.error.event.get("caught") is True

    @property
    def holds_batches(self) -> bool:
        """True if more batches of its loader came since the last step than in any step before.

        The first evaluation has none to compare with: there, tensors must have taken more than one batch explains.
        """
        count, most = self.batch_counts
        if most == 0:
            return count > 0 and self.in_evaluation and self.taken_bytes > self.usual_bytes
        return count > most

    @property
    def beyond_usual_bytes(self) -> float:
        """Memory of this step beyond the most that any before it took, if that is far more; else NaN.

        NaN also if its batches or its optimizer explain it. The first step shows less than is usual: the state of
        the optimizer is made at its end, and stays.
        """
        (last, before), (count, most) = self.batch_bytes, self.batch_counts
        steps = whole(self.error.event.get("step")) or 0
        is_explained = last > before or count > most or self.in_optimizer or self.step_growth is not None
        beyond, least = self.taken_bytes - self.usual_bytes, _LEAST_GAIN_RATIO * self.of("limit_bytes")
        is_unusual = self.taken_bytes > _UNUSUAL_RATIO * self.usual_bytes and not beyond < least
        return beyond if steps > 1 and is_unusual and not is_explained else math.nan

    @property
    def kept_bytes(self) -> float:
        """Rise of tensors from the last optimizer to this one, if that is far more than usual; else NaN."""
        rise, usual = self.at_optimizer
        return rise if rise > max(_UNUSUAL_RATIO * usual, _LEAST_GAIN_RATIO * self.of("limit_bytes")) else math.nan

    @property
    def unallocated_bytes(self) -> float:
        """Memory that the allocator held and no tensor used."""
        return self.of("reserved_bytes") - self.of("allocated_bytes")

    @property
    def loaded_state_bytes(self) -> int:
        """Memory of a state that a model had loaded, and copied."""
        return whole(self.error.event.get("loaded_state_bytes")) or 0

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
    batches, steps = joined_batches(tables, key), written(tables, "step", key)
    is_trained = np.isfinite(floats(steps, "backward_ns")) | (floats(steps, "unit") >= UNIT_OPTIMIZER)
    steps_ns, trains = floats(steps, "time_ns"), bool(is_trained.any())
    batches, steps_ns = batches[floats(batches, "time_ns") <= at_ns], steps_ns[steps_ns <= at_ns]
    payload, figures = floats(batches, "payload_bytes"), figures_at(tables, error)
    of_loader = batches[floats(batches, "loader") == batches["loader"].iloc[-1]] if len(batches) else batches
    counts = np.diff(np.searchsorted(floats(of_loader, "time_ns"), [0.0, *steps_ns, at_ns + 1]))
    before = own.before(steps_ns[-1]) if own is not None and len(steps_ns) else None
    level, usual = math.nan, math.nan
    if before is not None and len(before.rows):
        levels, peaks = before.column("allocated_bytes"), before.column("allocated_peak_bytes")
        level = levels[-1]
        # A step takes no more than the peak by its end is above the level before it; that of the first is unknown.
        usual = peak(peaks[1:] - levels[:-1]) if len(levels) > 1 else peaks[-1] - level
    taken = figures.get("allocated_bytes", math.nan) - level
    in_steps = payload[floats(batches, "time_ns") <= steps_ns[-1]] if len(steps_ns) else payload[:0]
    larger = 1.0 if batches.empty else math.nan
    if len(in_steps) and peak(in_steps) > 0:
        larger = max(1.0, float(payload[-1]) / peak(in_steps))
    phases = [each for each in tables.events_of("phase", by=key) if each["time_ns"] <= at_ns]
    growth = tensors_of(tables, own).growth() if own is not None else None
    is_of_new_loader = _is_evaluation(batches, steps_ns)
    # Without an observer the allocators were recorded after the error, in whatever phase.
    in_optimizer = own is not None and "error_time_ns" in event and own.before_optimizer_of(event["step"])
    return _Scene(
        error=error,
        figures=figures,
        growth=growth,
        has_more_tensors=own is not None and growth is not None and bool(more_tensors(tables, own, growth)),
        step_growth=step_peak_of(tables, before).growth() if before is not None else None,
        taken_bytes=taken if taken > 0 else math.nan,
        usual_bytes=usual * larger,
        batch_bytes=(float(payload[-1]) if len(payload) else math.nan, peak(payload[:-1])),
        batch_counts=(int(counts[-1]), int(counts[:-1].max(initial=0))),
        phase=str(phases[-1]["phase"]) if phases else None,
        is_first=error.slot is None and not len(steps_ns),
        in_optimizer=in_optimizer,
        at_optimizer=rise_at_optimizer(tables, error, own, before)
        if own and before and in_optimizer
        else OptimizerRise(),
        device_peaks=device_peaks(tables, error, [a.before(at_ns) for a in records if a.key == key]),
        in_evaluation=(len(steps) > 0 and not trains) or (counts[-1] > 1 and is_of_new_loader),
        begins_loader=counts[-1] == 1 and is_of_new_loader,
    )


def _is_evaluation(batches: pd.DataFrame, steps_ns: Floats) -> bool:
    """Return whether the newest batch is of a loader whose batches no step ever followed at once."""
    loaders = floats(batches, "loader")
    before = np.searchsorted(floats(batches, "time_ns"), steps_ns) - 1
    return bool(len(loaders) and len(steps_ns) and loaders[-1] not in loaders[before[before >= 0]])


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
    text += at_line(error.event.get("site"))
    if math.isfinite(request):
        text += f": {size(request)} were requested, {size(scene.of('free_bytes'))} were free"
        if scene.is_limited:
            text += f" on the device, but the process may use {size(scene.of('limit_bytes'))} of it"
    if math.isfinite(scene.unallocated_bytes):
        text += f". Tensors held {size(scene.of('allocated_bytes'))}"
        text += f", the allocator {size(scene.unallocated_bytes)} more"
        if scene.loaded_state_bytes >= _LEAST_GAIN_RATIO * scene.of("limit_bytes"):
            text += f". {size(scene.loaded_state_bytes)} of the tensors were a state that a model had loaded"
    elif math.isfinite(scene.of("allocated_bytes")):
        held, limit = scene.of("allocated_bytes"), scene.of("limit_bytes")
        text += f". Tensors held {size(held)} of {size(limit)}; the error does not say what held the rest"
    elif math.isfinite(scene.of(ALLOCATED_PEAK)):
        text += ". " if math.isfinite(request) else ". PyTorch's error has no figures. "
        text += f"The allocator had reserved {size(scene.of('reserved_bytes'))}"
        text += f" of {size(scene.of('limit_bytes'))}, and tensors had taken up to {size(scene.of(ALLOCATED_PEAK))}"
    if scene.holds_batches:
        text += f". {counted(scene.batch_counts[0], 'batch')} came without a step"
        text += f", in which tensors took {size(scene.taken_bytes)}" if math.isfinite(scene.taken_bytes) else ""
    if scene.begins_loader and math.isfinite(scene.batch_bytes[0]):
        first, largest = scene.batch_bytes
        text += f". It came with the first batch of a loader, of {size(first)}"
        text += f"; the largest of others had {size(largest)}" if math.isfinite(largest) else ""
    for name, owner in _OTHERS.items():
        if scene.of(name) >= request:
            text += f". {owner} held {size(scene.of(name))}"
    if scene.device_peaks[0] > (1 + _LEAST_GAIN_RATIO) * scene.device_peaks[1]:
        here, elsewhere = map(size, scene.device_peaks)
        text += (
            f". At the peak tensors took {here} here, and at most {elsewhere} on the other devices of DataParallel"
        )
    if math.isfinite(scene.beyond_usual_bytes):
        text += f". Since the last step, tensors took {size(scene.taken_bytes)}"
        text += f"; no step before took more than {size(scene.usual_bytes)}"
    if math.isfinite(scene.kept_bytes):
        text += f". When the optimizer began, tensors held {size(scene.kept_bytes)} more than at the step before"
    if scene.step_growth is not None:
        text += f". The peak of a step had grown by {size(scene.step_growth.rise)}"
    if error.event.get("thread"):
        text += f". The error ended the thread {error.event['thread']!r}"
    if scene.is_caught:
        text += ". The training caught the error and went on"
        text += f"; it caught {error.caught_count} such errors" if error.caught_count > 1 else ""
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
        ("device_allocated_peak_bytes", scene.device_peaks[0], "run"),
        ("other_devices_allocated_peak_bytes", scene.device_peaks[1], "run"),
        ("allocated_since_step_bytes", scene.taken_bytes, "since the last step"),
        ("usual_step_bytes", scene.taken_bytes - scene.beyond_usual_bytes, "run"),
        ("loaded_state_bytes", scene.loaded_state_bytes or math.nan, "at the error"),
    )
    evidence = [fact(name, value, window) for name, value, window in figures if math.isfinite(value)]
    if scene.holds_batches:
        evidence.append(fact("batches_since_step_count", count, "since the last step"))
        evidence.append(fact("batches_of_a_step_peak_count", most, "run"))
    errors = whole(scene.error.event.get("errors_count")) or 1
    evidence.append(fact("errors_count", errors, "since the last such event"))
    if scene.error.caught_count > 1:
        evidence.append(fact("caught_errors_count", scene.error.caught_count, "run"))
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
    if scene.step_growth is not None:
        rise = round(scene.step_growth.rise)
        evidence.append(fact("step_peak_rise_bytes", rise, "before it", n=scene.step_growth.n))
    return tuple(evidence)


def _remedy(scene: _Scene) -> tuple[tuple[Advice, ...], Fault]:
    """Return the advice that the figures support, by gain in bytes, and where the first cause lies.

    Growth that made most of what the allocator holds comes first: it fills whatever another advice gains. A smaller
    step always helps, and comes last; before the first step it may be the model that is too large.
    """
    request, others = scene.of("requested_bytes"), scene.of("other_processes_bytes")
    least = _LEAST_GAIN_RATIO * scene.of("limit_bytes")
    (last, before), (count, most) = scene.batch_bytes, scene.batch_counts
    # The part of what this step took that a step of the usual size, in bytes or batches, would not have taken.
    excess = scene.taken_bytes * (1 - before / last) if last > before else math.nan
    larger_gain = float(np.fmax(last - before, excess)) if last > before else 0.0
    more_batches = scene.taken_bytes * (1 - most / max(count, 1))
    holds_batches = scene.holds_batches and math.isfinite(scene.taken_bytes)
    rise = math.nan if scene.growth is None else scene.growth.rise
    held = np.fmax(scene.of("reserved_bytes"), scene.of("allocated_bytes"))
    growth_gain = math.inf if rise >= held / 2 else rise
    step_rise = math.nan if scene.step_growth is None else scene.step_growth.rise
    # Where batches grow by little from one to the next, as with a curriculum, their growth so far counts.
    is_larger = last > before and not larger_gain < least
    steps_grew = scene.step_growth is not None and not (is_larger or holds_batches or scene.in_optimizer)
    # Where the steps take more and more, so does the last batch with its outputs, which the loop still holds.
    tensor_grew = scene.growth is not None and not scene.has_more_tensors and not (steps_grew and step_rise >= rise)
    beyond_usual, (here, elsewhere) = scene.beyond_usual_bytes, scene.device_peaks
    more = scene.of(TOTAL) - scene.of("limit_bytes")
    own = scene.of("reserved_bytes") + float(np.nan_to_num(scene.of("outside_pytorch_bytes")))
    unused = scene.unallocated_bytes - float(np.nan_to_num(scene.of("private_pool_bytes")))  # these serve no others
    # The request fits into what is unused and what is free, and most of it into what is unused.
    fits_in_pieces = unused >= max(request - max(scene.room_bytes, 0.0), request / 2)
    event = scene.error.event
    is_raised_again = event.get("allocated_bytes") not in (None, scene.of("allocated_bytes"))
    in_handler = (event.get("in_handler") is True or is_raised_again) and math.isfinite(scene.taken_bytes)
    in_worker = scene.error.slot is not None and math.isfinite(own)
    state = scene.loaded_state_bytes
    # Advice, whose fault, whether the figures support it, its gain, and the memory that it names.
    options: tuple[tuple[Advice, Fault, bool, float, float], ...] = (
        (_TENSORS_GREW, "your code", scene.growth is not None and scene.has_more_tensors, growth_gain, rise),
        (_TENSOR_GREW, "your code", tensor_grew, growth_gain, rise),
        (_LARGER_SHARE, "your settings", scene.is_limited, more, min(more, scene.of("free_bytes"))),
        (_EXPANDABLE_SEGMENTS, "your settings", fits_in_pieces, unused, unused),
        (_END_OTHERS, "outside", others >= request, others, others),
        (_BOUND_BATCHES, "your code", is_larger and not scene.begins_loader, larger_gain, before),
        (_BOUND_STEPS, "your code", steps_grew, step_rise, step_rise),
        (_UNUSUAL_STEP, "your code", beyond_usual > 0 and not in_handler, beyond_usual, beyond_usual),
        (_RELEASE_COPY, "your code", scene.kept_bytes > 0, scene.kept_bytes, scene.kept_bytes),
        (_DISTRIBUTE, "your code", here > elsewhere, here - elsewhere, here - elsewhere),
        (_RELEASE_BATCHES, "your code", holds_batches, more_batches, more_batches),
        (_LEAVE_HANDLER, "your code", in_handler, scene.taken_bytes, scene.taken_bytes),
        (_NO_CUDA_IN_WORKERS, "your code", in_worker, own, own),
        (_RELEASE_STATE, "your code", state > 0, state, state),
    )
    supported = [
        (gain, fault, replace(advice, expected=advice.expected.format(room=size(room))))
        for advice, fault, is_supported, gain, room in options
        if is_supported and not gain < least
    ]
    supported.sort(key=lambda option: -option[0])
    fault = supported[0][1] if supported else "your settings"
    if scene.error.slot is not None:  # a worker takes no steps
        if supported:
            return tuple(advice for _, _, advice in supported), fault
        room = size(own) if math.isfinite(own) else "a part of the device"
        expected = _NO_CUDA_IN_WORKERS.expected.format(room=room)
        return (replace(_NO_CUDA_IN_WORKERS, expected=expected),), "your code"
    last_resort = _SMALLER_MODEL if scene.is_first and not scene.is_caught else _SMALLER_STEP
    last_resort = _SMALLER_FIRST_BATCH if scene.begins_loader else last_resort
    last_resort = _SMALLER_EVALUATION if scene.in_evaluation else last_resort
    last_resort = _SMALLER_STATE if scene.in_optimizer else last_resort
    return (*(advice for _, _, advice in supported), last_resort), fault
