"""Find out if the hooks were in the run's processes, and why not, from what these and the collector recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from collector.diagnosis.findings import Advice, Evidence, Finding, Locus
from collector.diagnosis.frames import key_of, whole
from collector.diagnosis.lifecycle import Lifecycle, seen_key
from collector.diagnosis.tables import RunTables
from collector.store.runs import ProcessKey

#: `obstacle` of a `process-seen` event -> what happened, and the remedy (collector/agent/programs.py).
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
    "disabled": ("TIDEGAUGE_DISABLED=1 is set in its environment", "Unset TIDEGAUGE_DISABLED"),
}
_UNKNOWN = (
    "its command line and environment do not tell why",
    "Call training_harness.attach() in the script, and look what `tidegauge doctor` says",
)
_EXPECTED = "steps, batches and workers are seen"


def find_attachment(tables: RunTables) -> list[Finding]:
    """Tell of a run without steps and batches what was seen instead, and of what the command left running."""
    life = Lifecycle(tables)
    if life.watched:
        return [_watched(life)]
    return [*_left_running(life), *_no_iterations(life)]


def _no_iterations(life: Lifecycle) -> list[Finding]:
    tables = life.tables
    seen = life.mains or any(len(tables.stream(name)) for name in ("batch", "step", "fetch"))
    over = life.status() != "running" and life.exit_status is not None
    if seen or not over or life.killed_mains or tables.events_of("exception"):
        return []
    attached = [key for event in tables.events_of("process-attached") if (key := key_of(event))]
    seen_events = {key: event for event in tables.events_of("process-seen") if (key := seen_key(event))}
    unattached = [event for key, event in seen_events.items() if event.get("has_torch") and key not in attached]
    if unattached:
        return [_not_attached(life, event) for event in unattached[:3]]
    return [_attached_in_vain(life, attached) if attached else _no_torch(life, seen_events)]


def _ended(life: Lifecycle) -> str:
    if life.exit_status == 0:
        return "The command ended"
    return f"The command failed (exit status {life.exit_status}; its own output says why)"


def _attached_in_vain(life: Lifecycle, attached: list[ProcessKey]) -> Finding:
    one = len(attached) == 1
    names = ", ".join(life.name(key) for key in attached[:3])
    return _cannot_tell(
        f"{_ended(life)}. Tidegauge was attached to {names}{'' if len(attached) <= 3 else ' and others'}, and saw "
        f"no DataLoader, no optimizer step and no repeated forward pass in {'it' if one else 'them'}: there are no "
        "iterations to count. Memory, open files and limits were judged all the same.",
        len(attached),
        life,
        (),
    )


def _not_attached(life: Lifecycle, event: Mapping[str, Any]) -> Finding:
    why, remedy = _OBSTACLES.get(str(event.get("obstacle")), _UNKNOWN)
    pid = whole(event.get("process_pid"))
    argv = " ".join(map(str, event.get("argv") or ()))[:80]
    found = _cannot_tell(
        f"Process {pid} ({argv}) used torch without Tidegauge's hooks: {why}. Its memory was judged from outside; "
        "its steps, batches and workers were not seen.",
        0,
        life,
        (Advice(text=remedy, expected=_EXPECTED),),
    )
    return dataclasses.replace(found, locus=Locus(host=str(event["host"]), role="other", pid=pid))


def _no_torch(life: Lifecycle, told: Mapping[Any, Mapping[str, Any]]) -> Finding:
    pythons = [event for event in told.values() if event.get("is_python")]
    if pythons:
        what = (
            f"{len(pythons)} of its processes {'is' if len(pythons) == 1 else 'are'} Python, and none loaded torch"
        )
    elif told:
        what = "none of its processes is Python"
    else:
        what = "the command ended before its processes were sampled"
    return _cannot_tell(
        f"{_ended(life)}. No training was seen: {what}. Memory, open files and limits were judged.",
        0,
        life,
        (),
    )


def _cannot_tell(summary: str, attached: int, life: Lifecycle, advice: tuple[Advice, ...]) -> Finding:
    return Finding(
        kind="cannot-tell",
        severity="info",
        confidence=1.0,
        summary=summary,
        evidence=(
            Evidence(name="attached_processes_count", value=attached, unit="count", n=attached, window="run"),
            *_exit_status(life),
        ),
        advice=advice,
    )


def _exit_status(life: Lifecycle) -> tuple[Evidence, ...]:
    if life.exit_status is None:
        return ()
    return (Evidence(name="exit_status", value=life.exit_status, unit="status", n=1, window="run"),)


def _left_running(life: Lifecycle) -> list[Finding]:
    if not life.left_running or life.is_living(life.command):
        return []
    left = list(life.left_running.items())
    names = ", ".join(
        f"{key[1]} ({' '.join(map(str, process.get('argv') or ()))[:60]})" for key, process in left[:3]
    )
    count = len(left)
    return [
        Finding(
            kind="cannot-tell",
            severity="info",
            confidence=1.0,
            summary=(
                f"The command ended (exit status {life.exit_status}), and {count} of the processes that it started "
                f"still {'runs' if count == 1 else 'run'}: {names}. The verdict is that of this moment."
            ),
            locus=Locus(host=left[0][0][0], role="other", pid=left[0][0][1]),
            evidence=(
                Evidence(
                    name="left_running_count", value=count, unit="count", n=count, window="end of the command"
                ),
                *_exit_status(life),
            ),
            advice=(
                Advice(
                    text="`tidegauge collect latest` follows them to their end; or let the command wait for them",
                    expected="samples of memory go on, and the verdict covers the whole training",
                ),
            ),
        )
    ]


def _watched(life: Lifecycle) -> Finding:
    samples = life.tables.rows_count("process")
    ended = " The watch ended while it went on." if life.watch_ended else ""
    return Finding(
        kind="cannot-tell",
        severity="info",
        confidence=1.0,
        summary=(
            "The process was watched from outside, without hooks: its steps, batches, DataLoader workers and exit "
            f"status are not known. The memory of its processes, the host and the devices is.{ended}"
        ),
        evidence=(
            Evidence(name="attached_processes_count", value=0, unit="count", n=samples, window="run"),
            Evidence(name="process_samples_count", value=samples, unit="count", n=samples, window="run"),
        ),
        advice=(
            Advice(
                text="Start the next training with `tidegauge run -- COMMAND`",
                expected="steps, batches, workers and the cause of a death are seen",
            ),
        ),
    )
