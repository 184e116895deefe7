"""The end of a run that died: its exit record, and what happened in its last minute.

The record follows Android's ApplicationExitInfo: a reason from a closed list, the victim, its memory, the signal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGBUS, SIGKILL
from textwrap import shorten
from typing import Any

import numpy as np

from collector.diagnosis.deaths.host_oom_kill import MARGIN_TICKS, kills_between_samples, memory_was_short
from collector.diagnosis.deaths.last_minute import LAST_MINUTE_SECONDS
from collector.diagnosis.deaths.lost_ranks import begins_after
from collector.diagnosis.deaths.victims import end_of
from collector.diagnosis.loading.loaders import loader_settings, worker_slots
from collector.diagnosis.memory.occasions import occasions_of
from collector.diagnosis.run.columns import SECOND_NS, floats, host_samples, origin_ns, whole, written
from collector.diagnosis.run.exceptions import exception_of, raised_in
from collector.diagnosis.run.host_memory import binding_limit, demand_series
from collector.diagnosis.run.lifecycle import Lifecycle, end_words, lifecycle_of, signal_of_child
from collector.diagnosis.run.limit_owner import limit_owner
from collector.diagnosis.run.processes import message_lines, process_at, sentence, signal_name
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.diagnosis.run.training import own_steps
from collector.findings import Finding, Limit, Locus
from collector.store import ProcessKey
from collector.units import counted, duration, number, percent, size

#: Kind of death -> the reason in the record. "Not known" is the reason of a run without a finding of these kinds.
_REASONS = {
    "host-oom-kill": "out of host memory",
    "cuda-oom": "out of GPU memory",
    "shm-bus-error": "/dev/shm full",
    "worker-killed": "DataLoader worker killed",
    "killed": "killed",
    "hang": "cancelled while it hung",
}
_UNKNOWN = "not known"
#: Signals by which these deaths come, where no process saw the signal.
_SIGNALS = {"host-oom-kill": int(SIGKILL), "shm-bus-error": int(SIGBUS)}
#: Most happenings that are listed, the last ones.
_MOST_HAPPENINGS = 12
#: Most starts of epochs among them: short epochs would fill the list.
_MOST_EPOCHS = 3
#: Share of the limit at which memory counts as nearly full.
_NEARLY_FULL_RATIO = 0.95
_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """The end of a run that died; a field that is not known is None.

    Attributes:
        reason: what it died of, one of a closed list.
        victim: the process that died first.
        last_held_bytes: memory of the victim at its last sample.
        limit_owner: who set it, in words: a batch job, a container, a unit of systemd.
        exit_status: exit code of the command, -n for signal n.
        step: number of the victim's last step that ended, from 0.
        seconds: time from the start of the run to the victim's end.
        saved_seconds: time from the start of the run to the last return of `torch.save` before that.
        saved_steps: steps that the process which saved had ended by then.
        followers_count: training processes that ended because of it.
    """

    reason: str
    victim: Locus | None = None
    last_held_bytes: float | None = None
    limit: Limit | None = None
    limit_owner: str | None = None
    signal: str | None = None
    exit_status: int | None = None
    step: int | None = None
    seconds: float | None = None
    saved_seconds: float | None = None
    saved_steps: int | None = None
    followers_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened in the last minute; `seconds` counts from the end of the run, so it is below 0."""

    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The exit record of a run that died, and the last minute, in order of time."""

    record: ExitRecord
    happenings: tuple[Happening, ...]


def ending_of(tables: RunTables, findings: Sequence[Finding]) -> Ending | None:
    """Return how a run ended, None if it goes on or ended normally."""
    life = lifecycle_of(tables)
    if life.status() not in ("failed", "killed"):
        return None
    return Ending(record=_record(life, findings), happenings=_happenings(life))


def _record(life: Lifecycle, findings: Sequence[Finding]) -> ExitRecord:
    death = next((finding for finding in findings if _is_end(finding)), None)
    if death is None:
        return ExitRecord(reason=_UNKNOWN, exit_status=life.exit_status, seconds=life.wall_seconds)
    where = death.locus
    code = death.value_of("worker_exit_code")
    sent = signal_of_child(whole(code))
    if code is None:
        sent = next((number for key, number in life.killed_mains.items() if key[1] == where.pid), None)
    owner = (
        limit_owner(life.tables, where.host)
        if death.limit and death.limit.name == "cgroup" and where.host
        else None
    )
    seconds = _end_seconds(life, death)
    saved_seconds, saved_steps = _last_save(life, seconds)
    return ExitRecord(
        reason=_reason(death),
        victim=where,
        last_held_bytes=death.value_of("last_held_bytes"),
        limit=death.limit,
        limit_owner=owner.words if owner else None,
        signal=signal_name(_SIGNALS.get(death.kind, sent)),
        exit_status=life.exit_status,
        step=None if not death.steps_before else death.steps_before - 1,
        seconds=seconds,
        saved_seconds=saved_seconds,
        saved_steps=saved_steps,
        followers_count=_followers_count(life, where, seconds),
    )


def _is_end(finding: Finding) -> bool:
    """Return whether a finding is about the end of the run, not of the collector or one that the run outlived."""
    is_outlived = finding.severity == "info" and finding.kind in ("cuda-oom", "hang")
    return finding.group == "death" and finding.locus.role != "collector" and not is_outlived


def _reason(death: Finding) -> str:
    if death.kind == "crashed":
        names = {item.name for item in death.evidence}
        reasons = {
            "exception": "uncaught exception",
            "exit_message": "sys.exit with a message",
            "uncaught_exception_count": "exit without an exception",
        }
        return next((reason for name, reason in reasons.items() if name in names), "crash")
    code = death.value_of("worker_exit_code")
    if death.kind == "worker-killed" and code is not None and code >= 0:
        return "DataLoader worker exited"
    return _REASONS.get(death.kind, _UNKNOWN)


def _end_seconds(life: Lifecycle, death: Finding) -> float | None:
    """Return when the victim raised or was first known to be gone, in seconds; for several, the end of the run."""
    raised = death.value_of("exception_after_seconds")
    if raised is not None:
        return raised
    host, pid = death.locus.host, death.locus.pid
    if host is None or pid is None:
        return life.wall_seconds
    _, gone_ns = end_of(life.tables, host, pid, process_at(life.tables, host, pid))
    return (gone_ns - origin_ns(life.tables)) / SECOND_NS


def _followers_count(life: Lifecycle, victim: Locus, end_seconds: float | None) -> int:
    """Return the number of other training processes that had not ended by themselves when the victim ended."""
    end_ns = np.inf if end_seconds is None else origin_ns(life.tables) + end_seconds * SECOND_NS
    ended = {
        writer_of(event)
        for event in life.tables.events_of("process-exit")
        if event["time_ns"] < end_ns and writer_of(event) not in life.exceptions
    }
    mains: dict[tuple[str | None, int | None], ProcessKey] = {
        **{address: slot[0] for address, slot in worker_slots(life.tables).items()},
        **{main[:2]: main for main in life.mains},
    }
    key = mains.get((victim.host, victim.pid))  # a worker stands for its training process
    if key is not None:
        ended |= {one for one, event in life.exceptions.items() if begins_after(life, key, event)}
    others = {*life.mains} - {key, *ended}
    return len(others) if len(life.mains) > 1 else 0


def _last_save(life: Lifecycle, end_seconds: float | None) -> tuple[float | None, int | None]:
    """Return when `torch.save` last returned before the end, in seconds, and the steps that had ended by then."""
    begin_ns = origin_ns(life.tables)
    end_ns = np.inf if end_seconds is None else begin_ns + end_seconds * SECOND_NS
    saves = [event for event in life.tables.events_of("checkpoint") if event["time_ns"] <= end_ns]
    if not saves:
        return None, None
    last = max(saves, key=lambda event: event["time_ns"])
    steps = own_steps(life.tables, writer_of(last))
    ended = steps[floats(steps, "time_ns") <= last["time_ns"]]
    count = None if steps.empty else 0 if ended.empty else whole(ended["step"].iloc[-1] + 1)
    return (last["time_ns"] - begin_ns) / SECOND_NS, count


def _happenings(life: Lifecycle) -> tuple[Happening, ...]:
    end_ns = origin_ns(life.tables) + (life.wall_seconds or 0.0) * SECOND_NS
    found = [*_of_training(life), *_of_memory(life.tables), *_of_ends(life)]
    within = [(at, text) for at, text in found if -LAST_MINUTE_SECONDS * SECOND_NS <= at - end_ns <= SECOND_NS]
    within.sort(key=lambda item: min(item[0], end_ns))  # stable: causes come before ends of the same time
    return tuple(
        Happening(seconds=min(round((at - end_ns) / SECOND_NS, 1), 0.0), text=text)
        for at, text in within[-_MOST_HAPPENINGS:]
    )


def _of_training(life: Lifecycle) -> Iterator[tuple[float, str]]:
    """Yield the phases of the training, as the process with the last step recorded them, and that step."""
    if not life.mains:
        return
    tables = life.tables
    main = max(life.mains, key=lambda key: floats(written(tables, "step", key), "time_ns").max(initial=0.0))
    settings = loader_settings(tables)
    phases = tables.events_of("phase", by=main)
    for event in phases:
        yield float(event["time_ns"]), f"The framework entered its phase {event['phase']!r}."
    for kind in occasions_of(tables, main):
        if kind.passes and not phases:
            starts = [*zip(kind.ends, kind.passes, strict=True)]
            for at, (loader, epoch) in starts[-_MOST_EPOCHS:]:
                variable = settings.get((main, loader), {}).get("variable")
                name = f" ({variable})" if variable else ""
                yield at * SECOND_NS, f"Epoch {epoch} of loader {loader}{name} began."
        elif kind.name == "checkpoint" or not phases:
            words = "A checkpoint" if kind.name == "checkpoint" else "An evaluation"
            yield from ((begin * SECOND_NS, f"{words} began.") for begin in kind.begins)
    steps = written(tables, "step", main)
    if len(steps):
        number = floats(steps, "step")[-1] + 1
        yield (
            float(floats(steps, "time_ns")[-1]),
            f"The last of {counted(number, 'step')} ended." if number > 1 else "The only step ended.",
        )


def _of_memory(tables: RunTables) -> Iterator[tuple[float, str]]:
    """Yield the time at which a host's memory was nearly full, and the kernel's kills."""
    for host in sorted(set(tables.stream("host")["host"])):
        rows, (name, limit) = host_samples(tables, str(host)), binding_limit(tables, str(host))
        times = floats(rows, "time_ns")
        full = np.flatnonzero(demand_series(tables, str(host))[1] >= _NEARLY_FULL_RATIO * limit)
        if len(full):
            words = "the cgroup's limit" if name == "cgroup" else "the host's memory"
            share = percent(_NEARLY_FULL_RATIO)
            yield float(times[full[0]]), f"Memory in use reached {share} of {words} of {size(limit)}."
        of_cgroup, of_host = (counts > 0 for counts in kills_between_samples(tables, str(host)))
        for place in np.flatnonzero(of_cgroup | of_host):
            # The host's counter also rises when a job next to this one meets a limit of its own.
            is_near = abs(np.arange(len(times)) - place) <= MARGIN_TICKS
            if not (of_cgroup[place] or memory_was_short(tables, str(host), is_near)):
                continue
            whose = "this cgroup" if of_cgroup[place] else "this host"
            words = f"The kernel killed a process of {whose}: out of memory."
            ends = (float(event["time_ns"]) for event in tables.events_of("worker-died", "command-exit"))
            within = (end for end in ends if times[place] < end < times[place + 1])
            yield min(within, default=times[place + 1]), words


def _precaution(event: Mapping[str, Any]) -> str:
    """Return what Tidegauge did before a limit was met, and how near that was by its forecast."""
    action, pids, left = str(event.get("action")), event.get("pids") or [], event.get("seconds_left")
    done = {
        "command": "ran the command of --before-oom",
        "function": "asked the training for its precautions",
    }.get(action, f"sent {action} to {counted(len(pids), 'process')}")
    near = "was nearly met" if left is None else f"was at least {duration(float(left))} away"
    return f"Tidegauge {done}: the limit {event.get('limit')} {near}."


def _short(line: str) -> str:
    return shorten(line, _MESSAGE_CHARACTERS, placeholder="…")


def _of_ends(life: Lifecycle) -> Iterator[tuple[float, str]]:
    """Yield errors and ends of processes."""
    tables = life.tables
    for event in tables.events_of("worker-died"):
        code = whole(event.get("exit_code"))
        of = f"Worker {event.get('worker')} of loader {event.get('loader')}"
        yield float(event["time_ns"]), f"{of} died: {end_words(code)}."
    for event in tables.events_of("cuda-oom"):
        if whole(event.get("device")) is None:  # its exception alone is known, and comes below
            continue
        asked = whole(event.get("requested_bytes"))
        words = f" ({size(asked)} requested)" if asked is not None else ""
        at = float(event.get("error_time_ns") or event["time_ns"])
        yield at, f"GPU {number(event.get('device'))} ran out of memory{words}."
    slots = worker_slots(tables)
    for key, event in life.exceptions.items():
        error, slot = exception_of(life, key), slots.get(key[:2])
        of = sentence(life.name(error.process)) if slot is None else f"Worker {slot[2]} of loader {slot[1]}"
        yield float(event["time_ns"]), f"{of} raised {_short(error.headline)}"
    for event in tables.events_of("thread-exception"):
        of = f"Thread {event.get('thread')} of process {event['pid']}"
        yield float(event["time_ns"]), f"{of} ended with {_short(raised_in(event, writer_of(event)).headline)}"
    exits = {writer_of(event): event for event in life.exit_messages}
    for key, event in exits.items():
        words = f"{sentence(life.name(key))} called sys.exit: {_short(message_lines(event)[0])}"
        yield float(event["time_ns"]), words
    for event in tables.events_of("before-oom"):
        yield float(event["time_ns"]), _precaution(event)
    for event in tables.events_of("risk-call"):
        held, failed = duration(float(event.get("held_ns") or 0) / SECOND_NS), event.get("errors")
        words = f"failed: {failed[0]}" if failed else f"took {held}"
        yield float(event["time_ns"]), f"What the training does before memory runs out {words}."
    for event in tables.events_of("hang-cancelled"):
        yield float(event["time_ns"]), "Tidegauge cancelled the training, which hung."
    for event in tables.events_of("command-exit"):
        code = whole(event.get("exit_status"))
        yield float(event["time_ns"]), f"The command ended: {end_words(code)}."
