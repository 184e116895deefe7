"""Find processes that died: one finding per victim, none for those that merely followed.

Apart from kills and crashes, these are workers that died of SIGBUS because /dev/shm was full, and failed attempts
after which the launcher (torchrun) restarted all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from signal import (
    SIGABRT,
    SIGBUS,
    SIGFPE,
    SIGILL,
    SIGINT,
    SIGKILL,
    SIGQUIT,
    SIGSEGV,
    SIGTERM,
)
from textwrap import shorten
from typing import Any

from collector.diagnosis.deaths import catalogue
from collector.diagnosis.deaths.catalogue import Death
from collector.diagnosis.deaths.cuda_errors import ended_by_cuda_oom
from collector.diagnosis.deaths.cuda_oom import find_cuda_ooms
from collector.diagnosis.deaths.dead_workers import Workers
from collector.diagnosis.deaths.host_oom_kill import oom_kill, oom_victims, slurm_kill, slurm_victims
from collector.diagnosis.deaths.known_errors import cause_of
from collector.diagnosis.deaths.lost_ranks import (
    REPORTS_OF_A_CHILD,
    begins_after,
    exit_after,
    first_to_leave,
    is_final,
    is_own,
    launches_of,
    reported_child,
)
from collector.diagnosis.deaths.shm_bus_error import bus_error, bus_victims
from collector.diagnosis.deaths.victims import (
    REQUESTS_TO_END,
    Victim,
    is_timed_out,
    main_victim,
    merge_mains,
    merge_workers,
    worker_victim,
)
from collector.diagnosis.loading.loaders import has_batches_left
from collector.diagnosis.run.columns import SECOND_NS, origin_ns, sampled, whole
from collector.diagnosis.run.exceptions import at_line, exception_of
from collector.diagnosis.run.lifecycle import Lifecycle, lifecycle_of, signal_raised
from collector.diagnosis.run.processes import last_memory, last_step, message_lines, sentence, signal_name
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.findings import Advice, Evidence, Finding, Locus, extended, fact
from collector.store import ProcessKey
from collector.units import counted

#: Exit status by which shells stand for a signal, less its number.
_SIGNAL_STATUS = 128
#: Signals that programs handle to save their state and end -> the end of such a program.
_EXITS: dict[int, catalogue.Death] = {
    **dict.fromkeys(REQUESTS_TO_END, catalogue.EXIT_AFTER_SIGNAL),
    SIGINT: catalogue.EXIT_AFTER_INTERRUPT,
}
#: Window of the memory of the worker whose exception ended its training.
LAST_OF_WORKER = "last sample of the worker"
#: Longest text that quotes a message.
_QUOTED_CHARACTERS = 300
#: Longest time without a sample for which CPU time is estimated.
_LONGEST_GAP_NS = 5 * SECOND_NS
_CRASH_SIGNALS = (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV)
#: Exit status of a Python program that an exception ended; launchers and shells pass it on.
_EXCEPTION_STATUS = 1


def find_deaths(tables: RunTables) -> list[Finding]:
    """Find every victim of a kill, every crash that does not follow from one, and a killed collector."""
    life = lifecycle_of(tables)
    workers = [worker_victim(life, worker) for worker in Workers(life).killed()]
    # A worker records its own exception before DataLoader's loop, which would have passed it on, as where a spawned
    # one cannot unpickle its dataset.
    at_address = {(victim.locus.host, victim.locus.pid): victim for victim in workers}
    raised = {key: at_address[key[:2]] for key in life.exceptions if key[:2] in at_address}
    failed_mains = {victim.main for victim in raised.values()}
    # DataLoader ends the other workers by SIGTERM.
    followers = [victim for victim in workers if victim.main in failed_mains and victim.signal == SIGTERM]
    workers = [victim for victim in workers if victim not in (*raised.values(), *followers)]
    victims = [*workers, *(main_victim(life, key, signal) for key, signal in life.killed_mains.items())]
    last_to_first = sorted(raised.items(), key=lambda item: -item[1].gone_ns)
    firsts = {victim.main: (key, victim) for key, victim in last_to_first}
    return [
        *_kills(life, victims),
        *find_cuda_ooms(tables),
        *(_crash(life, key, victim) for key, victim in firsts.values()),
        *_crashes(life, [*victims, *raised.values()]),
        *(_collector_killed(life, event) for event in life.collectors_killed()),
        *find_restarts(life),
    ]


def _kills(life: Lifecycle, victims: Sequence[Victim]) -> list[Finding]:
    """Return the findings on victims, by what killed them: lack of memory, a full /dev/shm, Slurm, or a signal."""
    tables = life.tables
    # No process recorded how these ended; the kernel's count of kills may explain it.
    survived = life.mains if life.exit_status == 0 else ()  # by the command, as a sweep survives one of its trials
    ended = (key for key in (*life.watched, *life.replaced, *survived) if key not in life.recorded_exits)
    gone = [main_victim(life, key, None) for key in ended if life.is_dead(key)]
    oom, bus = oom_victims(tables, [*victims, *gone]), bus_victims(tables, victims)
    if not oom:  # a helper, such as an evaluation in a child process
        helpers = [key for key in life.samples_of_others if life.is_dead(key) and key not in life.recorded_exits]
        oom = oom_victims(tables, [main_victim(life, key, None) for key in helpers])
    over = slurm_victims(tables, [victim for victim in victims if victim not in (*oom, *bus)])
    rest = [victim for victim in victims if victim not in (*oom, *bus, *over)]
    rest = merge_mains(life, rest)
    return [
        *(oom_kill(tables, victim) for victim in merge_workers(oom)),
        *(bus_error(tables, victim) for victim in merge_workers(bus)),
        *(slurm_kill(tables, victim) for victim in over),
        *(_kill(life, victim, _death_of(victim)) for victim in merge_workers(rest)),
        *(
            _kill(life, victim, catalogue.KILLED_UNDER_PROGRAM)
            for victim in gone
            if victim not in oom
            and victim.main in survived
            and victim.main not in life.exceptions
            and life.is_under_program(victim.main)
            and has_batches_left(tables, victim.main) is True  # it vanished in the middle of an epoch
        ),
    ]


def _kill(life: Lifecycle, victim: Victim, usual: Death) -> Finding:
    """Return the finding on a victim: that of its `usual` death, unless Tidegauge or its CPU limit ended it."""
    name = signal_name(victim.signal)
    by = f"by {name}" if name else "without recording its end, as after SIGKILL or os._exit"
    if victim.key in life.recorded_exits and victim.key not in life.exceptions:
        by += " while its interpreter shut down, after the end of the script"
        if victim.signal in _CRASH_SIGNALS:
            usual = replace(usual, advice=(catalogue.END_BEFORE_EXIT, *usual.advice))
    is_by_tidegauge = life.tables.events_of("hang-cancelled") and victim.signal in (SIGTERM, SIGKILL)
    cpu_time = _used_up_cpu_time(life.tables, victim)
    death = catalogue.CANCELLED if is_by_tidegauge else catalogue.CPU_LIMIT if cpu_time else usual
    # torchrun and Lightning raise the signal as an exception; `timeout -s` takes another one.
    if victim.signal in _EXITS and victim.locus.role != "worker" and is_timed_out(life):
        death = catalogue.TIMED_OUT
    return death.finding(
        locus=victim.locus,
        since_step=victim.since_step,
        evidence=(*cpu_time, *victim.evidence),
        confidence=0.97 if victim.signal is not None else 0.85,
        went_on=victim.went_on,
        what=sentence(victim.what),
        by=by,
        code=victim.exit_code,
        status=life.exit_status,
        loss="the training lost the rest of its epoch"
        if victim.went_on
        else "the training ended because this worker did",
    )


def _used_up_cpu_time(tables: RunTables, victim: Victim) -> tuple[Evidence, ...]:
    """Return CPU time and limit as evidence if a training process had reached its limit, else nothing.

    The kernel sends SIGKILL at the hard limit, which `ulimit -t` sets together with the soft one (setrlimit(2)).
    Since the last sample, the process may have used all of its cores.
    """
    if victim.key is None or victim.signal != SIGKILL or victim.locus.role == "worker":
        return ()
    limits = [event.get("cpu_limit_seconds") for event in tables.events_of("process-attached", by=victim.key)]
    rows = sampled(tables, victim.key).dropna(subset=["cpu_ns", "allowed_cores_count"])
    if rows.empty or not any(limits):
        return ()
    limit, last = min(filter(None, limits)), rows.iloc[-1]
    gap_ns = max(victim.gone_ns - last["time_ns"], 0)
    if gap_ns > _LONGEST_GAP_NS or last["cpu_ns"] + gap_ns * last["allowed_cores_count"] < limit * SECOND_NS:
        return ()
    return (
        fact("cpu_seconds", round(last["cpu_ns"] / SECOND_NS, 1), "last sample"),
        fact("cpu_limit_seconds", limit, "RLIMIT_CPU"),
    )


def _death_of(victim: Victim) -> Death:
    is_worker = victim.locus.role == "worker"
    if victim.signal in _CRASH_SIGNALS:
        crash = catalogue.WORKER_CRASHED if is_worker else catalogue.CRASHED
        usual = catalogue.FAULT_ADVICE.get(victim.signal)
        return crash if usual is None else replace(crash, advice=(usual, *crash.advice))
    if victim.signal in (SIGINT, SIGQUIT):
        return catalogue.WORKER_INTERRUPTED if is_worker else catalogue.INTERRUPTED
    if victim.signal in catalogue.ENDED_BY and not is_worker:
        return catalogue.ENDED_BY[victim.signal]
    if is_worker and victim.signal is None and victim.exit_code is not None:
        return catalogue.WORKER_EXITED
    if is_worker:
        return catalogue.WORKER_KILLED
    return catalogue.KILLED if victim.signal in (None, SIGKILL) else catalogue.STOPPED


def _crashes(life: Lifecycle, victims: Sequence[Victim]) -> list[Finding]:
    """Find the uncaught exception that ended the training; the first one is the cause of the rest.

    Exceptions of the processes that started the training count too, unless they report a victim's end. Of trainings
    that follow each other, as in a shell script, the last one ended the command.
    """
    if life.exit_status == 0:
        return [*_survived_exceptions(life, life.exceptions), *_survived_exits(life)]
    victim_mains = {victim.main for victim in victims}
    raised = life.exceptions_above if life.mains else _raised_before_training(life)
    causes = [
        (key, event)
        for key, event in raised.items()
        if key not in victim_mains
        and (key in life.mains or not victims)
        and signal_raised(event) is None
        and (life.exit_status is not None or life.is_dead(key) or key in life.recorded_exits)
    ]
    causes.sort(key=lambda item: item[1]["time_ns"])
    if victims and len(life.mains) > 1:  # an exception before the victim began is no consequence of its end
        earlier = [cause for cause in causes if all(begins_after(life, one.main, cause[1]) for one in victims)]
        return _survived_exceptions(life, dict(launches_of(life, earlier)))
    explained = ended_by_cuda_oom(life.tables)
    launches = launches_of(life, causes)
    left = [finding for _, event in launches[-1:] if not explained for finding in _left_before(life, event)]
    findings = left or [_crash(life, key) for key, _ in launches[-1:] if not {key, life.raiser(key)} & explained]
    own = [key for key, event in causes if is_own(life, event) and key not in (launches[-1][0], *life.mains)]
    if own and findings:
        findings = [_with_end_of_command(life, findings[0], own[0])]
    if launches and (last_exit := exit_after(life, launches[-1][1])):
        return [_exit(life, last_exit), *_survived_exceptions(life, dict(launches))]
    findings += _survived_exceptions(life, dict(launches[:-1]))
    code = life.exit_status
    if not (findings or victims or explained) and code is not None and code > 0 and life.fatal_signal is None:
        findings += _failed_exit(life, code)
    return findings


def _left_before(life: Lifecycle, exception: Mapping[str, Any]) -> list[Finding]:
    """Return the finding on a training process that ended before another one, which lost it, raised."""
    first = first_to_leave(life, exception)
    if first is None:
        return []
    if first.exit is not None:
        return [_exit(life, first.exit)]
    if first.status is not None:
        return [_exit_without_handlers(life, first.key, first.status)]
    return [_kill(life, main_victim(life, first.key, None), catalogue.KILLED)]


def _exit_without_handlers(life: Lifecycle, key: ProcessKey, code: int) -> Finding:
    """Return the finding on a rank that ended by a status of its own, as by os._exit."""
    return catalogue.RANK_EXITED.finding(
        locus=life.locus(key),
        since_step=last_step(life.tables, key),
        evidence=(
            fact("exit_status", code, "of the rank, named by its launcher"),
            fact("uncaught_exception_count", 0, "events of the rank"),
            *last_memory(life.tables, key),
        ),
        what=sentence(life.name(key)),
        status=code,
    )


def _raised_before_training(life: Lifecycle) -> Mapping[ProcessKey, Mapping[str, Any]]:
    """Return the exception of a child that ended a command in which nothing trained, else the command's own.

    The first rank to raise is the cause of the rest. Without ranks it is the last child: a program goes on after
    the failure of a helper.
    """
    in_order = sorted(life.exceptions.items(), key=lambda item: item[1]["time_ns"])
    causes = [
        (key, event)
        for key, event in in_order
        if event.get("type") not in REPORTS_OF_A_CHILD and signal_raised(event) is None
    ]
    has_exited = any(writer_of(event) == life.command for event in life.exit_messages)
    if life.exit_status != _EXCEPTION_STATUS or life.command in dict(causes) or has_exited:
        return life.exceptions_above
    ranks = [(key, event) for key, event in causes if event.get("rank") is not None]
    return dict(ranks[:1] or causes[-1:]) or life.exceptions_above


def _survived_exceptions(life: Lifecycle, raised: Mapping[ProcessKey, Mapping[str, Any]]) -> list[Finding]:
    """Return the exceptions of trainings that the command survived, as a sweep does; the first of those alike."""
    explained = ended_by_cuda_oom(life.tables)
    alike: dict[tuple[str, str], list[ProcessKey]] = {}
    for key, event in sorted(raised.items(), key=lambda item: item[1]["time_ns"]):
        if key in life.mains and key != life.command and key not in explained and signal_raised(event) is None:
            alike.setdefault((str(event.get("type")), str(event.get("site"))), []).append(key)
    findings = []
    for key, *more in alike.values():
        victim = main_victim(life, key, None)
        finding = _crash(life, key, replace(victim, went_on=victim.went_on or " The command went on."))
        count = fact("victims_count", 1 + len(more), "training processes that ended so")
        findings.append(extended(finding, "", count))
    return findings


def _survived_exits(life: Lifecycle) -> list[Finding]:
    """Return the calls of `sys.exit` in trainings that the command survived, the first at each line."""
    exits: dict[str, tuple[ProcessKey, Mapping[str, Any]]] = {}
    others = {life.command, *life.exceptions, *ended_by_cuda_oom(life.tables)}
    for event in life.exit_messages:
        if (key := writer_of(event)) in life.mains and key not in others and is_final(life, event):
            exits.setdefault(str(event.get("site")), (key, event))
    return [_exit(life, event, main_victim(life, key, None).went_on) for key, event in exits.values()]


def _crash(life: Lifecycle, key: ProcessKey, victim: Victim | None = None) -> Finding:
    """Return the finding on an exception that ended a process: a training process, or a worker as `victim`."""
    event, error = life.exceptions[key], exception_of(life, key)
    headline = f": {error.lines[0]}" if error.lines[0] else "" if error.origin else "."
    headline += f" ({error.origin})" if error.origin else ""
    went_on = "" if victim is None else victim.went_on
    evidence = [
        fact("exception", shorten(error.text, _QUOTED_CHARACTERS, placeholder=" …"), "uncaught"),
        fact(
            "exception_after_seconds",
            round((event["time_ns"] - origin_ns(life.tables)) / SECOND_NS, 3),
            "since the run's first record",
        ),
    ]
    if life.exit_status is not None:
        evidence.append(fact("exit_status", life.exit_status, "of the command"))
    worker = Workers(life).raiser(error.process, str(event.get("message")))
    window = "last sample" if worker is None else LAST_OF_WORKER
    memory = last_memory(life.tables, worker or error.process, event["time_ns"], window)
    finding = catalogue.EXCEPTION.finding(
        locus=life.locus(error.process) if victim is None else victim.locus,
        since_step=last_step(life.tables, error.process if victim is None else victim.main),
        evidence=(*evidence, *memory),
        went_on=went_on,
        what=sentence(life.name(error.process) if victim is None else victim.what),
        exception=error.kind,
        site=error.site,
        headline=f"{headline.rstrip('.')}." if went_on else headline,
        host=key[0],
        pid=key[1],
    )
    finding = replace(finding, summary=shorten(finding.summary, _QUOTED_CHARACTERS, placeholder=" …"))
    cause = cause_of(life.tables, error.process, worker, event, error.headline)
    if cause is None and event.get("type") in REPORTS_OF_A_CHILD:
        return _with_child(life, finding, key, event)
    if cause is None:
        return finding
    if cause.sentence:
        finding = replace(finding, summary=f"{finding.summary.rstrip('.')}.")
    return extended(finding, cause.sentence, *cause.evidence, advice=cause.advice, fault=cause.fault)


def _with_child(life: Lifecycle, finding: Finding, key: ProcessKey, event: Mapping[str, Any]) -> Finding:
    """Return the finding on a process that reports the failure of a child, with the exception of that child."""
    child = reported_child(life, event)
    if child is None or life.raiser(key) != key:
        return finding
    read_traceback = catalogue.EXCEPTION.advice[0]
    advice = replace(read_traceback, text=read_traceback.text.format(host=child[0], pid=child[1]))
    return _with_error(life, finding, f"{sentence(life.name(child))} had", child, advice)


def _with_end_of_command(life: Lifecycle, finding: Finding, key: ProcessKey) -> Finding:
    """Return the finding on a child that raised, with the error by which the command ended later."""
    return _with_error(life, finding, "The command then", key)


def _with_error(life: Lifecycle, finding: Finding, who: str, key: ProcessKey, *advice: Advice) -> Finding:
    """Return a finding with a sentence on the exception that ended another process; `who` begins it."""
    error = exception_of(life, key)
    headline = shorten(error.headline, _QUOTED_CHARACTERS, placeholder=" …").rstrip(".")
    finding = replace(finding, summary=f"{finding.summary.rstrip('.')}.")
    return extended(finding, f"{who} ended{error.site} with {headline}.", advice=advice)


def _exit(life: Lifecycle, event: Mapping[str, Any], went_on: str = "") -> Finding:
    """Return the finding on a process that called `sys.exit` with a message, or with a status above 0."""
    caller, message = writer_of(event), message_lines(event)[0]
    death = catalogue.EXIT_WITH_STATUS if event.get("status") else catalogue.EXIT_WITH_MESSAGE
    handled = message_lines({"message": event.get("handled")})[0]
    if handled.startswith(KeyboardInterrupt.__name__):  # Lightning ends so
        death = catalogue.INTERRUPTED
    elif handled:
        message += f" (while it handled {handled.removesuffix(':')})"
    finding = death.finding(
        locus=life.locus(caller),
        since_step=last_step(life.tables, caller),
        evidence=(
            fact("exit_status", life.exit_status or 0, "of the command"),
            fact("exit_message", message[:300], "given to sys.exit"),
        ),
        went_on=went_on,
        what=sentence(life.name(caller)),
        site=at_line(event.get("site")),
        by=f"by {signal_name(SIGINT)}",
        message=f"{message.rstrip('.')}." if went_on and not event.get("status") else message,
    )
    return replace(finding, summary=shorten(finding.summary, _QUOTED_CHARACTERS, placeholder=" …"))


def _failed_exit(life: Lifecycle, code: int) -> list[Finding]:
    messages = [event for event in life.exit_messages if writer_of(event) in (*life.mains, life.command)]
    signal = code - _SIGNAL_STATUS
    status = messages[-1].get("status") if messages else None
    if messages and code == (status or 1) and signal not in _EXITS:
        return [_exit(life, messages[-1])]
    is_over = is_timed_out(life)
    keys = (*life.mains, *([life.command] if is_over and life.command else []))
    if not keys:
        return []
    evidence = (
        fact("exit_status", code, "of the command"),
        fact("uncaught_exception_count", len(life.exceptions_above), "events of the training processes"),
    )
    is_silent = bool(life.mains) and not life.recorded_exits & set(life.mains)
    failed = catalogue.EXIT_WITHOUT_HANDLERS if is_silent else catalogue.FAILED_EXIT
    return [
        (catalogue.TIMED_OUT if is_over else _EXITS.get(signal, failed)).finding(
            locus=Locus(host=keys[0][0], role=life.role(keys[0]), pid=keys[0][1]),
            since_step=last_step(life.tables, keys[0]),
            evidence=evidence,
            status=code,
            signal=signal_name(signal),
            number=signal,
        )
    ]


def _collector_killed(life: Lifecycle, event: Mapping[str, Any]) -> Finding:
    stops = life.tables.events_of("collector-stop", by=writer_of(event))
    resumed = [
        other
        for other in life.tables.events_of("collector-start")
        if other.get("resumed") and other.get("host") == event.get("host") and other["time_ns"] > event["time_ns"]
    ]
    status = life.status()
    death = catalogue.COLLECTOR_KILLED
    if life.mains and status == "killed" and not stops:
        death = catalogue.COLLECTOR_KILLED_TOO
    elif resumed or status != "running":
        death = catalogue.COLLECTOR_WAS_KILLED
    return death.finding(
        locus=Locus(host=event.get("host"), role="collector", pid=whole(event.get("pid"))),
        evidence=(
            fact("collector_stop_count", len(stops), "events after its start"),
            fact("resumed_count", len(resumed), "events")
            if resumed
            else fact("collector_alive", 0, "at the time of reading", unit="bool"),
        ),
        pid=event.get("pid"),
        until="another one resumed" if resumed else "the end",
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
    error = exception_of(life, first) if first else None
    steps = max((step + 1 for key in ranks if (step := last_step(life.tables, key)) is not None), default=0)
    locus = Locus(host=ranks[0][0], role="main") if first is None else life.locus(first)
    silent = [key for key in ranks if key not in life.recorded_exits and key not in life.exceptions]
    evidence = [
        fact("attempts_count", life.attempts, "run"),
        fact("steps_of_the_attempt_count", steps, f"attempt {attempt}"),
        fact("ranks_without_farewell_count", len(silent), f"of {len(ranks)} that reported"),
    ]
    how = no_end = ""
    if error is not None:
        evidence.append(fact("exception", shorten(error.text, _QUOTED_CHARACTERS, placeholder=" …"), "uncaught"))
        headline = shorten(error.headline, _QUOTED_CHARACTERS, placeholder=" …").rstrip(".")
        how = f" with an exception of rank {locus.rank}{error.site}: {headline}"
    if silent:
        no_end = f" {len(silent)} of {len(ranks)} ranks recorded no end (killed, or stopped by the launcher)."
    return (catalogue.ATTEMPT_CRASHED if error else catalogue.ATTEMPT_KILLED).finding(
        locus=locus,
        since_step=steps - 1 if steps else None,
        evidence=tuple(evidence),
        attempt=attempt,
        steps=counted(steps, "step"),
        how=how,
        silent=no_end,
    )
