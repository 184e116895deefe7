"""Check whether the verdict can be trusted: hooks in every process, all workers reporting, no records lost.

Where hooks are absent, the reason comes from what the process and the collector recorded about its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from collector.diagnosis.loading.loaders import Epoch, epochs_of, recreated_loaders, replaced_loaders, worker_slots
from collector.diagnosis.run.allocators import devices
from collector.diagnosis.run.columns import SECOND_NS, floats, key_of, whole, window_text, written
from collector.diagnosis.run.lifecycle import Lifecycle, end_words, lifecycle_of
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.findings import Advice, Evidence, Finding, Locus, advise, cannot_tell, fact
from collector.store import ProcessKey
from collector.units import counted, listed
from training_harness.journal import NOT_A_RECORD, NOT_COLLECTED, WRITE_FAILED

#: Seconds, and batches, that an epoch's workers have to report once the epoch yields batches.
GRACE_SECONDS = 20.0
_GRACE_BATCHES = 3
#: Number of newest samples without an answer of the driver after which a GPU counts as lost.
_LOST_SAMPLES = 3
#: Seconds that workers have to report before the first batch: under spawn their imports may take long.
_START_SECONDS = 120.0

#: reason of a `records-lost` event -> what to do.
_LOSS_ADVICE = {
    WRITE_FAILED: "Free space on the file system of the Tidegauge home (TIDEGAUGE_HOME), or check its permissions",
    NOT_COLLECTED: "Let a collector follow the run, which deletes the journals that it has taken in: start the "
    "training with `tidegauge run`, or keep `tidegauge collect RUN` running with it",
    NOT_A_RECORD: "A value did not fit its column, which is a defect of Tidegauge: report it with the run",
}
#: `obstacle` of a `process-seen` event -> what happened, and the remedy (collector/agent/samplers/programs.py).
_OBSTACLES = {
    "PYTHONPATH replaced": (
        "its PYTHONPATH was replaced, so that it no longer leads to Tidegauge",
        "Keep what is there: PYTHONPATH=.:$PYTHONPATH; or install tidegauge in the environment of this Python",
    ),
    "-E": (
        "Python was started with -E, which ignores PYTHONPATH",
        "Leave -E out, or install tidegauge in the environment of this Python",
    ),
    "-I": (
        "Python was started with -I, which ignores PYTHONPATH",
        "Leave -I out, or install tidegauge in the environment of this Python",
    ),
    "-S": (
        "Python was started with -S, which leaves out everything that attaches at start-up",
        "Leave -S out, or call training_harness.attach() in the script",
    ),
    "environment cleared": (
        "its environment does not name the run, as after `env -i`, `sudo` or a job scheduler",
        "Pass TIDEGAUGE_RUN_DIR and PYTHONPATH on (sudo --preserve-env=TIDEGAUGE_RUN_DIR,PYTHONPATH)",
    ),
    "PID namespace": (
        "it runs in a PID namespace of its own, where it has another process id than here",
        "Start `tidegauge run` within that namespace, such as in the container",
    ),
    "another run": (
        "it belongs to another run, of a `tidegauge run` within the command",
        "Read the verdict on that run (`tidegauge runs` lists it), or leave out one `tidegauge run --` of the two",
    ),
    "disabled": ("TIDEGAUGE_DISABLED=1 is set in its environment", "Unset TIDEGAUGE_DISABLED"),
}
_UNKNOWN = (
    "its command line and environment do not show why",
    "Call training_harness.attach() in the script, and run `tidegauge doctor`",
)
_XID_ADVICE = Advice(
    text="Look for an Xid error of the GPU: `nvidia-smi`, `dmesg | grep Xid`",
    expected="the driver names the reason",
)
_FOLLOW = Advice(
    text="Follow them to their end with `tidegauge collect latest`, or let the command wait for them",
    expected="samples of memory go on, and the verdict covers the whole training",
)
_RUN_IT = Advice(
    text="Start the next training with `tidegauge run -- COMMAND`",
    expected="steps, batches, workers and the cause of a death are recorded",
)


def workers_reporting(tables: RunTables) -> tuple[int, int]:
    """Return how many workers of every loader's newest epoch have reported, and how many there are."""
    epochs = _newest_epochs(tables).values()
    reporting = _reporting_processes(tables)
    workers = [(epoch.main[0], pid) for epoch in epochs for pid in epoch.pids.values()]
    return sum(worker in reporting for worker in workers), len(workers)


def find_trust(tables: RunTables) -> list[Finding]:
    """Find workers that do not report, lost records, disabled hooks, lost GPUs, and runs without any hooks."""
    findings = [f for epoch in _newest_epochs(tables).values() if (f := _silent_workers(tables, epoch))]
    if tables.lost_count > 0:
        findings.append(_samples_lost(tables))
    findings += [_hook_disabled(event) for event in tables.events_of("hook-disabled")]
    return findings + _lost_devices(tables) + find_attachment(tables)


def _lost_devices(tables: RunTables) -> list[Finding]:
    """Return `cannot-tell` for each GPU that the driver reported on before, but not in the last few samples."""
    # Training ends soon after its GPU is lost, so samples after its last step count too.
    findings, reports = [], tables.stream("device")
    for host, device, _, _ in devices(tables):
        samples = reports[(reports["host"] == host) & (floats(reports, "device") == device)]
        times, answered = floats(samples, "time_ns"), np.flatnonzero(np.isfinite(floats(samples, "used_bytes")))
        silent = len(samples) - 1 - int(answered[-1]) if len(answered) else 0
        if silent < _LOST_SAMPLES:
            continue
        window = window_text(tables, float(times[answered[-1]]), float(times[-1]))
        finding = cannot_tell(
            f"NVML stopped answering for GPU {device}: the driver's figures are missing since then. A GPU that "
            "has fallen off the bus shows this.",
            fact("device_samples_missing_count", silent, window),
            locus=Locus(host=host, device=device),
            advice=(_XID_ADVICE,),
        )
        findings.append(replace(finding, severity="warning", confidence=0.9))
    return findings


def _newest_epochs(tables: RunTables) -> dict[tuple[ProcessKey, int], Epoch]:
    """Return (process, loader) -> its newest epoch with workers, with the last setting."""
    life, replaced = lifecycle_of(tables), replaced_loaders(tables)
    one_loop = {main: recreated_loaders(tables, main) for main in life.mains}
    return {
        (epoch.main, one_loop.get(epoch.main, {}).get(epoch.loader, epoch.loader)): epoch
        for epoch in epochs_of(tables)
        if epoch.pids and epoch.main not in life.replaced and (epoch.main, epoch.loader) not in replaced
    }


def _reporting_processes(tables: RunTables) -> set[tuple[str, int | None]]:
    """Return (host, pid) of every process that recorded its start as a worker, or a fetch."""
    started = {(str(event["host"]), whole(event["pid"])) for event in tables.events_of("worker-start")}
    fetch = tables.stream("fetch")[["host", "pid"]].drop_duplicates()
    return started | {(str(host), whole(pid)) for host, pid in zip(fetch["host"], fetch["pid"], strict=True)}


def _silent_workers(tables: RunTables, epoch: Epoch) -> Finding | None:
    """Return the finding on an epoch's workers that had time to report, or made batches, and did not report."""
    event, key, loader, pids = epoch
    processes = _reporting_processes(tables)
    silent = [worker for worker, pid in pids.items() if (key[0], pid) not in processes]
    if not silent:
        return None
    rows = written(tables, "batch", key)
    rows = rows[(floats(rows, "loader") == loader) & (floats(rows, "epoch") == whole(event.get("epoch")))]
    silent_rows = rows[rows["worker"].isin(silent)]
    age_seconds = (_end_ns(tables, key) - float(event["time_ns"])) / SECOND_NS
    had_time = len(rows) > 0 and (age_seconds >= GRACE_SECONDS or len(silent_rows) >= _GRACE_BATCHES)
    if not had_time and age_seconds < _START_SECONDS:
        return None
    reporting = len(pids) - len(silent)
    return Finding(
        kind="workers-not-reporting",
        severity="warning",
        confidence=0.95 if len(silent_rows) else 0.8,
        summary=(
            f"{reporting} of {len(pids)} workers of loader {loader} report; "
            f"silent: {listed(silent)}. Their fetches are not recorded."
        ),
        locus=Locus(
            host=key[0],
            rank=event["rank"],
            role="worker",
            loader=loader,
            worker=silent[0] if len(silent) == 1 else None,
        ),
        evidence=(
            fact("workers_reporting_count", reporting, "newest epoch", n=len(pids)),
            fact("batches_of_silent_workers_count", len(silent_rows), "newest epoch", n=len(rows)),
            fact("epoch_age_seconds", round(age_seconds, 1), "newest epoch"),
        ),
        advice=advise(
            text="Look for hook-disabled events, a worker start that strips the environment (python "
            "-I, -S, -E), or a "
            "library that replaces torch's worker loop; `tidegauge doctor` checks this machine",
            expected="all workers report and slow-worker verdicts become possible",
        ),
    )


def _end_ns(tables: RunTables, key: ProcessKey | None) -> float:
    """Return the time up to which this process was observed."""
    life = lifecycle_of(tables)
    if life.status() == "running" and life.is_living(key):
        return float(tables.now_ns)
    batch = tables.stream("batch")
    times = floats(batch[batch["pid"] == key[1]], "time_ns") if key else floats(batch, "time_ns")
    return float(times[-1]) if len(times) else 0.0


def _samples_lost(tables: RunTables) -> Finding:
    events = tables.events_of("records-lost")
    streams = sorted({str(event.get("stream")) for event in events})
    reasons = {event.get("reason") for event in events} & _LOSS_ADVICE.keys()
    return Finding(
        kind="samples-lost",
        severity="warning",
        confidence=1.0,
        summary=f"{counted(tables.lost_count, 'record')} could not be written"
        + (f" ({', '.join(streams)})" if streams else "")
        + "; the training was not affected, the verdict may be.",
        evidence=(
            fact("records_lost_count", tables.lost_count, "run", n=tables.lost_count),
            fact("records_lost_events_count", len(events), "run", n=len(events)),
        ),
        advice=tuple(
            Advice(text=text, expected="no further losses")
            for reason, text in _LOSS_ADVICE.items()
            if reason in reasons or not reasons
        ),
    )


def _hook_disabled(event: Mapping[str, Any]) -> Finding:
    return cannot_tell(
        f"The hook {event.get('hook')!r} failed in process {event.get('pid')} and was removed "
        f"({event.get('error')}); its measurements are missing from then on.",
        fact("hook_error", str(event.get("error"))[:200], "event"),
        locus=Locus(host=event.get("host"), rank=whole(event.get("rank")), pid=whole(event.get("pid"))),
    )


def find_attachment(tables: RunTables) -> list[Finding]:
    """Find what a run without steps and batches shows instead, and what the command left running."""
    life = lifecycle_of(tables)
    if life.watched:
        return [_watched(life)]
    return [*_left_running(life), *_in_namespaces(life), *_no_iterations(life)]


def _in_namespaces(life: Lifecycle) -> list[Finding]:
    """Find processes whose records have other process ids than their samples."""
    events = [
        event
        for event in life.tables.events_of("process-seen")
        if event.get("obstacle") == "PID namespace" and event.get("has_torch")
    ]
    if not events or not life.mains:
        return []
    pids = list(dict.fromkeys(whole(event.get("process_pid")) for event in events))
    why, remedy = _OBSTACLES["PID namespace"]
    return [
        cannot_tell(
            f"The memory of process {pids[0]} is not matched with its steps, batches and workers: {why}.",
            fact("unmatched_processes_count", len(pids), "run", n=len(pids)),
            locus=Locus(host=str(events[0]["host"]), role="other", pid=pids[0]),
            advice=advise(text=remedy, expected="each process has its steps, batches and memory"),
        )
    ]


def _no_iterations(life: Lifecycle) -> list[Finding]:
    tables = life.tables
    has_training = life.mains or any(len(tables.stream(name)) for name in ("batch", "step", "fetch"))
    has_ended = life.status() != "running" and life.exit_status is not None
    if has_training or not has_ended or life.killed_mains or tables.events_of("exception"):
        return []
    attached = [*map(writer_of, tables.events_of("process-attached"))]
    seen_events = {key: event for event in tables.events_of("process-seen") if (key := key_of(event, "process_"))}
    unattached = [event for key, event in seen_events.items() if event.get("has_torch") and key not in attached]
    if unattached:
        return [_not_attached(life, event) for event in unattached[:3]]
    return [_attached_without_iterations(life, attached) if attached else _no_torch(life, seen_events)]


def _ended(life: Lifecycle) -> str:
    if life.exit_status == 0:
        return "The command ended"
    return f"The command failed (exit status {life.exit_status}; its own output says why)"


def _attached_without_iterations(life: Lifecycle, attached: list[ProcessKey]) -> Finding:
    them = "it" if len(attached) == 1 else "them"
    names = ", ".join(life.name(key) for key in attached[:3])
    return cannot_tell(
        f"{_ended(life)}. Tidegauge was attached to {names}{'' if len(attached) <= 3 else ' and others'}, and saw "
        f"no DataLoader, no optimizer step and no repeated forward pass in {them}: there are no "
        "iterations to count. The checks say which memory and limits were judged all the same.",
        _attached(len(attached)),
        *_exit_status(life),
    )


def _not_attached(life: Lifecycle, event: Mapping[str, Any]) -> Finding:
    why, remedy = _OBSTACLES.get(str(event.get("obstacle")), _UNKNOWN)
    pid = whole(event.get("process_pid"))
    argv = " ".join(map(str, event.get("argv") or ()))[:80]
    return cannot_tell(
        f"Process {pid} ({argv}) used torch without Tidegauge's hooks: {why}. Its memory was judged from outside; "
        "its steps, batches and workers were not seen.",
        _attached(0),
        *_exit_status(life),
        locus=Locus(host=str(event["host"]), role="other", pid=pid),
        advice=advise(text=remedy, expected="steps, batches and workers are recorded"),
    )


def _no_torch(life: Lifecycle, processes: Mapping[Any, Mapping[str, Any]]) -> Finding:
    pythons = sum(bool(event.get("is_python")) for event in processes.values())
    if pythons:
        what = f"{pythons} of its processes {'is' if pythons == 1 else 'are'} Python, and none loaded torch"
    elif processes:
        what = "none of its processes is Python"
    else:
        what = "the command ended before its processes were sampled"
    return cannot_tell(f"{_ended(life)}. No training was seen: {what}.", _attached(0), *_exit_status(life))


def _attached(count: int, n: int | None = None) -> Evidence:
    return fact("attached_processes_count", count, "run", n=count if n is None else n)


def _exit_status(life: Lifecycle) -> tuple[Evidence, ...]:
    return () if life.exit_status is None else (fact("exit_status", life.exit_status, "run"),)


def _left_running(life: Lifecycle) -> list[Finding]:
    if life.is_living(life.command):
        return []
    # DataLoader's workers end by themselves, seconds after their training process.
    workers = worker_slots(life.tables)
    processes = [(key, process) for key, process in life.left_running.items() if key[:2] not in workers]
    if not processes:
        return []
    names = ", ".join(
        f"{key[1]} ({' '.join(map(str, process.get('argv') or ()))[:60]})" for key, process in processes[:3]
    )
    (host, pid, _), count = processes[0][0], len(processes)
    return [
        cannot_tell(
            f"The command ended ({end_words(life.exit_status)}), and {count} of the processes that it started "
            f"still {'runs' if count == 1 else 'run'}: {names}. The verdict covers the run up to this moment.",
            fact("left_running_count", count, "end of the command", n=count),
            *_exit_status(life),
            locus=Locus(host=host, role="other", pid=pid),
            advice=(_FOLLOW,),
        )
    ]


def _watched(life: Lifecycle) -> Finding:
    samples = life.tables.rows_count("process")
    ended = " The watch ended while the process went on." if life.watch_ended else ""
    return cannot_tell(
        "The process was watched from outside, without hooks: its steps, batches, DataLoader workers and exit "
        f"status are not known. The memory of its processes, the host and the devices is known.{ended}",
        _attached(0, n=samples),
        fact("process_samples_count", samples, "run", n=samples),
        advice=(_RUN_IT,),
    )
