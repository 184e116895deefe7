"""Who died, of what, and what it held: one finding per victim, none for those that merely followed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from collector.diagnosis.cuda_oom import ended_by_cuda_oom, find_cuda_ooms
from collector.diagnosis.dead_workers import Workers
from collector.diagnosis.findings import Advice, Finding, Locus, Severity
from collector.diagnosis.frames import SECOND_NS, key_of, origin_ns, whole
from collector.diagnosis.lifecycle import SIGINT, SIGKILL, Lifecycle, is_interrupt
from collector.diagnosis.oom import oom_kill, oom_victims
from collector.diagnosis.restarts import find_restarts
from collector.diagnosis.shared_memory import bus_error, bus_victims
from collector.diagnosis.tables import RunTables
from collector.diagnosis.victims import (
    Victim,
    fact,
    gathered,
    last_memory,
    last_step,
    main_victim,
    rank_of,
    signal_name,
    worker_victim,
)
from collector.quantities import plain_text
from collector.store.runs import ProcessKey

#: torch/_utils.py, ExceptionWrapper: an exception that a worker passed on, and a line of the traceback in it.
_FROM_WORKER = "in DataLoader worker process"
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_CRASH_SIGNALS = frozenset({4, 6, 7, 8, 11})  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV


def find_deaths(tables: RunTables) -> list[Finding]:
    """Every victim of a kill, every crash that is not the consequence of one, and a killed collector."""
    life = Lifecycle(tables)
    workers = [worker_victim(tables, life, worker) for worker in Workers(life).killed()]
    mains = [main_victim(tables, life, key, how) for key, how in life.killed_mains.items()]
    victims = [*workers, *mains]
    # Nobody was told how these ended; the kernel's count of kills may know.
    gone = [key for key in (*life.watched, *life.replaced) if life.is_dead(key) and key not in life.farewells]
    oom = oom_victims(tables, [*victims, *(main_victim(tables, life, key, None) for key in gone)])
    found = [oom_kill(tables, victim) for victim in gathered(oom)]
    buses = bus_victims(tables, victims)
    found += [bus_error(tables, victim) for victim in gathered(buses)]
    found += [_kill(tables, victim) for victim in gathered([v for v in victims if v not in (*oom, *buses)])]
    found += find_cuda_ooms(tables)
    found += _crashes(tables, life, victims)
    found += [_collector_killed(life, event) for event in life.collectors_killed()]
    return found + find_restarts(life)


def _kill(tables: RunTables, victim: Victim) -> Finding:
    name = signal_name(victim.signal)
    by = f"by {name}" if name else "without farewell, as by SIGKILL or os._exit"
    if name is None and victim.exit_code is not None:
        by = f"abruptly with exit code {victim.exit_code}, as by os._exit"
    is_worker = victim.locus.role == "worker"
    crashed = not is_worker and victim.signal in _CRASH_SIGNALS
    kind = "worker-killed" if is_worker else "crashed" if crashed else "killed"
    severity: Severity = "critical"
    if not is_worker and victim.signal not in (None, SIGKILL) and not crashed:
        severity = "info" if victim.signal == SIGINT else "warning"
    return Finding(
        kind=kind,
        severity=severity,
        confidence=0.97 if victim.signal is not None else 0.85,
        summary=f"{victim.what[0].upper()}{victim.what[1:]} ended {by}.",
        locus=victim.locus,
        since_step=last_step(tables, victim.main),
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
                expected="the cause; the training ended because this worker did",
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
    """Uncaught exceptions that ended the training by themselves; the first is the cause of the rest.

    Those of the processes that started the training count too, unless they tell of a victim's end.
    """
    if life.exit_status == 0:
        return []
    followed = {victim.main for victim in victims}
    own = [
        (key, event)
        for key, event in life.exceptions_above.items()
        if key not in followed
        and (key in life.mains or not victims)
        and not is_interrupt(event)
        and (life.exit_status is not None or life.is_dead(key) or key in life.farewells)
    ]
    own.sort(key=lambda item: item[1]["time_ns"])
    if victims and len(life.mains) > 1:
        own = []  # a rank that lost its peer raises too
    explained = ended_by_cuda_oom(tables)
    found = [_crash(tables, life, key, event) for key, event in own[:1] if key not in explained]
    code = life.exit_status
    if not (found or victims or explained) and code is not None and code > 0 and life.fatal_signal is None:
        found += _failed_exit(tables, life, code)
    return found


def _crash(tables: RunTables, life: Lifecycle, key: ProcessKey, event: Mapping[str, Any]) -> Finding:
    message = plain_text(str(event.get("message") or "")).strip()
    lines = message.splitlines() or [""]
    # An exception of another process quotes its traceback; the last line of that is the exception.
    is_quoted = event.get("type") == "ProcessRaisedException" or _FROM_WORKER in lines[0]
    headline = lines[-1 if is_quoted else 0]
    who = life.name(key)
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
        summary=f"{who[0].upper()}{who[1:]} ended with {event.get('type')}{_at(event)}: {headline}"[:300],
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
    """Say at which line an exception was raised, in a worker at the line there: ` at train.py:37, in main`."""
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
