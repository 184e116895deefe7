"""Can the verdict be trusted: do all workers report, were records lost, was anything attached at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collector.diagnosis.attachment import find_attachment
from collector.diagnosis.device_rows import devices
from collector.diagnosis.findings import Advice, Evidence, Finding, Locus
from collector.diagnosis.frames import SECOND_NS, floats, key_of, origin_ns, whole, window_text
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.loops import loader_settings, same_loop
from collector.diagnosis.tables import RunTables
from collector.diagnosis.victims import fact
from collector.store.runs import ProcessKey
from training_harness.journal import NOT_A_RECORD, NOT_COLLECTED, WRITE_FAILED

GRACE_SECONDS = 20.0
_GRACE_BATCHES = 3
_LOST_SAMPLES = 3
_START_SECONDS = 120.0  # until the first batch: workers under spawn may import for long

#: reason of a `records-lost` event -> what to do.
_LOSS_ADVICE = {
    WRITE_FAILED: "Make room on, or check the permissions of, the file system of the Tidegauge home "
    "(TIDEGAUGE_HOME)",
    NOT_COLLECTED: "Let a collector follow the run, which deletes the journals that it has taken in: start the "
    "training with `tidegauge run`, or keep `tidegauge collect RUN` running beside it",
    NOT_A_RECORD: "A value did not fit its column, which is a defect of Tidegauge: report it with the run",
}


def workers_reporting(tables: RunTables) -> tuple[int, int]:
    """How many of the workers of every loader's newest epoch have reported, and how many there are."""
    epochs = _newest_epochs(tables).values()
    heard = _heard(tables)
    promised = [(epoch["host"], whole(pid)) for epoch in epochs for pid in epoch.get("worker_pids") or ()]
    return sum(address in heard for address in promised), len(promised)


def find_trust(tables: RunTables) -> list[Finding]:
    """Workers that keep silent, lost records, disabled hooks, and runs in which nothing was attached."""
    found = [f for epoch in _newest_epochs(tables).values() if (f := _silent_workers(tables, epoch))]
    if tables.lost_count > 0:
        found.append(_samples_lost(tables))
    found += [_hook_disabled(event) for event in tables.events_of("hook-disabled")]
    return found + _lost_devices(tables) + find_attachment(tables)


def _lost_devices(tables: RunTables) -> list[Finding]:
    """`cannot-tell` for each GPU of which the driver has told nothing the last few times, and did before."""
    found = []
    for host, device, samples, _ in devices(tables):
        known = np.flatnonzero(np.isfinite(floats(samples, "used_bytes")))
        if not len(known) or len(samples) - 1 - known[-1] < _LOST_SAMPLES:
            continue
        last_ns, silent = float(floats(samples, "time_ns")[known[-1]]), len(samples) - 1 - int(known[-1])
        when = window_text(last_ns, float(floats(samples, "time_ns")[-1]), origin_ns(tables))
        found.append(
            Finding(
                kind="cannot-tell",
                severity="warning",
                confidence=0.9,
                summary=f"NVML stopped answering for GPU {device}: what the driver counts is not known since then. "
                "A GPU that has fallen off the bus ends so.",
                locus=Locus(host=host, device=device),
                evidence=(fact("device_samples_missing_count", silent, when),),
                advice=(
                    Advice(
                        text="Look for an Xid error of the GPU: `nvidia-smi`, `dmesg | grep Xid`",
                        expected="the driver names the reason",
                    ),
                ),
            )
        )
    return found


def _newest_epochs(tables: RunTables) -> dict[tuple[ProcessKey, int], Mapping[str, Any]]:
    """The newest epoch with workers of every loading loop."""
    settings = loader_settings(tables)
    life = Lifecycle(tables)
    one_loop = {main: same_loop(tables, settings, main) for main in life.mains}
    newest: dict[tuple[ProcessKey, int], Mapping[str, Any]] = {}
    for event in tables.events_of("epoch-start"):
        main, loader = key_of(event), whole(event.get("loader"))
        if event.get("worker_pids") and main is not None and loader is not None and main not in life.replaced:
            newest[(main, one_loop.get(main, {}).get(loader, loader))] = event
    return newest


def _heard(tables: RunTables) -> set[tuple[str, int | None]]:
    """(host, pid) of every process that said hello as a worker or recorded a fetch."""
    heard = {(str(event["host"]), whole(event["pid"])) for event in tables.events_of("worker-start")}
    fetch = tables.stream("fetch")[["host", "pid"]].drop_duplicates()
    return heard | {(str(host), whole(pid)) for host, pid in zip(fetch["host"], fetch["pid"], strict=True)}


def _silent_workers(tables: RunTables, epoch: Mapping[str, Any]) -> Finding | None:
    """The workers of one epoch that had time to report, or made batches, and did not."""
    heard, pids = _heard(tables), [whole(pid) for pid in epoch["worker_pids"]]
    silent = [worker for worker, pid in enumerate(pids) if (epoch["host"], pid) not in heard]
    if not silent:
        return None
    key, loader = key_of(epoch), whole(epoch.get("loader"))
    batch = tables.stream("batch")
    mine = batch[
        (batch["host"] == epoch["host"])
        & (batch["pid"] == epoch["pid"])
        & (floats(batch, "loader") == loader)
        & (floats(batch, "epoch") == whole(epoch.get("epoch")))
    ]
    made = mine[mine["worker"].isin(silent)]
    age = (_end_ns(tables, key) - float(epoch["time_ns"])) / SECOND_NS
    had_time = len(mine) > 0 and (age >= GRACE_SECONDS or len(made) >= _GRACE_BATCHES)
    if not had_time and age < _START_SECONDS:
        return None
    reporting = len(pids) - len(silent)
    return Finding(
        kind="workers-not-reporting",
        severity="warning",
        confidence=0.95 if len(made) else 0.8,
        summary=(
            f"{reporting} of {len(pids)} workers of loader {loader} report; "
            f"silent: {', '.join(str(worker) for worker in silent)}. What they do is not seen."
        ),
        locus=Locus(
            host=epoch["host"],
            rank=whole(epoch.get("rank")),
            role="worker",
            loader=loader,
            worker=silent[0] if len(silent) == 1 else None,
        ),
        evidence=(
            Evidence(
                name="workers_reporting_count", value=reporting, unit="count", n=len(pids), window="newest epoch"
            ),
            Evidence(
                name="batches_of_silent_workers_count",
                value=len(made),
                unit="count",
                n=len(mine),
                window="newest epoch",
            ),
            Evidence(name="epoch_age_seconds", value=round(age, 1), unit="seconds", n=1, window="newest epoch"),
        ),
        advice=(
            Advice(
                text="Look for hook-disabled events, a worker start that strips the environment (python "
                "-I, -S, -E), or a "
                "library that replaces torch's worker loop; `tidegauge doctor` checks this machine",
                expected="all workers report and slow-worker verdicts become possible",
            ),
        ),
    )


def _end_ns(tables: RunTables, key: ProcessKey | None) -> float:
    """The moment up to which this process was observed."""
    life = Lifecycle(tables)
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
        summary=f"{tables.lost_count} records could not be written"
        + (f" ({', '.join(streams)})" if streams else "")
        + "; the training was not affected, the verdict may be.",
        evidence=(
            Evidence(
                name="records_lost_count", value=tables.lost_count, unit="count", n=tables.lost_count, window="run"
            ),
            Evidence(
                name="records_lost_events_count", value=len(events), unit="count", n=len(events), window="run"
            ),
        ),
        advice=tuple(
            Advice(text=text, expected="no further losses")
            for reason, text in _LOSS_ADVICE.items()
            if reason in reasons or not reasons
        ),
    )


def _hook_disabled(event: Mapping[str, Any]) -> Finding:
    return Finding(
        kind="cannot-tell",
        severity="info",
        confidence=1.0,
        summary=f"The hook {event.get('hook')!r} failed in process {event.get('pid')} and was taken out "
        f"({event.get('error')}); what it measures is missing from then on.",
        locus=Locus(host=event.get("host"), rank=whole(event.get("rank")), pid=whole(event.get("pid"))),
        evidence=(
            Evidence(name="hook_error", value=str(event.get("error"))[:200], unit="text", n=1, window="event"),
        ),
    )
