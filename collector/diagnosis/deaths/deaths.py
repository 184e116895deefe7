"""Find processes that died: one finding per victim, none for those that merely followed.

Apart from kills and crashes, these are workers that died of SIGBUS because /dev/shm was full, and failed attempts
after which the launcher (torchrun) restarted all ranks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collector.diagnosis.deaths.cuda_oom import ended_by_cuda_oom, find_cuda_ooms
from collector.diagnosis.deaths.dead_workers import Workers
from collector.diagnosis.deaths.host_oom_kill import end_window, oom_kill, oom_victims
from collector.diagnosis.deaths.victims import Victim, main_victim, merge_workers, worker_victim
from collector.diagnosis.memory.shared_memory import (
    ROOM_ADVICE,
    largest_batch_bytes,
    shared_memory_samples,
    shared_memory_usage,
    workers_count,
)
from collector.diagnosis.run.columns import SECOND_NS, key_of, origin_ns, peak, whole
from collector.diagnosis.run.lifecycle import SIGINT, SIGKILL, Lifecycle, is_interrupt
from collector.diagnosis.run.processes import fact, last_memory, last_step, rank_of, signal_name
from collector.diagnosis.run.tables import RunTables
from collector.findings import Advice, Finding, Limit, Locus, Severity
from collector.store import ProcessKey
from collector.units import plain_text, size

#: Parts of an exception that a worker passed on (torch/_utils.py, ExceptionWrapper): its mark, a traceback line.
_FROM_WORKER = "in DataLoader worker process"
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_CRASH_SIGNALS = frozenset({4, 6, 7, 8, 11})  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
_SIGBUS = 7


def find_deaths(tables: RunTables) -> list[Finding]:
    """Find every victim of a kill, every crash that does not follow from one, and a killed collector."""
    life = Lifecycle(tables)
    workers = [worker_victim(tables, life, worker) for worker in Workers(life).killed()]
    mains = [main_victim(tables, life, key, signal) for key, signal in life.killed_mains.items()]
    victims = [*workers, *mains]
    # No process recorded how these ended; the kernel's count of kills may explain it.
    survived = life.mains if life.exit_status == 0 else ()  # by the command, as a sweep survives one of its trials
    gone = [
        key
        for key in (*life.watched, *life.replaced, *survived)
        if life.is_dead(key) and key not in life.recorded_exits
    ]
    oom = oom_victims(tables, [*victims, *(main_victim(tables, life, key, None) for key in gone)])
    findings = [oom_kill(tables, victim) for victim in merge_workers(oom)]
    bus = bus_victims(tables, victims)
    findings += [bus_error(tables, victim) for victim in merge_workers(bus)]
    findings += [_kill(victim) for victim in merge_workers([v for v in victims if v not in (*oom, *bus)])]
    findings += find_cuda_ooms(tables)
    findings += _crashes(tables, life, victims)
    findings += [_collector_killed(life, event) for event in life.collectors_killed()]
    return findings + find_restarts(life)


def _kill(victim: Victim) -> Finding:
    name = signal_name(victim.signal)
    by = f"by {name}" if name else "without farewell, as by SIGKILL or os._exit"
    if name is None and victim.exit_code is not None:
        by = f"abruptly with exit code {victim.exit_code}, as by os._exit"
    is_worker = victim.locus.role == "worker"
    crashed = not is_worker and victim.signal in _CRASH_SIGNALS
    kind = "worker-killed" if is_worker else "crashed" if crashed else "killed"
    severity: Severity = "warning" if victim.went_on else "critical"
    if not is_worker and victim.signal not in (None, SIGKILL) and not crashed:
        severity = "info" if victim.signal == SIGINT else "warning"
    return Finding(
        kind=kind,
        severity=severity,
        confidence=0.97 if victim.signal is not None else 0.85,
        summary=f"{victim.what[0].upper()}{victim.what[1:]} ended {by}.{victim.went_on}",
        locus=victim.locus,
        since_step=victim.since_step,
        evidence=victim.evidence,
        advice=_kill_advice(victim, crashed),
    )


def _kill_advice(victim: Victim, crashed: bool) -> tuple[Advice, ...]:
    if victim.signal == SIGINT:
        return ()
    if crashed or victim.signal in _CRASH_SIGNALS:
        return (
            Advice(
                text="Run once more with PYTHONFAULTHANDLER=1; for SIGBUS look at the size of /dev/shm",
                expected="the Python stack at the moment of the fault",
            ),
        )
    if victim.locus.role == "worker":
        return (
            Advice(
                text="No out-of-memory kill was counted: look for who sent the signal (a job scheduler, "
                "an operator, "
                "a memory guard such as earlyoom or systemd-oomd in the system log)",
                expected="the cause; the training lost the rest of its epoch"
                if victim.went_on
                else "the cause; the training ended because this worker did",
            ),
        )
    return (
        Advice(
            text="Look for who sent the signal: the job scheduler's time or memory limit, an operator, "
            "the system log",
            expected="the cause; no out-of-memory kill was counted",
        ),
    )


def _crashes(tables: RunTables, life: Lifecycle, victims: Sequence[Victim]) -> list[Finding]:
    """Find the uncaught exception that ended the training; the first one is the cause of the rest.

    Exceptions of the processes that started the training count too, unless they report a victim's end.
    """
    if life.exit_status == 0:
        return []
    victim_mains = {victim.main for victim in victims}
    causes = [
        (key, event)
        for key, event in life.exceptions_above.items()
        if key not in victim_mains
        and (key in life.mains or not victims)
        and not is_interrupt(event)
        and (life.exit_status is not None or life.is_dead(key) or key in life.recorded_exits)
    ]
    causes.sort(key=lambda item: item[1]["time_ns"])
    if victims and len(life.mains) > 1:
        causes = []  # a rank that lost its peer raises too
    explained = ended_by_cuda_oom(tables)
    findings = [_crash(tables, life, key, event) for key, event in causes[:1] if key not in explained]
    code = life.exit_status
    if not (findings or victims or explained) and code is not None and code > 0 and life.fatal_signal is None:
        findings += _failed_exit(tables, life, code)
    return findings


def _crash(tables: RunTables, life: Lifecycle, key: ProcessKey, event: Mapping[str, Any]) -> Finding:
    message = plain_text(str(event.get("message") or "")).strip()
    lines = message.splitlines() or [""]
    # An exception of another process quotes its traceback, whose last line is the exception.
    is_quoted = event.get("type") == "ProcessRaisedException" or _FROM_WORKER in lines[0]
    headline = lines[-1 if is_quoted else 0]
    name = life.name(key)
    evidence = [
        fact("exception", f"{event.get('type')}: {message}"[:300], "uncaught", unit="text"),
        fact(
            "exception_after_seconds",
            round((event["time_ns"] - origin_ns(life.tables)) / SECOND_NS, 3),
            "since the run's first record",
            unit="seconds",
        ),
    ]
    if life.exit_status is not None:
        evidence.append(fact("exit_status", life.exit_status, "of the command", unit="status"))
    return Finding(
        kind="crashed",
        severity="critical",
        confidence=0.97,
        summary=f"{name[0].upper()}{name[1:]} ended with {event.get('type')}{_at(event)}: {headline}"[:300],
        locus=Locus(host=key[0], rank=rank_of(tables, key), role=life.role(key), pid=key[1]),
        since_step=last_step(tables, key),
        evidence=(*evidence, *last_memory(tables, key)),
        advice=(
            Advice(
                text=f"Read the traceback in events/{key[0]}.{key[1]}.jsonl in the run's folder",
                expected="the calls that led to the line that raised",
            ),
        ),
    )


def _at(event: Mapping[str, Any]) -> str:
    """Return the line at which an exception was raised, in the worker if there: ` at train.py:37, in main`."""
    site = event.get("site")
    if _FROM_WORKER in str(event.get("message")):
        frames = [frame for frame in _FRAME.findall(str(event["message"])) if "/site-packages/" not in frame[0]]
        site = "{}:{}, in {}".format(*frames[-1]) if frames else site
    return f" at {os.path.basename(str(site))}" if site else ""


def _failed_exit(tables: RunTables, life: Lifecycle, code: int) -> list[Finding]:
    if not life.mains:
        return []
    key = life.mains[0]
    return [
        Finding(
            kind="crashed",
            severity="critical",
            confidence=0.8,
            summary=f"The command ended with exit status {code}, without an uncaught Python exception.",
            locus=Locus(host=key[0], role="main", pid=key[1]),
            since_step=last_step(tables, key),
            evidence=(
                fact("exit_status", code, "of the command", unit="status"),
                fact("uncaught_exception_count", len(life.exceptions_above), "events of the training processes"),
            ),
            advice=(Advice(text="Look at the end of the command's own output", expected="the reason it gave"),),
        )
    ]


def _collector_killed(life: Lifecycle, event: Mapping[str, Any]) -> Finding:
    stops = [e for e in life.tables.events_of("collector-stop") if key_of(e) == key_of(event)]
    resumed = [
        e for e in life.tables.events_of("collector-start") if e.get("resumed") and e["time_ns"] > event["time_ns"]
    ]
    return Finding(
        kind="killed",
        severity="warning",
        confidence=0.95,
        summary=f"Tidegauge's collector (pid {event.get('pid')}) was killed; the training is unharmed and "
        "its journals go on.",
        locus=Locus(host=event.get("host"), role="collector", pid=whole(event.get("pid"))),
        evidence=(
            fact("collector_stop_count", len(stops), "events after its start"),
            fact("resumed_count", len(resumed), "events")
            if resumed
            else fact("collector_alive", 0, "at the time of reading", unit="bool"),
        ),
        advice=(
            Advice(
                text="`tidegauge collect latest`",
                expected="sampling of processes and host goes on; steps, batches and fetches were not interrupted",
            ),
        ),
    )


def find_restarts(life: Lifecycle) -> list[Finding]:
    """Return one warning for each attempt except the last."""
    attempts: dict[int, list[ProcessKey]] = {}
    for key, attempt in life.replaced.items():
        attempts.setdefault(attempt, []).append(key)
    return [_restart(life, attempt, attempts[attempt]) for attempt in sorted(attempts)]


def _restart(life: Lifecycle, attempt: int, ranks: list[ProcessKey]) -> Finding:
    exceptions = sorted((event["time_ns"], key) for key, event in life.exceptions.items() if key in ranks)
    first = exceptions[0][1] if exceptions else None
    error = life.exceptions[first] if first else {}
    steps = max((step + 1 for key in ranks if (step := last_step(life.tables, key)) is not None), default=0)
    locus = Locus(host=ranks[0][0], role="main")
    if first is not None:
        locus = Locus(host=first[0], rank=rank_of(life.tables, first), role="main", pid=first[1])
    silent = [key for key in ranks if key not in life.recorded_exits and key not in life.exceptions]
    how = f"with {error['type']} in rank {locus.rank}, and" if error else "with"
    evidence = [
        fact("attempts_count", life.attempts, "run"),
        fact("steps_of_the_attempt_count", steps, f"attempt {attempt}"),
        fact("ranks_without_farewell_count", len(silent), f"of {len(ranks)} that reported"),
    ]
    if error:
        evidence.append(fact("exception", f"{error['type']}: {error['message']}"[:300], "uncaught", unit="text"))
    return Finding(
        kind="crashed" if error else "killed",
        severity="warning",
        confidence=0.95 if error else 0.85,
        summary=f"Attempt {attempt} ended after {steps} steps, {how} {len(silent)} of {len(ranks)} ranks without "
        "farewell (killed, or stopped by the launcher). All ranks were started anew; their steps count from 0.",
        locus=locus,
        since_step=steps,
        evidence=tuple(evidence),
        advice=(
            Advice(
                text="Load the newest checkpoint when the script starts, and save one often enough",
                expected="a new attempt repeats no more than the steps since then",
            ),
        ),
    )


def bus_victims(tables: RunTables, victims: Sequence[Victim]) -> list[Victim]:
    """Return the victims of SIGBUS at whose end /dev/shm was full, as far as the collector's ticks show it.

    Full means: less was free than a batch of each worker, or than twice the largest increase between two ticks,
    since writes come in bursts. Other victims of SIGBUS touched a file that had been cut short, or memory that
    failed.
    """
    return [victim for victim in victims if victim.signal == _SIGBUS and _was_full(tables, victim)]


def bus_error(tables: RunTables, victim: Victim) -> Finding:
    """Return the finding on a victim that wrote to shared memory when /dev/shm was full."""
    host = victim.main[0]
    used, increase, total = _usage_at_end(tables, victim)
    batch = largest_batch_bytes(tables, host)
    return Finding(
        kind="shm-bus-error",
        severity="warning" if victim.went_on else "critical",
        confidence=0.95,
        summary=(
            f"{victim.what[0].upper()}{victim.what[1:]} was killed by SIGBUS when /dev/shm was full: "
            f"{size(used)} of {size(total)} were in use at the tick before." + victim.went_on
        ),
        locus=victim.locus,
        since_step=victim.since_step,
        evidence=(
            fact("shm_used_bytes", used, "around its end", unit="bytes"),
            fact("shm_filled_per_tick_bytes", increase, "around its end", unit="bytes"),
            fact("signal", "SIGBUS", "of its end", unit="text"),
            *((fact("batch_payload_peak_bytes", batch, "run", unit="bytes"),) if math.isfinite(batch) else ()),
            *victim.evidence,
        ),
        limit=Limit(name="/dev/shm", value=total, unit="bytes"),
        advice=ROOM_ADVICE,
    )


def _was_full(tables: RunTables, victim: Victim) -> bool:
    used, increase, total = _usage_at_end(tables, victim)
    batches = largest_batch_bytes(tables, victim.main[0]) * workers_count(tables, victim.main[0])
    return total - used <= max(2 * increase, batches)  # `max` ignores an unknown (NaN) size here


def _usage_at_end(tables: RunTables, victim: Victim) -> tuple[float, float, float]:
    """Return the peak use of /dev/shm around a victim's end, its largest increase in a tick, and its size.

    The victim's part is given back at once, so the tick after its end may show it empty.
    """
    times, used, total = shared_memory_usage(shared_memory_samples(tables, victim.main[0]))
    begin, end = end_window(tables, victim)
    at_end = used[(times * SECOND_NS >= begin) & (times * SECOND_NS <= end)]
    return peak(at_end), max(0.0, peak(np.diff(at_end))), total
