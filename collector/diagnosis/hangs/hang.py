"""Find trainings that stand still with work pending, and who holds them up.

The collector takes stacks when a training is silent for longer than its own pace explains. Silence alone is no
hang: the training must wait for a batch that a worker does not deliver, for a collective that another rank has not
entered, or stand in one place itself. Who waits for another process is a victim; the culprit is at the end of the
chain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from collector.diagnosis.deaths.catalogue import EQUAL_STEPS
from collector.diagnosis.hangs import catalogue
from collector.diagnosis.hangs.recorded_ranks import (
    LONG_PATIENCE,
    Silent,
    compared,
    of_rank,
    recorded_standstill,
    timed_out,
    without_progress,
)
from collector.diagnosis.hangs.stuck_process import (
    AWAITS_ITEM,
    AWAITS_LOOP,
    AWAITS_POOL,
    AWAITS_PROCESS,
    AWAITS_QUEUE,
    AWAITS_ROOM,
    AWAITS_ROOM_ELSEWHERE,
    AWAITS_TASK,
    COLLECTIVE,
    SHARED_LOCKS,
    STUCK_WAITS,
    Process,
    Series,
    has_children,
    helpers_compute,
    is_forked,
    last_series,
    processes_of,
    raised_elsewhere,
    sampled_seconds_after,
    stuck_child,
    who_holds_up,
)
from collector.diagnosis.loading.loaders import has_batches_left, loader_settings, worker_slots
from collector.diagnosis.loading.uneven_ranks import uneven_ranks
from collector.diagnosis.run.columns import (
    ITERATIONS,
    SECOND_NS,
    WRITER,
    between,
    floats,
    key_of,
    sampled,
    sampled_on,
    whole,
    written,
)
from collector.diagnosis.run.exceptions import has_loader_timed_out, raised_in
from collector.diagnosis.run.lifecycle import Lifecycle, lifecycle_of, signal_raised
from collector.diagnosis.run.processes import last_step, rank_of, sentence
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.findings import SEVERITIES, Finding, Severity, extended, fact
from collector.flight_recorder import Standstill, ranks_words
from collector.stacks import ASLEEP, AT_FUTEX, AT_LOCK, POLLS, PROCESS_BEGIN, WAITS_FOR_BATCH, is_in
from collector.store import ProcessKey
from collector.units import duration
from training_harness.records import ROLE_WORKER

#: A child that ended this long before the silence, at most, may be its cause: the training finishes its step.
_AT_ONCE_SECONDS = 5.0
#: A pipe of `multiprocessing` in which a process waits for a message.
_RECEIVES = ("_recv", "multiprocessing/connection.py")
_DELIVERED = (AWAITS_QUEUE, AWAITS_ROOM, AWAITS_TASK)  # waits for what another thread delivers or takes
_MOST_PLACES = 4  # ranks whose lines a sentence names


def find_hangs(tables: RunTables) -> list[Finding]:
    """Return a finding for each process that holds up a training, by the newest stacks of the run.

    A rank that no stacks show is named by dumps of PyTorch's Flight Recorder, where there are some.
    """
    life = lifecycle_of(tables)
    events = [event for event in tables.events_of("stacks") if event["silent"] and not _is_interrupted(life, event)]
    by_stacks: list[Finding] = []
    by_dumps: list[Finding] = []
    for host in sorted({str(event["host"]) for event in events}):
        series = last_series([event for event in events if event["host"] == host])
        if not (silent := _silent_in(life, series)):
            continue
        longest_seconds = max(entry["silent_seconds"] for entry in silent.values())
        standstill = recorded_standstill(tables, series[-1]["time_ns"] - longest_seconds * SECOND_NS)
        held_up = _held_up(life, series, silent, standstill)
        found = [finding for _, finding in held_up] if standstill is None else compared(held_up, standstill)
        by_stacks += found
        if standstill is not None and standstill.missing and not found:
            by_dumps.append(of_rank(life, standstill, silent, [one for _, one in held_up]))
    return by_stacks or by_dumps[:1] or timed_out(life)


def _is_interrupted(life: Lifecycle, stacks: Mapping[str, Any]) -> bool:
    """Return whether a Ctrl-C or another signal came before a dump: the stacks then show how the run ends."""
    raised = (event for event in life.exceptions.values() if event["host"] == stacks["host"])
    return any(event["time_ns"] < stacks["time_ns"] and signal_raised(event) for event in raised)


def _silent_in(life: Lifecycle, series: Series) -> Silent:
    """Return the training processes that the last dump of a series found silent, and that did not go on since.

    To each belongs the time from its last step or batch to its newest sample, `lasted_seconds`.
    """
    last, silent = series[-1], {}
    for entry in last["silent"]:
        key = key_of({**entry, "host": last["host"]})
        if key and not (_went_on(life, key, last["time_ns"]) or raised_elsewhere(life, key, last)):
            more_seconds = sampled_seconds_after(last["time_ns"], sampled(life.tables, key))
            silent[key] = {**entry, "lasted_seconds": entry["silent_seconds"] + more_seconds}
    return silent


def _held_up(
    life: Lifecycle, series: Series, silent: Silent, standstill: Standstill | None
) -> list[tuple[Process, Finding]]:
    """Return the processes that hold up silent training processes by their stacks, each with its finding."""
    processes = processes_of(life, series)
    if standstill is not None:
        processes = {key: without_progress(process, standstill) for key, process in processes.items()}
    found: dict[ProcessKey, tuple[Process, Finding]] = {}
    # One that waits in a collective is held up by another, which may itself wait for the same process.
    for main in sorted(silent, key=lambda key: key in processes and processes[key].is_in_collective):
        culprit = _culprit(life, processes, main, [key for key in silent if key != main])
        if culprit is None:
            found |= _undelivered(life, processes, main, silent[main])
        elif culprit.is_unread and culprit.locus.role == "main" and standstill is not None:
            continue  # the dumps tell more
        elif culprit.key not in found and not culprit.is_evaluating:
            found[culprit.key] = culprit, _finding(life, culprit, processes, main, silent, series)
    return _in_one(life, [*found.values()])


def _in_one(life: Lifecycle, found: list[tuple[Process, Finding]]) -> list[tuple[Process, Finding]]:
    """Return findings with one for all ranks that wait in collectives: for a missing rank, or for each other."""
    ranks = [one for one in found if one[0].is_in_collective and one[0].is_stuck]
    if len(ranks) < 2:
        return found
    by_rank = sorted(ranks, key=lambda one: (SEVERITIES.index(one[1].severity), one[0].locus.rank or 0))
    process, finding = by_rank[0]
    others = [one for one in found if one not in ranks]
    sizes = {whole(event.get("world_size")) for event in life.tables.events_of("process-start")}
    if others or sizes != {len(ranks)} or uneven_ranks(life.tables) is not None:
        rest = [rank for one, _ in by_rank[1:] if (rank := one.locus.rank) is not None]
        too = f"{sentence(ranks_words(rest))} {'waits' if len(rest) == 1 else 'wait'} in a collective, too."
        return [*others, (process, extended(finding, too if rest else ""))]
    places = [f"rank {one.locus.rank}{one.where}" for one, _ in by_rank]
    is_one_line = len({one.frame for one, _ in ranks}) == 1
    everyone = "Both" if len(ranks) == 2 else f"All {len(ranks)}"
    standing = "at this line" if is_one_line else f"but not at one line: {', '.join(places[:_MOST_PLACES])}"
    merged = replace(
        finding,
        summary=f"{finding.summary} {everyone} ranks stand in a collective, {standing}.",
        advice=(catalogue.ONE_SHAPE if is_one_line else catalogue.ONE_ORDER, *finding.advice[1:]),
        fault=None if is_one_line else "your code",
    )
    return [(process, merged)]


def _went_on(life: Lifecycle, key: ProcessKey, time_ns: int) -> bool:
    """Return whether a process made progress after that time, ended as it should, or stopped recording."""
    if life.tables.events_of("hook-disabled", by=key):
        return True
    if any((floats(written(life.tables, name, key), "time_ns") > time_ns).any() for name in ITERATIONS):
        return True
    return key in life.recorded_exits and key not in life.exceptions and not life.exit_status


def _culprit(
    life: Lifecycle, processes: Mapping[ProcessKey, Process], main: ProcessKey, others: Sequence[ProcessKey]
) -> Process | None:
    """Follow the waits from a silent training process to the process that all wait for; None if unknown."""
    process = processes.get(main)
    if process is None or (process.main is None and not (process.is_suspended or process.is_unread)):
        return None
    slots = worker_slots(life.tables)
    workers = [worker for key, worker in processes.items() if slots.get(key[:2], (None,))[0] == main]
    if process.is_unread and not process.is_suspended:
        if process.is_busy:
            return None
        return who_holds_up([one for one in workers if _may_await(life, process, one)]) or process
    if others and process.is_in_collective:
        late = [processes[key] for key in others if key in processes and not processes[key].is_in_collective]
        return _culprit(life, processes, late[0].key, ()) if late else process
    if process.activity != WAITS_FOR_BATCH or process.is_suspended:
        return stuck_child(process, processes.values()) or _owing_child(process, processes.values()) or process
    return who_holds_up(workers)


def _owing_child(parent: Process, processes: Iterable[Process]) -> Process | None:
    """Return the child that stands still in a wait of its own while a process waits for a message of a child.

    Children that wait for a message, or for an item of a queue, are idle, and one that sleeps may do so by design.
    No child is blamed while another one computes or moves data: that one may owe the message.
    """
    if not _receives(parent):
        return None
    children = (one for one in processes if one.parent_pid == parent.key[1] and one.locus.role == "other")
    at_work = [
        one for one in children if one.main and any(is_in(frame, *PROCESS_BEGIN) for frame in one.main.frames)
    ]
    if any(one.is_busy or one.moved_seconds_ago is not None for one in at_work):
        return None
    still = (one for one in at_work if one.is_stuck)
    return next((one for one in still if not (_receives(one) or one.awaits or one.waits == ASLEEP)), None)


def _receives(process: Process) -> bool:
    frames = process.main.frames if process.main else ()
    calls = itertools.takewhile(lambda frame: not frame.is_own, frames)
    return any(is_in(frame, *_RECEIVES) for frame in calls)


def _may_await(life: Lifecycle, unread: Process, worker: Process) -> bool:
    """Return whether a training process without stacks may wait for a batch of a worker.

    It polls then, or waits at a futex for the thread that pins the loader's batches.
    """
    loader = loader_settings(life.tables).get((unread.key, worker.locus.loader), {})
    return (unread.waits or "").startswith((POLLS, AT_FUTEX) if loader.get("pin_memory") else POLLS)


def _undelivered(
    life: Lifecycle, processes: Mapping[ProcessKey, Process], main: ProcessKey, silence: Mapping[str, Any]
) -> dict[ProcessKey, tuple[Process, Finding]]:
    """Return the worker that made the batch that a training process waits for while all workers are idle."""
    if main not in processes or processes[main].activity != WAITS_FOR_BATCH:
        return {}
    pids = [pid for (_, pid), (owner, *_) in worker_slots(life.tables).items() if owner == main]
    fetches = life.tables.stream("fetch")
    made = fetches[(fetches["host"] == main[0]) & fetches["pid"].isin(pids)]
    if made.empty:
        return {}
    epoch = made[["loader", "epoch"]].iloc[-1]
    made, had = (
        rows[(rows[["loader", "epoch"]] == epoch).all(axis=1)]
        for rows in (made, written(life.tables, "batch", main))
    )
    lost = made[made["index"] > had["index"].max()] if len(had) else made
    writers = (
        (str(host), int(pid), int(ticks)) for host, pid, ticks in lost.sort_values("index")[WRITER].to_numpy()
    )
    key = next(writers, None)
    if key is None or key not in processes:
        return {}
    seconds, worker = silence["lasted_seconds"], processes[key]
    finding = catalogue.HANG_OF_UNDELIVERED.finding(
        locus=worker.locus,
        since_step=last_step(life.tables, main),
        evidence=(
            fact("silent_seconds", round(seconds, 1), "since its last step or batch"),
            fact("undelivered_batches_count", len(lost), "made by workers in this epoch"),
        ),
        severity="critical" if silence["silent_seconds"] >= silence["budget_seconds"] else "info",
        what=sentence(worker.name),
        index=int(lost["index"].min()),
        training=life.name(main),
        silent=duration(seconds),
    )
    return {key: (worker, finding)}


def _finding(
    life: Lifecycle,
    culprit: Process,
    processes: Mapping[ProcessKey, Process],
    main: ProcessKey,
    silent: Silent,
    series: Series,
) -> Finding:
    silence, others_count = silent[main], len(silent) - 1
    ended = _ended_ranks(life, culprit, series[-1]["time_ns"]) if culprit.is_in_collective else []
    waits = COLLECTIVE if (others_count or ended) and culprit.is_in_collective else culprit.waits
    is_worker = culprit.locus.role == "worker"
    seconds, budget_seconds = silence["silent_seconds"], silence["budget_seconds"]
    transfer = culprit.transfer(budget_seconds)
    lost = _lost_processes(life, culprit, main, series[-1]["time_ns"], seconds)
    is_alone = bool(lost) and not has_children(culprit, processes.values())
    patience = _patience(culprit, waits, is_alone=is_alone or culprit.is_alone)
    is_plain = not transfer and _is_plain(life, culprit, main, patience, silence, series, others_count)
    severity: Severity = "critical" if is_plain else "info"
    evidence = [fact("silent_seconds", round(silence["lasted_seconds"], 1), "since its last step or batch")]
    if silence["longest_seconds"] is not None:
        evidence.append(fact("longest_pause_seconds", round(silence["longest_seconds"], 1), "until then"))
    is_child = culprit.locus.role == "other"
    death = catalogue.HANG_OF_WORKER if is_worker else catalogue.HANG_OF_CHILD if is_child else catalogue.HANG
    found = death.finding(
        locus=culprit.locus,
        since_step=last_step(life.tables, main),
        evidence=(*evidence, *culprit.evidence(len(series), waits)),
        severity=severity,
        confidence=0.95 if culprit.is_stuck and len(series) > 1 else 0.7,
        what=sentence(culprit.name),
        does=waits or "standing still",
        where=culprit.where if not is_child or culprit.stands_in_own_code else "",
        training=life.name(main),
        waits_where=processes[main].where,
        held=catalogue.held(others_count, waits),
        hangs="is slow" if transfer else "hangs" if is_plain else "may hang",
        silent=duration(silence["lasted_seconds"]),
    )
    has_timeout = is_worker and bool(
        loader_settings(life.tables).get((main, culprit.locus.loader), {}).get("timeout_seconds")
    )
    if has_timeout:
        found = replace(found, advice=())  # the usual one is to set a timeout
    found = catalogue.with_remedy(found, waits, life, culprit)
    if has_timeout and not is_plain:
        found = extended(found, "", advice=(catalogue.LONGER_TIMEOUT,))
    if culprit.is_unread:
        found = extended(found, f"Its line is unknown: {culprit.error}.")
    if ended:
        found = extended(
            found, f"{sentence(ended[0])} had ended by then, and enters no collective.", advice=(catalogue.FIX_END,)
        )
    uneven = uneven_ranks(life.tables) if culprit.is_in_collective or others_count else None
    if uneven is not None:
        found = extended(found, uneven.sentence, *uneven.evidence, advice=(uneven.advice,), fault="your code")
    elif others_count and culprit.locus.role == "main" and waits != COLLECTIVE:
        found = replace(found, advice=(*found.advice, EQUAL_STEPS))
    waits_for_itself = not is_worker and (waits or "").startswith(AT_LOCK)
    if waits_for_itself or (waits is not None and waits == culprit.awaits):
        found = extended(found, culprit.other_threads)
        if lost:
            found = catalogue.of_lost_process(found, lost, culprit.awaits)
        elif culprit.awaits == AWAITS_TASK and culprit.has_taken_pool:
            found = catalogue.of_taken_pool(found)
        else:
            found = _with_lost_thread(life, found, culprit, series[-1]["time_ns"], seconds)
    return catalogue.of_slow(found, transfer) if transfer else found


def _with_lost_thread(life: Lifecycle, hang: Finding, process: Process, until_ns: float, seconds: float) -> Finding:
    """Return a hang with the thread that has ended and was to deliver what its process waits for."""
    since_ns = until_ns - seconds * SECOND_NS
    ended = life.tables.events_of("thread-exception", by=process.key)
    ended = [event for event in ended if event["time_ns"] <= until_ns]
    if not ended:
        is_plain_lock = (process.waits or "").startswith("blocked on a lock") and process.awaits is None
        is_at_lock = is_plain_lock and not process.is_in_collective and not is_forked(life, process)
        is_lone = process.is_alone or (process.locus.role == "main" and is_at_lock and process.has_one_thread)
        return catalogue.of_lone_thread(hang, process.awaits) if is_lone else hang
    before_seconds = (since_ns - ended[-1]["time_ns"]) / SECOND_NS
    when = f"{duration(before_seconds)} before the last step" if before_seconds > 0 else "after the last step"
    raised = raised_in(ended[-1], process.key)
    return catalogue.of_lost_thread(hang, f"{raised.kind}{raised.site}: {raised.lines[0]}", when)


def _ended_ranks(life: Lifecycle, process: Process, until_ns: float) -> list[str]:
    """Return the names of the other ranks of the same training that ended before a dump of stacks.

    A run may have several trainings, in turn or at once. The ranks of one live at the same time, and no two of its
    launchers start the same rank.
    """
    own_rank = process.locus.rank
    if own_rank is None:
        return []
    ranks = {key: rank for key in life.mains if (rank := rank_of(life.tables, key)) is not None}
    rivals = {life.launcher(key) for key, rank in ranks.items() if rank == own_rank} - {life.launcher(process.key)}
    newest = {rank: key for key, rank in ranks.items() if life.launcher(key) not in rivals}  # in order of time
    began_ns = _first_seen_ns(life, process.key)
    found = []
    for rank, key in newest.items():
        samples = sampled(life.tables, key)
        times, alive = floats(samples, "time_ns"), floats(samples, "alive")
        has_ended = (times[alive == 0] <= until_ns).any() and (times[alive == 1] >= began_ns).any()
        if rank != own_rank and has_ended:
            found.append(life.name(key))
    return found


def _first_seen_ns(life: Lifecycle, key: ProcessKey) -> float:
    """Return the time of the first record of a process: its own, or a sample of it."""
    written_ns = [float(event["time_ns"]) for event in life.tables.events if writer_of(event) == key]
    return min([*written_ns, *floats(sampled(life.tables, key), "time_ns")], default=math.inf)


def _lost_processes(
    life: Lifecycle, process: Process, main: ProcessKey, until_ns: float, seconds: float
) -> list[int]:
    """Return the children that ended as a process began to wait for them; none if some ended before.

    A pool with `maxtasksperchild` ends its processes all the time. A lock may be held by any child of the training.
    """
    if process.awaits not in (AWAITS_POOL, AWAITS_ITEM, *SHARED_LOCKS):
        return []
    host, pid, _ = process.key
    samples = between(sampled_on(life.tables, host), 0, until_ns)
    samples = samples[floats(samples, "role") != ROLE_WORKER]
    parent = main[1] if process.awaits in SHARED_LOCKS else pid
    children = samples.loc[floats(samples, "parent_pid") == parent, "process_pid"].unique()
    ended = samples[samples["process_pid"].isin(children) & (floats(samples, "alive") == 0)]
    since_ns = until_ns - (seconds + _AT_ONCE_SECONDS) * SECOND_NS
    if (floats(ended, "time_ns") < since_ns).any():
        return []
    return [int(pid) for pid in floats(ended, "process_pid")]


def _patience(culprit: Process, waits: str | None, *, is_alone: bool) -> float | None:
    """Return the budgets after which a process that stands in this wait hangs; None if it may be a long phase.

    Another process fills its queue at its own pace, and so a server sends, unless the process `is_alone`.
    """
    is_elsewhere = culprit.awaits in (AWAITS_ROOM_ELSEWHERE, AWAITS_PROCESS) and culprit.locus.role != "worker"
    if (culprit.awaits in (AWAITS_ITEM, AWAITS_LOOP) or is_elsewhere) and not is_alone:
        return None
    if culprit.awaits or (waits or "").startswith(STUCK_WAITS):
        return LONG_PATIENCE if culprit.has_thread_at_work else 1.0
    return None


def _is_plain(
    life: Lifecycle,
    culprit: Process,
    main: ProcessKey,
    patience: float | None,
    silence: Mapping[str, Any],
    series: Series,
    others_count: int,
) -> bool:
    """Return whether a silence is a hang, not merely a long phase."""
    is_worker = culprit.locus.role == "worker"
    budgets = float(silence["silent_seconds"] / silence["budget_seconds"])
    if culprit.is_in_long_phase:
        return False
    is_too_late = is_worker and culprit.is_stuck and has_loader_timed_out(life, main)
    if is_too_late or _has_lost_thread(life, culprit, silence, series):
        return True
    if budgets < 1 or (culprit.is_busy and not is_worker):
        return False
    is_at_work = culprit.is_busy or helpers_compute(series)
    if culprit.is_stuck and not is_at_work and patience is not None:
        return budgets >= patience
    is_child = culprit.locus.role == "other"
    # Without a loader, nothing says that an epoch is over.
    has_work = is_worker or (is_child and written(life.tables, "batch", main).empty)
    served = main if is_child else culprit.key
    if not (has_work or others_count or _may_have_batches_left(life.tables, served, series)):
        return False
    return budgets >= LONG_PATIENCE and (is_worker or culprit.is_stuck)


def _has_lost_thread(life: Lifecycle, process: Process, silence: Mapping[str, Any], series: Series) -> bool:
    """Return whether a process waits for an item or a task of a thread that an exception may have ended.

    What that thread delivered before may last for one more budget. A wait for a notice may be a pause.
    """
    if process.awaits not in _DELIVERED or not (process.is_alone and process.is_stuck):
        return False
    ended = life.tables.events_of("thread-exception", by=process.key)
    since_ns = series[-1]["time_ns"] - (silence["silent_seconds"] + silence["budget_seconds"]) * SECOND_NS
    return any(event["time_ns"] >= since_ns for event in ended)


def _may_have_batches_left(tables: RunTables, key: ProcessKey, series: Series) -> bool:
    """Return whether a training process may be in an epoch whose last batch it has not had.

    A loop that is left early ends its workers, so without them the epoch is over.
    """
    batches = written(tables, "batch", key)
    if batches.empty:
        return False
    settings = loader_settings(tables).get((key, whole(batches["loader"].iloc[-1])), {})
    if settings.get("num_workers") and not _has_workers(tables, key, series):
        return False
    return has_batches_left(tables, key) is not False


def _has_workers(tables: RunTables, key: ProcessKey, series: Series) -> bool:
    slots = worker_slots(tables)
    alive = [(key[0], process["pid"]) for process in series[-1]["processes"]]
    return any(slots[address][0] == key for address in alive if address in slots)
