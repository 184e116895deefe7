"""Find the process that ended first where another one lost it, and the launches of a command."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from collector.diagnosis.deaths.known_errors import is_of_collective
from collector.diagnosis.loading.uneven_ranks import uneven_ranks
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.diagnosis.run.tables import writer_of
from collector.diagnosis.run.training import iterations_within
from collector.store import ProcessKey

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
    a collective, or of the launcher.
    """
    raiser, raised_ns = writer_of(exception), exception["time_ns"]
    peers = {key for key in life.mains if key not in (raiser, *life.exceptions)}
    for event in life.exit_messages:
        is_before = _start_ns(life, raiser) < event["time_ns"] < raised_ns
        if is_before and writer_of(event) in peers and is_final(life, event):
            return FirstToLeave(writer_of(event), exit=event)
    is_of_main = raiser in life.mains
    if is_of_main and not is_of_collective(exception):
        return None
    silent = [key for key in life.mains if key in peers and key not in life.recorded_exits]
    codes = life.exit_codes_by_launcher
    for key in silent:
        if (status := codes.get(key[1], 0)) > 0:
            return FirstToLeave(key, status=status)
    # A launcher that names other ranks has ended this one.
    is_explained = any(key[1] in codes for key in life.mains) or uneven_ranks(life.tables) is not None
    is_lost = is_of_main and _LOST_PEER.search(str(exception.get("message"))) is not None
    if is_explained or not is_lost or len(silent) != 1 or not life.is_dead(silent[0]):
        return None
    return FirstToLeave(silent[0]) if _start_ns(life, silent[0]) < raised_ns else None


def launches_of(
    life: Lifecycle, causes: Sequence[tuple[ProcessKey, Mapping[str, Any]]]
) -> list[tuple[ProcessKey, Mapping[str, Any]]]:
    """Return the first exception of each launch, which starts its processes when the one before has failed."""
    firsts: list[tuple[ProcessKey, Mapping[str, Any]]] = []
    for key, event in causes:
        if not firsts or _start_ns(life, key) > firsts[-1][1]["time_ns"]:
            firsts.append((key, event))
    return firsts


def is_final(life: Lifecycle, event: Mapping[str, Any]) -> bool:
    """Return whether a training did not go on after a call of `sys.exit`, as one does that catches it."""
    return iterations_within(life.tables, writer_of(event), event["time_ns"], math.inf) == 0


def _start_ns(life: Lifecycle, key: ProcessKey) -> float:
    """Return the time of the first record of a process."""
    starts = life.tables.events_of("process-attached", "process-start", by=key)
    return min((float(event["time_ns"]) for event in starts), default=0.0)
