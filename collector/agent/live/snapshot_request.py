"""`tidegauge snapshot`: requests to training processes for memory that only they can see, and their answers."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from collector.report import wording
from collector.store import ProcessKey, Run, list_event_logs, living_processes, read_events, size_bytes
from collector.units import duration
from training_harness.layout import REQUESTS

_POLL_SECONDS = 0.2


def take(
    run: Run,
    what: str,
    *,
    steps: int,
    timeout_seconds: float,
    show: Callable[[str], None],
    worker: int | None = None,
) -> tuple[list[str], list[str]]:
    """Have every training process of a run take a snapshot, and wait until all have.

    Args:
        run: the run.
        what: one of `layout.SNAPSHOT_KINDS`.
        steps: duration of a profile or a growth.
        timeout_seconds: longest wait.
        show: called repeatedly with a text that names the processes waited for.
        worker: ask the worker of this id of every loader, not the training processes.

    Returns:
        Lines for people: snapshots with their paths, and failures with their reasons.

    Raises:
        TidegaugeError: no process could answer; the message says why.
    """
    name = f"{what}-{secrets.token_hex(4)}"
    deadline = time.monotonic() + timeout_seconds
    listener = _Listener(run, name, worker)
    names, answers = listener.names, listener.answers
    path = request_path(run, name)
    to = {"role": "main"} if worker is None else {"role": "worker", "worker": worker}
    try:
        put_request(path, what, steps=steps, lasts_seconds=timeout_seconds, to=to)
        while True:
            waiting = listener.listen()
            is_over = not waiting and (bool(answers) or _has_ended(run, has_started=bool(names)))
            if is_over or time.monotonic() > deadline:
                break
            processes = ", ".join(names[key] for key in waiting) or "a training process"
            show(f"waiting for the next step of {processes}")
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise TidegaugeError(f"cannot ask in {path.parent} ({error.strerror}); make it writable") from None
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if not answers and not waiting:
        why = "it has ended" if is_over else f"none began to train in {timeout_seconds:g} s"
        raise TidegaugeError(f"no process of {run.run_id} took the snapshot: {why}; ask while it trains")
    late = f"it came to no step's end in {timeout_seconds:g} s; give --timeout more"
    failures = [f"{names[key]}: {late}" for key in waiting]
    failures += [f"{names[key]}: {answer['error']}" for key, answer in answers.items() if "error" in answer]
    snapshots = {key: answer for key, answer in answers.items() if "error" not in answer}
    return [line for key, answer in snapshots.items() for line in _lines(run, names[key], answer)], failures


def request_path(run: Run, name: str) -> Path:
    """Return the path of the request of this name."""
    return run.path / REQUESTS / f"{name}.json"


def put_request(path: Path, what: str, *, steps: int, lasts_seconds: float, to: Mapping[str, Any]) -> None:
    """Write a request to the processes that match `to`; the caller deletes it in the end.

    Raises:
        OSError: the request cannot be written.
    """
    body = {"what": what, "steps": steps, "expires_wall_ns": time.time_ns() + int(lasts_seconds * 1e9), "to": to}
    path.parent.mkdir(mode=0o700, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(body))
    os.replace(scratch, path)


@dataclass(slots=True)
class _Listener:
    """The processes that a request is for, by their names for people, and their answers."""

    run: Run
    request: str
    worker: int | None
    names: dict[ProcessKey, str] = field(default_factory=dict)
    answers: dict[ProcessKey, Any] = field(default_factory=dict)
    exits: set[ProcessKey] = field(default_factory=set)
    ends_bytes: dict[str, int] = field(default_factory=dict)

    def listen(self) -> list[ProcessKey]:
        """Read the events since the last call; return the processes that may still answer."""
        for path in list_event_logs(self.run):
            begin_bytes = self.ends_bytes.get(path.name, 0)
            if size_bytes(path) <= begin_bytes:
                continue
            lines = read_events(path, begin_bytes)
            self.ends_bytes[path.name] = lines.end_bytes
            for row in lines.table.to_pylist():
                self._note_event(row)
        waiting = self.names.keys() - self.exits - self.answers.keys()
        living = living_processes(self.run, waiting)
        return sorted(waiting if living is None else living)

    def _note_event(self, row: dict[str, Any]) -> None:
        key = (row["host"], row["pid"], row["start_ticks"])
        start, end = (
            ("worker-start", "worker-exit") if self.worker is not None else ("process-start", "process-exit")
        )
        if row["kind"] == start and self.worker in (None, (body := json.loads(row["body"])).get("worker")):
            rank = row["rank"]
            name = f"pid {key[1]}" if rank is None else f"rank {rank} (pid {key[1]})"
            self.names[key] = (
                name if self.worker is None else f"worker {self.worker} of loader {body['loader']}, {name}"
            )
        elif row["kind"] == end:
            self.exits.add(key)
        elif row["kind"] == "snapshot" and (body := json.loads(row["body"])).get("request") == self.request:
            self.answers[key] = body


def _has_ended(run: Run, *, has_started: bool) -> bool:
    """Return whether no further process will start; between two attempts of an elastic job one will."""
    manifest = run.manifest
    command = manifest["command"]
    if manifest["end_time_ns"] is not None:
        return True
    if command is None:
        return has_started
    living = living_processes(run, [(command["host"], command["pid"], command["start_ticks"])])
    return living is not None and not living


def _lines(run: Run, name: str, answer: dict[str, Any]) -> Iterator[str]:
    paths = [str(run.path / answer[file]) for file in ("path", "trace", "pickle") if answer.get(file)]
    held = duration(answer["held_ns"] / 1e9)
    yield f"{name}, step {answer['step']}, the training waited {held}: {'  '.join(paths)}"
    if answer["what"] == "growth":
        from collector.diagnosis import rank_sites
        from collector.store import read_growth

        grown = read_growth(run, answer)
        largest_first = sorted(grown.held_bytes, key=lambda device: -grown.held_bytes[device])
        sites = [(device, site) for device in largest_first for site in rank_sites(grown, device)]
        for device, site in sites:
            yield f"{wording.bytes_growth(site)} {_place(device)} at {site.site}: {wording.count_growth(site)}"
        if not sites:
            yield f"nothing stays within {grown.window}"


def _place(device: str) -> str:
    return "of host memory" if device == "cpu" else f"on GPU {device.rpartition(':')[2]}"
