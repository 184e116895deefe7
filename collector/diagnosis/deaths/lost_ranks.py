"""Find the process that ended first where another one lost it, and the launches of a command."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from collector.diagnosis.deaths.known_errors import is_of_collective
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
#: Messages of gloo and NCCL about the end of a connection, not about a timeout.
_LOST_PEER = re.compile(r"[Cc]onnection (?:was )?(?:likely )?(?:closed|reset)|remote process exited|[Bb]roken pipe")


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
    for event in life.exit_messages:
        is_before = _start_ns(life, raiser) < event["time_ns"] < raised_ns
        if is_before and writer_of(event) in peers and is_final(life, event):
            return FirstToLeave(writer_of(event), exit=event)
    if not is_of_group:
        return None
    silent = [key for key in life.mains if key in peers and key not in life.recorded_exits]
    codes = life.exit_codes_by_launcher
    for key in silent:
        if (status := codes.get(key[:2], 0)) > 0:
            return FirstToLeave(key, status=status)
    is_lost = trains and _LOST_PEER.search(str(exception.get("message"))) is not None
    if not is_lost or len(silent) != 1 or not life.is_dead(silent[0]):
        return None
    # A launcher that names other ranks has ended this one; the error may be about a rank that was done.
    ended = (event["time_ns"] for key in peers for event in life.tables.events_of("process-exit", by=key))
    is_explained = any(key[:2] in codes for key in life.mains) or any(time_ns < raised_ns for time_ns in ended)
    if is_explained or uneven_ranks(life.tables) is not None:
        return None
    last_seen_ns, _ = end_of(life.tables, *silent[0][:2], silent[0])
    return FirstToLeave(silent[0]) if last_seen_ns < raised_ns else None


def launches_of(
    life: Lifecycle, causes: Sequence[tuple[ProcessKey, Mapping[str, Any]]]
) -> list[tuple[ProcessKey, Mapping[str, Any]]]:
    """Return the first exception of each launch, which starts its processes when the one before has failed.

    A rank may begin after another one of its launcher has raised: it is part of that launch if its number is new.
    An error of the command itself, which had gone on after that of a trial, counts as a launch.
    """
    firsts: list[tuple[ProcessKey, Mapping[str, Any]]] = []
    for key, event in causes:
        is_later = bool(firsts) and _start_ns(life, key) > firsts[-1][1]["time_ns"] and not _is_late(life, key)
        if not firsts or is_later or (is_own(life, event) and _has_gone_on(life, firsts[-1][1], event)):
            firsts.append((key, event))
    return firsts


def is_own(life: Lifecycle, event: Mapping[str, Any]) -> bool:
    """Return whether an exception is one of the command, and no report of a child's."""
    is_report = event.get("type") in REPORTS_OF_A_CHILD or SPAWN_ERROR.search(str(event.get("message")))
    return writer_of(event) == life.command and not is_report


def _has_gone_on(life: Lifecycle, trial: Mapping[str, Any], error: Mapping[str, Any]) -> bool:
    """Return whether another training began, or ended normally, between the errors of a trial and the command."""
    others = {*life.mains} - {writer_of(trial), *life.exceptions}
    signs = life.tables.events_of("process-start", "process-exit")
    has_other = any(writer_of(e) in others and trial["time_ns"] < e["time_ns"] < error["time_ns"] for e in signs)
    return has_other and rank_of(life.tables, writer_of(trial)) is None


def _is_late(life: Lifecycle, key: ProcessKey) -> bool:
    """Return whether a process is a rank whose launcher started other ranks before, and none of its number."""
    rank, begun_ns = rank_of(life.tables, key), _start_ns(life, key)
    siblings = [one for one in life.mains if one != key and life.launcher(one) == life.launcher(key)]
    earlier = [rank_of(life.tables, one) for one in siblings if _start_ns(life, one) < begun_ns]
    return rank is not None and bool(earlier) and not {rank, None} & set(earlier)


def exit_after(life: Lifecycle, error: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `sys.exit` of a training that began after an error, if the command ended with its status."""
    last: Mapping[str, Any] | None = None
    for event in life.exit_messages:
        key, status = writer_of(event), event.get("status") or 1
        is_end = key in life.mains and key not in life.exceptions and status == life.exit_status
        if is_end and _start_ns(life, key) > error["time_ns"] and not _is_late(life, key) and is_final(life, event):
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
