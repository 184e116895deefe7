"""Find out which findings follow from another one of the same run: they are dropped, or name their cause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from collector.diagnosis.deaths.catalogue import (
    EXPLAIN_SILENCE,
    FIND_CACHE,
    FIND_KEPT,
    FIND_OUTPUTS,
    FIX_CUDA_OOM,
    FIX_HANG,
    FIX_LEAK,
    KILLED,
    READ_STACKS,
    SEE_LINE,
    TIMED_OUT,
    WORKER_KILLED,
)
from collector.diagnosis.deaths.deaths import LAST_OF_WORKER
from collector.diagnosis.memory.file_descriptors import lacked_files
from collector.diagnosis.memory.leak import CONFIRMED
from collector.diagnosis.memory.resources import FIX_GROWTH
from collector.findings import KINDS, Finding, extended
from collector.units import size

#: Host memory in bytes that goes with each tensor held on a device: its objects, its place in the graph, and the
#: freed heap around them that nothing fits into. Measured: 1 KiB where nothing else is allocated, 14 to 18 KiB in a
#: training.
_HOST_BYTES_PER_TENSOR = 32 * 1024
#: Findings that batches from workers cause if a training process keeps them, by themselves or with their graph.
_OF_SHARED_MEMORY = ("shm-leak", "shm-exhaustion-risk")
_OF_DESCRIPTORS = ("fd-leak", "fd-exhaustion-risk")
#: Forecast -> the death that meets its limit.
_DEATHS = {"gpu-oom-risk": "cuda-oom", "host-oom-risk": "host-oom-kill"}


def without_consequences(findings: list[Finding]) -> list[Finding]:
    """Return the findings without those that follow from another one; some stay and name it."""
    seen = (_unless_consequence(finding, findings) for finding in findings)
    return [_with_fix_of_leak(finding, findings) for finding in seen if finding is not None]


def _unless_consequence(finding: Finding, findings: list[Finding]) -> Finding | None:
    """Return a finding, as information or with its cause if it follows from another one; None if it is dropped.

    The pinned cache is host memory of its process, so its growth is not a heap leak as well. Host memory that goes
    with tensors held on a device becomes information; if it is too little for a leak, it is dropped. A forecast is
    dropped once its limit was met, and so is a doubt about it. A process that keeps batches from its workers, alone
    or with their graph, holds their shared memory and descriptors: these leaks become information, and forecasts
    stay. So does /dev/shm that no process is seen to map, where workers of kept iterators live: a forked worker
    holds what its parent had mapped. A forecast of growth by what the optimizers keep becomes information, and so
    does a rank that is late by its pauses. Unused memory in the segments of tensors that are kept becomes
    information, too. A rank that is late by its data loading names what is slow there. A loader with a worker that
    hangs is not healthy. A training that hung until someone ended it ended since it hung. A crash after an error
    of CUDA memory in the same process, with no step in between, names that.
    """
    place = finding.locus.rank, finding.locus.loader
    hanging = [one.locus for one in findings if one.kind == "hang" and one.locus.role == "worker"]
    if finding.is_healthy and any(place == (locus.rank, locus.loader) for locus in hanging):
        return None
    is_leak = finding.kind == "main-heap-leak"
    is_doubt = finding.kind == "cannot-tell" and finding.rate is not None
    is_small = finding.locus.role == "main" and (is_doubt or finding.kind == "bounded-growth")
    is_of_heap = is_small or is_leak
    if is_of_heap and _is_pinned_cache(findings, finding):
        return None
    goes_with_tensors = is_of_heap and _goes_with_tensors(findings, finding)
    if (is_small and goes_with_tensors) or _is_met(findings, finding):
        return None
    if goes_with_tensors:
        return _consequence(finding, "gpu-tensor-leak", "the tensors kept on the GPU")
    if finding.kind == "gpu-fragmentation" and _lies_between_tensors(findings, finding):
        return _consequence(finding, "gpu-tensor-leak", "the tensors kept, since it lies between them")
    if cause := _keeper(findings, finding):
        return _consequence(finding, cause, "what the training process keeps")
    if finding.kind in _OF_SHARED_MEMORY and finding.locus.pid is None and _keeps_workers(findings, finding):
        return _consequence(finding, "fd-leak", "the workers of kept iterators, which hold what they inherited")
    if finding.kind == "rank-straggler" and _is_late_by_pauses(findings, finding):
        cause = "main-thread-pause"
        return extended(
            finding, f"It is late by its pauses: fix {cause} first.", severity="info", consequence_of=cause
        )
    if cause := _slow_loading(findings, finding):
        return extended(finding, f"Fix {cause} of that rank first.", consequence_of=cause)
    if finding.kind == "killed" and finding.severity != "info" and _hung(findings, finding):
        return replace(finding, advice=(FIX_HANG, *finding.advice), consequence_of="hang")
    if READ_STACKS in finding.advice and any(_hangs_on(finding.locus.host, findings)):
        fix, cause = (FIX_HANG, "hang") if _hung(findings, finding) else (SEE_LINE, None)
        rest = (advice for advice in finding.advice if advice != READ_STACKS)
        return replace(finding, advice=(fix, *rest), consequence_of=cause)
    if finding.advice == TIMED_OUT.advice and any(_hangs_on(finding.locus.host, findings)):
        return replace(finding, advice=(EXPLAIN_SILENCE, *finding.advice))
    if finding.kind == "crashed" and _follows_cuda_oom(findings, finding):
        return replace(finding, advice=(FIX_CUDA_OOM, *finding.advice), consequence_of="cuda-oom")
    if _ends_with_optimizers(findings, finding):
        others = tuple(advice for advice in finding.advice if advice not in FIX_GROWTH)
        risk = replace(finding, advice=others, severity="info")
        return extended(risk, "It grows with what the optimizers keep, which ends by itself.")
    return finding


def _hangs_on(host: str | None, findings: list[Finding]) -> Iterator[Finding]:
    """Yield the hangs on a host, also those that are only information."""
    return (one for one in findings if one.kind == "hang" and one.locus.host == host)


def _hung(findings: list[Finding], end: Finding) -> bool:
    """Return whether a process that has ended hung, or a worker or child of it.

    Any process counts where the command as a whole was ended. The end of an earlier attempt has no pid.
    """
    at = end.locus
    is_exit = end.value_of("uncaught_exception_count") is not None
    is_of_command = at.role == "other" or is_exit or end.advice == TIMED_OUT.advice
    hangs = (one.locus for one in _hangs_on(at.host, findings) if one.severity == "critical")
    return (
        at.pid is not None
        and at.role != "collector"
        and any(
            is_of_command or hang.pid == at.pid or (hang.role != "main" and hang.rank in (None, at.rank))
            for hang in hangs
        )
    )


def _follows_cuda_oom(findings: list[Finding], crash: Finding) -> bool:
    """Return whether the process caught an error of CUDA memory, and ended before its next step."""
    errors = (one for one in _in_same_process(findings, "cuda-oom", crash) if one.severity == "warning")
    return any(each.name == "caught" for error in errors for each in error.evidence)


def _consequence(finding: Finding, cause: str, grows_with: str) -> Finding:
    """Return a finding as one that follows from another one; a leak is information then, and a forecast stays."""
    return extended(
        finding,
        f"It grows with {grows_with}: fix {cause} first.",
        severity="info" if finding.group == "memory leak" else finding.severity,
        consequence_of=cause,
    )


def _keeper(findings: list[Finding], of_batches: Finding) -> str | None:
    """Return the kind of the finding that names what keeps the batches behind this one; None if it does itself."""
    is_of_files = of_batches.kind in _OF_DESCRIPTORS and of_batches.value_of("process_shm_rise_bytes") is not None
    if of_batches.locus.role != "main" or not (is_of_files or of_batches.kind in _OF_SHARED_MEMORY):
        return None
    causes = ("main-heap-leak",) if is_of_files else ("main-heap-leak", "fd-leak")
    for kind in causes:
        for cause in _in_same_process(findings, kind, of_batches):
            shares = cause.value_of("process_shm_rise_bytes"), of_batches.value_of("kept_tensors_rise_bytes")
            is_of_batches = kind != "fd-leak" or any(share is not None for share in shares)
            if cause.severity != "info" and is_of_batches:
                return kind
    return None


def _keeps_workers(findings: list[Finding], like: Finding) -> bool:
    """Return whether a training process on the same host keeps workers of earlier iterators."""
    leaks = (finding for finding in findings if finding.kind == "fd-leak" and finding.locus.host == like.locus.host)
    return any(leak.value_of("kept_workers_count") is not None for leak in leaks)


def _is_late_by_pauses(findings: list[Finding], late: Finding) -> bool:
    """Return whether the pauses of a rank cost half of the time, or more, for which the others wait for it.

    The time between epochs is that of all ranks, and makes none late.
    """
    of_steps = ("pause_distance_count", "saving_count", "compilation_count")
    pauses = [
        pause
        for pause in _in_same_process(findings, "main-thread-pause", late)
        if any(pause.value_of(name) is not None for name in of_steps)
    ]
    costs = (pause.value_of("lost_seconds") or 0.0 for pause in pauses)
    return sum(costs) >= (late.value_of("lost_seconds") or math.inf) / 2


def _slow_loading(findings: list[Finding], late: Finding) -> str | None:
    """Return the kind of the finding on the data loading of a rank that is late since it waits for its data."""
    if late.kind != "rank-straggler" or late.limited_by != "data":
        return None
    place = late.locus.host, late.locus.rank
    of_rank = (one for one in findings if one.group == "data loading" and one.severity != "info")
    return next((one.kind for one in of_rank if (one.locus.host, one.locus.rank) == place), None)


def _ends_with_optimizers(findings: list[Finding], risk: Finding) -> bool:
    """Return whether a forecast is of growth that ends when each parameter has its gradient and state."""
    if risk.kind not in ("gpu-oom-risk", "host-oom-risk") or risk.rate is None:
        return False
    place, least = (risk.locus.host, risk.locus.device), CONFIRMED * risk.rate.value
    kept = (finding for finding in findings if finding.value_of("optimizer_rise_bytes") is not None)
    return any(
        (each.locus.host, each.locus.device) == place and each.rate is not None and each.rate.value >= least
        for each in kept
    )


def _is_pinned_cache(findings: list[Finding], leak: Finding) -> bool:
    caches = _in_same_process(findings, "pinned-cache-growth", leak)
    return any(c.rate and leak.rate and c.rate.value >= CONFIRMED * leak.rate.value for c in caches)


def _goes_with_tensors(findings: list[Finding], leak: Finding) -> bool:
    rise_bytes = next(iter(rises_bytes(leak)), 0.0)
    counts = (
        tensors.value_of("allocation_rise_count") for tensors in _in_same_process(findings, "gpu-tensor-leak", leak)
    )
    return any(count and rise_bytes <= _HOST_BYTES_PER_TENSOR * count for count in counts)


def _lies_between_tensors(findings: list[Finding], holes: Finding) -> bool:
    """Return whether tensors that are kept there grow as fast or faster: unused memory lies in their segments."""
    leaks = (leak for leak in findings if leak.kind == "gpu-tensor-leak" and leak.locus == holes.locus)
    return any(leak.rate and holes.rate and leak.rate.value >= holes.rate.value for leak in leaks)


def _in_same_process(findings: list[Finding], kind: str, like: Finding) -> Iterator[Finding]:
    place = like.locus.host, like.locus.pid
    return (
        finding for finding in findings if finding.kind == kind and (finding.locus.host, finding.locus.pid) == place
    )


def _with_fix_of_leak(death: Finding, findings: list[Finding]) -> Finding:
    """Return a death for lack of memory with the leak of its process as the first thing to fix, if it leaked.

    A kill by an unknown sender may be one. Where the exception came from a worker, the memory was refused to that.
    The same holds for /dev/shm, which a host's processes share, and for open files.
    """
    if death.kind == "cuda-oom":
        return _with_fix_of_library(death, findings)
    if _lacked_shared_memory(death):
        of_host = (leak for leak in findings if leak.locus.host == death.locus.host and _fills_shared_memory(leak))
        return _fixed_first(death, next(of_host, None), findings, "the use of /dev/shm")
    if lacked_files(death):
        of_files = (leak for leak in _in_same_process(findings, "fd-leak", death) if leak.severity != "info")
        return _fixed_first(death, next(of_files, None), findings, "the number of open files")
    is_refused = _is_refused(death)
    if death.kind != "host-oom-kill" and not is_refused and not _is_unexplained_kill(death):
        return death
    at, process = death.locus, "this process"
    places = {replace(at, worker=worker, pid=at.pid if at.role == "main" else None) for worker in (at.worker, None)}
    leaks = [leak for leak in findings if leak.locus in places]
    if is_refused and any(item.window == LAST_OF_WORKER for item in death.evidence):
        process = "the worker"
        of_training = (leak for leak in findings if (leak.locus.host, leak.locus.rank) == (at.host, at.rank))
        leaks = [leak for leak in of_training if leak.kind == "worker-heap-leak"]
    leaks = [
        leak for leak in leaks if leak.group == "memory leak" and leak.severity != "info" and _takes_memory(leak)
    ]
    if not leaks:
        return death
    fix = replace(FIX_LEAK, text=FIX_LEAK.text.format(kind=leaks[0].kind, process=process))
    rest = (advice for advice in death.advice if advice not in (FIND_KEPT, FIND_OUTPUTS, FIND_CACHE))
    return replace(death, fault="your code" if is_refused else death.fault, advice=(fix, *rest))


def _lacked_shared_memory(death: Finding) -> bool:
    return death.kind == "shm-bus-error" or death.value_of("shm_used_peak_bytes") is not None


def _fixed_first(death: Finding, leak: Finding | None, findings: list[Finding], grown: str) -> Finding:
    """Return a death with the advice to fix a leak first, or what that follows from, if there is one.

    Its fault is that of the leak. A `shm-leak` has none: another program may have filled /dev/shm.
    """
    if leak is None:
        return death
    keeper = _keeper(findings, leak)
    fix = replace(FIX_LEAK, text=f"Fix {keeper or leak.kind} first: {grown} grew until the end")
    fault = leak.fault or KINDS[keeper or leak.kind].fault
    return replace(death, fault=fault, advice=(fix, *death.advice))


def _fills_shared_memory(leak: Finding) -> bool:
    """Return whether a leak takes ever more of /dev/shm."""
    is_of_batches = leak.kind == "fd-leak" and leak.value_of("process_shm_rise_bytes") is not None
    return leak.severity != "info" and (leak.kind == "shm-leak" or is_of_batches)


def _takes_memory(leak: Finding) -> bool:
    """Return whether a leak takes memory: one of open files does if they are batches, or pipes of workers."""
    names = ("process_shm_rise_bytes", "kept_workers_count")
    return leak.kind != "fd-leak" or any(leak.value_of(name) is not None for name in names)


def _with_fix_of_library(death: Finding, findings: list[Finding]) -> Finding:
    """Return the error with the advice to fix growth outside PyTorch first, if that grew more than tensors.

    Growth that is smaller than the request would not have made room for it.
    """
    least = max(death.value_of(name) or 0.0 for name in ("allocated_rise_bytes", "requested_bytes"))
    for leak in findings:
        is_there = (leak.locus.host, leak.locus.device) == (death.locus.host, death.locus.device)
        if leak.kind != "gpu-non-pytorch-growth" or leak.severity == "info" or not is_there:
            continue
        if (rise := max(rises_bytes(leak))) > least:
            text = f"Fix {leak.kind} first: memory outside PyTorch grew by {size(rise)} until the error"
            return extended(death, "", advice=(replace(FIX_LEAK, text=text),), fault=leak.fault)
    return death


def _is_unexplained_kill(death: Finding) -> bool:
    """Return whether an unknown sender killed a process: a memory guard does so to one that grows."""
    texts = [advice.text for usual in (KILLED, WORKER_KILLED) for advice in usual.advice]
    return death.severity == "critical" and any(advice.text in texts for advice in death.advice)


def _is_refused(death: Finding) -> bool:
    """Return whether a process ended since it was refused memory that the host had."""
    return death.kind == "crashed" and death.value_of("memory_available_bytes") is not None


def _is_met(findings: list[Finding], risk: Finding) -> bool:
    """Return True if a finding is about a limit, and the training died of it, or of a nearer one of its own."""
    if risk.kind in (_OF_SHARED_MEMORY[1], _OF_DESCRIPTORS[1]):
        return risk.rate is not None and any(_meets(finding, risk) for finding in findings)
    is_doubt = risk.kind == "cannot-tell" and risk.value_of("alloc_retry_steps_count") is not None
    place, kind = (risk.locus.host, risk.locus.device), "cuda-oom" if is_doubt else _DEATHS.get(risk.kind)
    is_of_host = risk.kind == "host-oom-risk"
    deaths = (
        finding
        for finding in findings
        if finding.severity == "critical" and (finding.kind == kind or (is_of_host and _is_refused(finding)))
    )
    return any((death.locus.host, death.locus.device) == place for death in deaths)


def _meets(death: Finding, risk: Finding) -> bool:
    """Return whether a process, or a worker of it, met the limit of files or of /dev/shm of a forecast."""
    at, of = death.locus, risk.locus
    if death.severity != "critical" or at.host != of.host:
        return False
    if risk.kind in _OF_SHARED_MEMORY:
        return _lacked_shared_memory(death)
    return lacked_files(death) and (at.pid == of.pid or (of.role == "worker" and at.rank == of.rank))


def rises_bytes(finding: Finding) -> list[float]:
    """Return the rises in bytes that a finding has as evidence."""
    return [float(item.value) for item in finding.evidence if item.name.endswith("_rise_bytes")]
