"""Find the process that ended first where another one lost it, and the launches of a command."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from collector.diagnosis.deaths.known_errors import LOST_PEER, is_of_collective
from collector.diagnosis.deaths.victims import end_of
from collector.diagnosis.loading.uneven_ranks import uneven_ranks
from collector.diagnosis.run.lifecycle import SPAWN_ERROR, Lifecycle
from collector.diagnosis.run.processes import rank_of
from collector.diagnosis.run.tables import writer_of
from collector.diagnosis.run.training import iterations_within
from collector.store import ProcessKey

#: Exceptions by which a launcher reports that its child failed: those of subprocess, torchrun and mp.spawn.
REPORTS_OF_A_CHILD = ("CalledProcessError", "ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
_WORD = re.compile(r"[^\s'\"\[\](){},]+")


class FirstToLeave(NamedTuple):
    """A training process that ended before another one raised: by `sys.exit`, by a status, or without a record."""

    key: ProcessKey
    exit: Mapping[str, Any] | None = None
    status: int | None = None


def first_to_leave(life: Lifecycle, exception: Mapping[str, Any]) -> FirstToLeave | None:
    """Return the training process that ended itself before another one, which lost it, raised; None without one.

    `sys.exit` is recorded with its time. A process that ends by os._exit or a signal records nothing: its launcher
    names its status, or it is the only one without a record of its end. It counts if what was raised is an error of
    a collective, or of the launcher; by `sys.exit` also if both are ranks.
    """
    raiser, raised_ns = writer_of(exception), exception["time_ns"]
    peers = {key for key in life.mains if key not in (raiser, *life.exceptions)}
    trains = raiser in life.mains
    is_of_group = is_of_collective(exception) if trains else exception.get("type") in REPORTS_OF_A_CHILD
    if not is_of_group and rank_of(life.tables, raiser) is None:
        return None
    begun_ns = _start_ns(life, raiser)
    for event in life.exit_messages:
        key = writer_of(event)
        is_peer = key in peers and (is_of_group or rank_of(life.tables, key) is not None)
        if is_peer and begun_ns < event["time_ns"] < raised_ns and is_final(life, event):
            return FirstToLeave(key, exit=event)
    if not is_of_group:
        return None
    last_seen_ns = {key: end_of(life.tables, *key[:2], key)[0] for key in peers - set(life.recorded_exits)}
    silent = [key for key in life.mains if last_seen_ns.get(key, 0.0) >= begun_ns]  # no earlier training
    codes = life.exit_codes_by_launcher
    for key in silent:
        if (status := codes.get(key[:2], 0)) > 0:
            return FirstToLeave(key, status=status)
    is_lost = trains and LOST_PEER.search(str(exception.get("message"))) is not None
    if not is_lost or len(silent) != 1 or not life.is_dead(silent[0]):
        return None
    # A launcher that names other ranks has ended this one; the error may be about a rank that was done.
    ended = (event["time_ns"] for key in peers for event in life.tables.events_of("process-exit", by=key))
    is_explained = any(key[:2] in codes for key in life.mains) or any(
        begun_ns < time_ns < raised_ns for time_ns in ended
    )
    if is_explained or uneven_ranks(life.tables) is not None:
        return None
    return FirstToLeave(silent[0]) if last_seen_ns[silent[0]] < raised_ns else None


def launches_of(
    life: Lifecycle, causes: Sequence[tuple[ProcessKey, Mapping[str, Any]]]
) -> list[tuple[ProcessKey, Mapping[str, Any]]]:
    """Return the first exception of each launch, which starts its processes when the one before has failed.

    A rank may begin after another one of its launcher has raised: it is part of that launch if its number is new,
    and no other number begins again.
    An error of the command itself, which had gone on after that of a trial, counts as a launch.
    """
    firsts: list[tuple[ProcessKey, Mapping[str, Any]]] = []
    for key, event in causes:
        if (
            not firsts
            or begins_after(life, key, firsts[-1][1])
            or (is_own(life, event) and _has_gone_on(life, firsts[-1][1], event))
        ):
            firsts.append((key, event))
    return firsts


def is_own(life: Lifecycle, event: Mapping[str, Any]) -> bool:
    """Return whether an exception is one of the command, and does not report a child's failure."""
    is_report = event.get("type") in REPORTS_OF_A_CHILD or SPAWN_ERROR.search(str(event.get("message")))
    return writer_of(event) == life.command and not is_report


def _has_gone_on(life: Lifecycle, trial: Mapping[str, Any], error: Mapping[str, Any]) -> bool:
    """Return whether another training began, or the command trained, between a trial's error and its own."""
    begin_ns, end_ns = trial["time_ns"], error["time_ns"]
    others = {*life.mains} - {writer_of(trial), *life.exceptions}
    starts = life.tables.events_of("process-start")
    has_other = any(writer_of(event) in others and begin_ns < event["time_ns"] < end_ns for event in starts)
    trains = iterations_within(life.tables, writer_of(error), begin_ns, end_ns) > 0
    return (has_other or trains) and rank_of(life.tables, writer_of(trial)) is None


def begins_after(life: Lifecycle, key: ProcessKey, error: Mapping[str, Any]) -> bool:
    """Return whether a process began after an error, and not as a late rank of the same launch."""
    if _start_ns(life, key) <= error["time_ns"]:
        return False
    siblings = [one for one in life.mains if life.launcher(one) == life.launcher(key)]
    before = {rank_of(life.tables, one) for one in siblings if _start_ns(life, one) <= error["time_ns"]}
    after = {rank_of(life.tables, one) for one in siblings if _start_ns(life, one) > error["time_ns"]}
    return not before or None in before | after or bool(before & after)


def exit_after(life: Lifecycle, error: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `sys.exit` of a training that began after an error, if the command ended with its status."""
    last: Mapping[str, Any] | None = None
    for event in life.exit_messages:
        key, status = writer_of(event), event.get("status") or 1
        is_end = key in life.mains and key not in life.exceptions and status == life.exit_status
        if is_end and begins_after(life, key, error) and is_final(life, event):
            last = event
    return last


def is_final(life: Lifecycle, event: Mapping[str, Any]) -> bool:
    """Return whether a training did not go on after a call of `sys.exit`, as one does that catches it."""
    return iterations_within(life.tables, writer_of(event), event["time_ns"], math.inf) == 0


def reported_child(life: Lifecycle, report: Mapping[str, Any]) -> ProcessKey | None:
    """Return the child whose failure an exception reports, if that raised: the last one with the command in it.

    A launcher names the child's pid instead.
    """
    parent, raised_ns = writer_of(report), report["time_ns"]
    words, codes = set(_words(str(report.get("message")))), life.exit_codes_by_launcher
    last = None
    for event in life.tables.events_of("process-attached"):
        key = writer_of(event)
        if (key[0], event.get("parent_pid")) == parent[:2] and event["time_ns"] < raised_ns:
            arguments = set(_words(life.programs.get(key, ""))[1:])
            if key[:2] in codes or (arguments and arguments <= words):
                last = key
    has_raised = last in life.exceptions and life.exceptions[last]["time_ns"] < raised_ns
    return last if has_raised else None


def _words(text: str) -> list[str]:
    """Return the words of a command line, or of the list of its arguments, without folders."""
    return [os.path.basename(word) or word for word in _WORD.findall(text)]


def _start_ns(life: Lifecycle, key: ProcessKey) -> float:
    """Return the time of the first record of a process."""
    starts = life.tables.events_of("process-attached", "process-start", by=key)
    return min((float(event["time_ns"]) for event in starts), default=0.0)
