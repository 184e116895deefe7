"""Find exceptions that a DataLoader raised and the training survived: it goes on without those batches.

The training catches them, or they end a thread that iterates the loader for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from collector.diagnosis.run.columns import SECOND_NS, floats, whole, written
from collector.diagnosis.run.lifecycle import Lifecycle, lifecycle_of
from collector.diagnosis.run.processes import rank_of
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.diagnosis.run.training import step_at
from collector.findings import Advice, Finding, Locus, fact
from collector.store import ProcessKey
from collector.units import number, plain_text

#: Most findings, those of the most errors.
_MOST_FINDINGS = 3
_AT_ONCE_SECONDS = 5.0  # an error that ends a thread does so at once
_LOOK = Advice(
    text="Look at the samples that raise it: print their index where the exception is caught",
    expected="no sample is left out unnoticed",
)
_RAISE_ANOTHER = Advice(
    text="Catch StopIteration where `next()` is called in the dataset, and raise another exception or start again",
    expected="each epoch has all its batches, or the training ends with an error",
)
_HAND_ON = Advice(
    text="Catch the exception in that thread and hand it on to the training, which may wait for the thread's "
    "batches",
    expected="the training ends with the exception, instead of waiting",
)


def find_caught_errors(tables: RunTables) -> list[Finding]:
    """Find `caught-errors`: one finding for each loader, type of exception and line."""
    life = lifecycle_of(tables)
    newest: dict[tuple[ProcessKey, int | None, str, str | None], list[Mapping[str, Any]]] = {}
    for event in tables.events_of("loader-error"):
        place = writer_of(event), whole(event.get("loader")), str(event.get("type")), event.get("site")
        newest.setdefault(place, []).append(event)
    counted = [(_caught_count(life, key, events[-1]), key, events) for (key, *_), events in newest.items()]
    counted.sort(key=lambda item: -item[0])
    return [_finding(tables, count, key, events) for count, key, events in counted[:_MOST_FINDINGS] if count > 0]


def _caught_count(life: Lifecycle, key: ProcessKey, event: Mapping[str, Any]) -> int:
    """Return how many of these errors the training went on from.

    The last one ended a training that failed and got no batch after it. The script may have caught that one too, to
    raise another exception or to exit.
    """
    count = whole(event.get("count")) or 0
    error_ns = float(event.get("error_time_ns") or event["time_ns"])
    has_failed = key in life.exceptions or (life.exit_status or 0) > 0
    went_on = bool((floats(written(life.tables, "batch", key), "time_ns") > error_ns).any())
    return count - 1 if has_failed and not went_on else count


def _finding(tables: RunTables, count: int, key: ProcessKey, events: list[Mapping[str, Any]]) -> Finding:
    event, loader = events[-1], whole(events[-1].get("loader"))
    site = os.path.basename(str(event["site"])) if event.get("site") else ""
    message = plain_text(str(next((one["message"] for one in reversed(events) if one.get("message")), "")))
    batches = floats(written(tables, "batch", key), "loader")
    where = "A worker of loader" if event.get("in_worker") else "Loader"
    times = "once" if count == 1 else f"{number(count)} times"
    thread, is_warning, advice = _ended_thread(tables, key, event), True, _RAISE_ANOTHER
    if event.get("type") == "StopIteration":
        effect = ". A for loop takes that for the end of the epoch: the batches after it are missing."
    elif thread is not None:
        effect, advice = f", and thread {thread} ended with it: it takes no more batches.", _HAND_ON
    else:
        effect = f", and the training caught it: {'that batch is' if count == 1 else 'those batches are'} missing."
        is_warning, advice = False, _LOOK
    return Finding(
        kind="caught-errors",
        severity="warning" if is_warning else "info",
        confidence=0.95,
        summary=f"{where} {loader} raised {event.get('type')}{f' at {site}' if site else ''} {times}{effect}",
        locus=Locus(host=key[0], rank=rank_of(tables, key), role="main", pid=key[1], loader=loader),
        since_step=step_at(tables, key, float(events[0]["time_ns"])),
        evidence=(
            fact("caught_errors_count", count, "run"),
            fact("batches_count", int((batches == loader).sum()), "of this loader, recorded"),
            *([fact("exception", message[:200], "the last one recorded")] if message else []),
        ),
        advice=(advice,),
    )


def _ended_thread(tables: RunTables, key: ProcessKey, error: Mapping[str, Any]) -> str | None:
    """Return the thread of the training process that an error of its loader ended, if any."""
    error_ns = error.get("error_time_ns") or error["time_ns"]
    for event in tables.events_of("thread-exception", by=key):
        if (
            event.get("type") == error.get("type")
            and 0 <= event["time_ns"] - error_ns <= _AT_ONCE_SECONDS * SECOND_NS
        ):
            return str(event.get("thread"))
    return None
