"""All rules over one run: the one place where the collector, the report and the app get their verdict from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from collector.diagnosis.consequences import without_consequences
from collector.diagnosis.deaths import find_deaths
from collector.diagnosis.descriptors import find_descriptors
from collector.diagnosis.device_growth import find_device_growth
from collector.diagnosis.device_risk import find_device_risk
from collector.diagnosis.findings import KINDS, SEVERITIES, Evidence, Finding
from collector.diagnosis.holders import with_holders
from collector.diagnosis.last_minute import as_records, last_states
from collector.diagnosis.leaks import find_leaks
from collector.diagnosis.lifecycle import Lifecycle, Status
from collector.diagnosis.naming import named
from collector.diagnosis.pauses import find_pauses
from collector.diagnosis.ranks import find_rank_straggler
from collector.diagnosis.risk import find_host_risk
from collector.diagnosis.shared_memory import find_shared_memory
from collector.diagnosis.stalls import find_stalls
from collector.diagnosis.summary import step_unit, steps_count, summarise
from collector.diagnosis.tables import RunTables
from collector.diagnosis.trust import find_trust, workers_reporting


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of a run.

    Attributes:
        findings: most severe first; of the same severity what slows the run by its cost, after what endangers it.
        exit_status: the command's exit code, -n for signal n; None if it runs or nobody saw it end.
        attempts: how many times the launcher started the ranks.
        steps: of the last attempt; ranks step together, so those of one rank.
        step_unit: what ends a step, a word of `records.STEP_UNITS`; None without steps.
        watch_ended: a watch was given up while its process went on.
        batches: yielded in all training processes.
        workers_reporting: (k, n): k of the n workers of every loader's newest epoch report.
        summary: peak, throughput, data_wait_ratio and overhead; what was not measured is None. And last_minute: of
            a run that died, what each process held and did (`last_states`).

    """

    findings: tuple[Finding, ...]
    status: Status
    exit_status: int | None
    attempts: int
    steps: int
    step_unit: str | None
    watch_ended: bool
    batches: int
    duration_seconds: float | None
    workers_reporting: tuple[int, int]
    summary: dict[str, Any]


def diagnose(tables: RunTables) -> Verdict:
    """The verdict on a run. Pure: the same tables give the same verdict."""
    life = Lifecycle(tables)
    status = life.status()
    return Verdict(
        findings=_findings(tables, running=status == "running"),
        status=status,
        exit_status=life.exit_status,
        attempts=life.attempts,
        steps=steps_count(tables),
        step_unit=step_unit(tables),
        watch_ended=life.watch_ended,
        batches=tables.rows_count("batch"),
        duration_seconds=life.wall_seconds,
        workers_reporting=workers_reporting(tables),
        summary=summarise(tables)
        | {"last_minute": as_records(last_states(tables)) if status in ("failed", "killed") else []},
    )


def _findings(tables: RunTables, *, running: bool) -> tuple[Finding, ...]:
    leaks = _guarded("leaks", lambda: find_leaks(tables))
    copies = [finding for finding in leaks if finding.kind == "copy-on-read-growth"]
    found = [
        *_guarded("deaths", lambda: find_deaths(tables)),
        *_guarded("risk", lambda: find_host_risk(tables, copies)),
        *leaks,
        *_guarded("device growth", lambda: find_device_growth(tables)),
        *_guarded("device risk", lambda: find_device_risk(tables)),
        *_guarded("descriptors", lambda: find_descriptors(tables)),
        *_guarded("shared memory", lambda: find_shared_memory(tables)),
        *_guarded("stalls", lambda: find_stalls(tables)),
        *_guarded("pauses", lambda: find_pauses(tables)),
        *_guarded("ranks", lambda: find_rank_straggler(tables)),
        *_guarded("trust", lambda: find_trust(tables)),
    ]
    found = without_consequences(found)
    found = [with_holders(finding, tables, running=running) for finding in found]
    return tuple(sorted((_named(finding, tables) for finding in found), key=_order))


def _named(finding: Finding, tables: RunTables) -> Finding:
    """Return the finding with the name of its loader; without it where an event is damaged."""
    try:
        return named(finding, tables)
    except (TypeError, ValueError, KeyError, IndexError):
        return finding


def _order(finding: Finding) -> tuple[int, bool, float, bool, bool, float, float]:
    """Most severe first; of the same severity what endangers the run, then what slows it, dearest first.

    Of what endangers it deaths come first, then forecasts, then what grows, by its size. What cannot be told comes
    last of its severity.
    """
    lost = finding.value_of("lost_wall_ratio") or 0.0
    group = KINDS[finding.kind]
    grown = [float(each.value) for each in finding.evidence if each.name.endswith("_rise_bytes")]
    return (
        SEVERITIES.index(finding.severity),
        finding.kind == "cannot-tell",
        lost and 1 - lost,
        group != "death",
        group != "memory forecast",
        -max(grown, default=0.0),
        -finding.confidence,
    )


def _guarded(name: str, rule: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a rule; a rule that fails says so and leaves the others their word."""
    try:
        return rule()
    except Exception as error:  # noqa: BLE001
        return [
            Finding(
                kind="cannot-tell",
                severity="info",
                confidence=1.0,
                summary=f"The rule {name!r} failed on this run and has no verdict: {type(error).__name__}: {error}",
                evidence=(Evidence(name="rule_error", value=repr(error)[:300], unit="text", n=1, window="run"),),
            )
        ]
