"""Apply all rules to one run. The collector, the report and the app all get their verdict here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from collector.diagnosis.checks import checks_of
from collector.diagnosis.deaths import FIX_LEAK, find_deaths, find_hangs, find_idle_hangs
from collector.diagnosis.ending import Ending, ending_of
from collector.diagnosis.faults import add_fault
from collector.diagnosis.loading.caught_errors import find_caught_errors
from collector.diagnosis.loading.names import add_loader_name, without_replaced_settings
from collector.diagnosis.loading.waiting_lines import AwaitedTime, add_waiting_lines, awaited_time
from collector.diagnosis.memory import (
    add_allocation_sites,
    find_descriptors,
    find_device_growth,
    find_device_risk,
    find_host_risk,
    find_leaks,
    find_shared_memory,
)
from collector.diagnosis.memory.leak import CONFIRMED
from collector.diagnosis.run import RunTables, Status, lifecycle_of
from collector.diagnosis.stalls.main_thread_pause import find_pauses
from collector.diagnosis.stalls.rank_straggler import find_rank_straggler
from collector.diagnosis.stalls.verdict import find_stalls
from collector.diagnosis.summary import Summary, step_unit, steps_count, summarise
from collector.diagnosis.trust import find_trust, workers_reporting
from collector.findings import KINDS, SEVERITIES, Check, Finding, cannot_tell, fact
from training_harness.redaction import HIDDEN

Value = TypeVar("Value")
Other = TypeVar("Other")
#: Host memory in bytes that goes with each tensor held on a device: its objects, its place in the graph, and the
#: freed heap around them that nothing fits into. Measured: 1 KiB where nothing else is allocated, 14 to 18 KiB in a
#: training.
_HOST_BYTES_PER_TENSOR = 32 * 1024
#: Findings that batches from workers cause if a training process keeps them, by themselves or with their graph.
_OF_SHARED_MEMORY = ("shm-leak", "shm-exhaustion-risk")
_OF_DESCRIPTORS = ("fd-leak", "fd-exhaustion-risk")
#: Forecast -> the death that meets its limit.
_DEATHS = {"gpu-oom-risk": "cuda-oom", "host-oom-risk": "host-oom-kill"}

#: Most characters of a run's command in advice.
_LONGEST_COMMAND = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state of a run, and all findings on it.

    Attributes:
        findings: most severe first. Within a severity, threats to the run come before slowdowns, and these go by
            cost.
        checks: everything that was looked at, whether it led to a finding or not.
        exit_status: the command's exit code, -n for signal n; None if it runs or its end was not seen.
        attempts: how many times the launcher started the ranks.
        steps: steps of the last attempt. Ranks step together, so they are counted on one rank.
        step_unit: what ends a step, a word of `records.STEP_UNITS`; None without steps.
        watch_ended: True if a watch was given up while its process went on.
        batches: batches yielded in all training processes.
        workers_reporting: (k, n): k of the n workers of every loader's newest epoch report.
        summary: peak, throughput, data_wait_ratio and overhead, None where not measured. If the run died,
            last_minute has what each process held and did (`last_states`), without earlier_workers_count workers.
        ending: how the run died, None if it goes on or ended normally.
        awaited: stacks behind findings on waiting, in the order of the findings, where they were sampled.
    """

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    status: Status
    exit_status: int | None
    attempts: int
    steps: int
    step_unit: str | None
    watch_ended: bool
    batches: int
    duration_seconds: float | None
    workers_reporting: tuple[int, int]
    summary: Summary
    ending: Ending | None = None
    awaited: tuple[AwaitedTime, ...] = ()


def diagnose(tables: RunTables) -> Verdict:
    """Return the verdict on a run. Pure: the same tables give the same verdict."""
    life = lifecycle_of(tables)
    status = life.status()
    findings = _findings(tables, running=status == "running")
    awaited = [_unless_damaged(None, awaited_time, finding, tables) for finding in findings]
    cwd = tables.manifest.get("cwd")
    lined = (add_waiting_lines(*both, cwd) for both in zip(findings, awaited, strict=True))
    judged = tuple(_with_command(finding, command_words(tables.manifest)) for finding in lined)
    return Verdict(
        findings=judged,
        checks=checks_of(tables, judged),
        status=status,
        exit_status=life.exit_status,
        attempts=life.attempts,
        steps=steps_count(tables),
        step_unit=step_unit(tables),
        watch_ended=life.watch_ended,
        batches=tables.rows_count("batch"),
        duration_seconds=life.wall_seconds,
        workers_reporting=workers_reporting(tables),
        summary=summarise(tables, status),
        ending=_unless_damaged(None, ending_of, tables, judged),
        awaited=tuple(filter(None, awaited)),
    )


def command_words(manifest: Mapping[str, Any]) -> str:
    """Return the command that `tidegauge run` started, as a shell takes it; COMMAND if it cannot be repeated so."""
    argv = list(map(str, manifest.get("argv") or ()))
    words = shlex.join(argv)
    is_whole = argv and manifest.get("command") and not any(HIDDEN in word for word in argv)
    return words if is_whole and len(words) <= _LONGEST_COMMAND and "`" not in words else "COMMAND"


def _with_command(finding: Finding, command: str) -> Finding:
    """Return the finding with the run's own command in its advice, to copy and run."""
    advice = tuple(
        replace(
            each,
            text=each.text.replace("-- COMMAND", f"-- {command}"),
            expected=each.expected.replace("-- COMMAND", f"-- {command}"),
        )
        for each in finding.advice
    )
    return replace(finding, advice=advice)


def _findings(tables: RunTables, *, running: bool) -> tuple[Finding, ...]:
    leaks = _guarded("leaks", find_leaks, tables)
    copies = [finding for finding in leaks if finding.kind == "copy-on-read-growth"]
    findings = [
        *_guarded("deaths", find_deaths, tables),
        *_guarded("hangs", find_hangs, tables),
        *_guarded("hangs without hooks", find_idle_hangs, tables),
        *_guarded("risk", find_host_risk, tables, copies),
        *leaks,
        *_guarded("device growth", find_device_growth, tables),
        *_guarded("device risk", find_device_risk, tables),
        *_guarded("descriptors", find_descriptors, tables),
        *_guarded("shared memory", find_shared_memory, tables),
        *_guarded("stalls", find_stalls, tables),
        *_guarded("caught errors", find_caught_errors, tables),
        *_guarded("pauses", find_pauses, tables),
        *_guarded("ranks", find_rank_straggler, tables),
        *_guarded("trust", find_trust, tables),
    ]
    findings = _unless_damaged(findings, without_replaced_settings, findings, tables)
    findings = [_with_fix_of_leak(finding, findings) for finding in without_consequences(findings)]
    findings = [add_fault(add_allocation_sites(finding, tables, running=running)) for finding in findings]
    findings = [_unless_damaged(finding, add_loader_name, finding, tables) for finding in findings]
    return tuple(sorted(findings, key=lambda finding: _order(finding, running=running)))


def _unless_damaged(otherwise: Other, compute: Callable[..., Value], *arguments: object) -> Value | Other:
    """Return what `compute` returns, or another value if a damaged event makes it raise."""
    try:
        return compute(*arguments)
    except (TypeError, ValueError, KeyError, IndexError):
        return otherwise


def _order(finding: Finding, *, running: bool) -> tuple[int, bool, float, bool, bool, bool, float, float]:
    """Return the sort key of a finding: most severe first.

    Within a severity, threats to the run come first: deaths, then forecasts, then growth, the largest first. Once
    the run is over, growth comes before the forecast that rests on it. Consequences come after their cause. Then
    slowdowns come, the costliest first, and last the findings that cannot tell.
    """
    lost_ratio = finding.value_of("lost_wall_ratio") or 0.0
    group = KINDS[finding.kind]
    return (
        SEVERITIES.index(finding.severity),
        finding.kind == "cannot-tell",
        lost_ratio and 1 - lost_ratio,
        group != "death",
        finding.consequence_of is not None,
        group != ("memory forecast" if running else "memory leak"),
        -max(_rises_bytes(finding), default=0.0),
        -finding.confidence,
    )


def _rises_bytes(finding: Finding) -> list[float]:
    return [float(item.value) for item in finding.evidence if item.name.endswith("_rise_bytes")]


def _guarded(name: str, rule: Callable[..., list[Finding]], *arguments: object) -> list[Finding]:
    """Return the findings of a rule. A rule that fails yields a `cannot-tell` finding and stops no other rule."""
    try:
        return rule(*arguments)
    except Exception as error:  # noqa: BLE001
        summary = f"The rule {name!r} failed on this run and has no verdict: {type(error).__name__}: {error}"
        return [cannot_tell(summary, fact("rule_error", repr(error)[:300], "run"))]


def without_consequences(findings: list[Finding]) -> list[Finding]:
    """Return the findings without those that follow from another one; some stay and name it.

    The pinned cache is host memory of its process, so its growth is not a heap leak as well. Host memory that goes
    with tensors held on a device becomes information; if it is too little for a leak, it is dropped. A forecast is
    dropped once its limit was met, and so is a doubt about it. A process that keeps batches from its workers, alone
    or with their graph, holds their shared memory and descriptors: these leaks become information, and forecasts
    stay. A forecast of growth by what the optimizers keep becomes information.
    """
    remaining = []
    for finding in findings:
        is_small = finding.kind == "bounded-growth" or (finding.kind == "cannot-tell" and finding.rate is not None)
        is_small = is_small and finding.locus.role == "main"
        if (is_small or finding.kind == "main-heap-leak") and _is_pinned_cache(findings, finding):
            continue
        if is_small and _goes_with_tensors(findings, finding):
            continue
        if _is_met(findings, finding):
            continue
        if finding.kind == "main-heap-leak" and _goes_with_tensors(findings, finding):
            remaining.append(_consequence(finding, "gpu-tensor-leak", "the tensors kept on the GPU"))
        elif cause := _keeper(findings, finding):
            remaining.append(_consequence(finding, cause, "what the training process keeps"))
        elif _ends_with_optimizers(findings, finding):
            told = f"{finding.summary} It grows with what the optimizers keep, which ends by itself."
            remaining.append(replace(finding, severity="info", summary=told))
        else:
            remaining.append(finding)
    return remaining


def _consequence(finding: Finding, cause: str, grows_with: str) -> Finding:
    """Return a finding as one that follows from another one; a leak is information then, and a forecast stays."""
    return replace(
        finding,
        severity="info" if KINDS[finding.kind] == "memory leak" else finding.severity,
        summary=f"{finding.summary} It grows with {grows_with}: fix {cause} first.",
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
            is_of_batches = kind != "fd-leak" or cause.value_of("process_shm_rise_bytes") is not None
            if cause.severity != "info" and is_of_batches:
                return kind
    return None


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
    rise_bytes = next(iter(_rises_bytes(leak)), 0.0)
    counts = (
        tensors.value_of("allocation_rise_count") for tensors in _in_same_process(findings, "gpu-tensor-leak", leak)
    )
    return any(count and rise_bytes <= _HOST_BYTES_PER_TENSOR * count for count in counts)


def _in_same_process(findings: list[Finding], kind: str, like: Finding) -> Iterator[Finding]:
    place = like.locus.host, like.locus.pid
    return (
        finding for finding in findings if finding.kind == kind and (finding.locus.host, finding.locus.pid) == place
    )


def _with_fix_of_leak(death: Finding, findings: list[Finding]) -> Finding:
    """Return a kill for lack of memory with the leak of its process as the first thing to fix, if it leaked."""
    if death.kind != "host-oom-kill":
        return death
    at = death.locus
    places = {replace(at, worker=worker, pid=at.pid if at.role == "main" else None) for worker in (at.worker, None)}
    leaks = (finding for finding in findings if finding.locus in places and KINDS[finding.kind] == "memory leak")
    advice = tuple(
        replace(FIX_LEAK, text=FIX_LEAK.text.format(kind=leak.kind)) for leak in leaks if leak.severity != "info"
    )
    return replace(death, advice=(*advice[:1], *death.advice))


def _is_met(findings: list[Finding], risk: Finding) -> bool:
    """Return True if a finding is about a limit, and the training died of it."""
    is_doubt = risk.kind == "cannot-tell" and risk.value_of("alloc_retry_steps_count") is not None
    place, kind = (risk.locus.host, risk.locus.device), "cuda-oom" if is_doubt else _DEATHS.get(risk.kind)
    deaths = (finding for finding in findings if finding.kind == kind and finding.severity == "critical")
    return any((death.locus.host, death.locus.device) == place for death in deaths)
