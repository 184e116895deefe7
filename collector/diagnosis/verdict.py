"""Apply all rules to one run. The collector, the report and the app all get their verdict here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from collector.diagnosis.checks import FAILED_RULE, RULE_ERROR, checks_of
from collector.diagnosis.consequences import rises_bytes, without_consequences
from collector.diagnosis.deaths.deaths import find_deaths
from collector.diagnosis.ending import Ending, ending_of
from collector.diagnosis.hangs.hang import find_hangs
from collector.diagnosis.hangs.idle_hang import find_idle_hangs
from collector.diagnosis.loading.caught_errors import find_caught_errors
from collector.diagnosis.loading.names import add_loader_name, without_replaced_settings
from collector.diagnosis.loading.waiting_lines import AwaitedTime, add_waiting_lines, awaited_time
from collector.diagnosis.memory.allocation_sites import add_allocation_sites
from collector.diagnosis.memory.file_descriptors import find_descriptors
from collector.diagnosis.memory.gpu_memory import find_device_growth, find_device_risk
from collector.diagnosis.memory.heap_leaks import find_leaks
from collector.diagnosis.memory.host_oom_risk import find_host_risk
from collector.diagnosis.memory.lasting_processes import find_lasting_processes
from collector.diagnosis.memory.shared_memory import find_shared_memory
from collector.diagnosis.run.lifecycle import Status, lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.diagnosis.stalls.main_thread_pause import find_pauses
from collector.diagnosis.stalls.rank_straggler import find_rank_straggler
from collector.diagnosis.stalls.verdict import find_stalls
from collector.diagnosis.summary import Summary, step_unit, steps_count, summarise
from collector.diagnosis.trust import find_trust, workers_reporting
from collector.findings import KINDS, SEVERITIES, Check, Finding, cannot_tell, fact
from training_harness.redaction import HIDDEN

Value = TypeVar("Value")
Other = TypeVar("Other")

#: Most characters of a run's command in advice.
_LONGEST_COMMAND = 200
#: Words of the command of a built-in job after the interpreter.
_JOB = ["-P", "-m", "training_harness.jobs"]


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
            last_minute has what each process held and did (`last_states`), training processes that had ended before
            included, without earlier_workers_count workers.
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
    command = command_words(tables.manifest)
    judged = tuple(_with_command(finding, command) for finding in lined)
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
    if argv[1:4] == _JOB:
        argv[0] = "python"  # Tidegauge gave the path of its own interpreter
    words = shlex.join(argv)
    is_whole = argv and manifest.get("command") and not any(HIDDEN in word for word in argv)
    return words if is_whole and len(words) <= _LONGEST_COMMAND and "`" not in words else "COMMAND"


def _with_command(finding: Finding, command: str) -> Finding:
    """Return the finding with the run's own command in its advice, to copy and run."""
    old, new = "-- COMMAND", f"-- {command}"
    advice = (
        replace(each, text=each.text.replace(old, new), expected=each.expected.replace(old, new))
        for each in finding.advice
    )
    return replace(finding, advice=tuple(advice))


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
        *_guarded("processes", find_lasting_processes, tables),
        *_guarded("descriptors", find_descriptors, tables),
        *_guarded("shared memory", find_shared_memory, tables),
        *_guarded("stalls", find_stalls, tables),
        *_guarded("caught errors", find_caught_errors, tables),
        *_guarded("pauses", find_pauses, tables),
        *_guarded("ranks", find_rank_straggler, tables),
        *_guarded("trust", find_trust, tables),
    ]
    findings = _unless_damaged(findings, without_replaced_settings, findings, tables)
    findings = without_consequences(findings)
    findings = [add_allocation_sites(finding, tables, running=running) for finding in findings]
    findings = [_unless_damaged(finding, add_loader_name, finding, tables) for finding in findings]
    findings = [replace(finding, fault=finding.fault or KINDS[finding.kind].fault) for finding in findings]
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
    slowdowns come, the costliest first, then what is healthy, and last the findings that cannot tell.
    """
    lost_ratio = finding.value_of("lost_wall_ratio") or 0.0
    group = finding.group
    return (
        SEVERITIES.index(finding.severity),
        finding.kind == "cannot-tell",
        1.0 if finding.is_healthy else lost_ratio and 1 - lost_ratio,
        group != "death",
        finding.consequence_of is not None,
        group != ("memory forecast" if running else "memory leak"),
        -max(rises_bytes(finding), default=0.0),
        -finding.confidence,
    )


def _guarded(name: str, rule: Callable[..., list[Finding]], *arguments: object) -> list[Finding]:
    """Return the findings of a rule. A rule that fails yields a `cannot-tell` finding and stops no other rule."""
    try:
        return rule(*arguments)
    except Exception as error:  # noqa: BLE001
        summary = f"The rule {name!r} failed on this run and has no verdict: {type(error).__name__}: {error}"
        evidence = (fact(RULE_ERROR, repr(error)[:300], "run"), fact(FAILED_RULE, name, "run"))
        return [cannot_tell(summary, *evidence)]
