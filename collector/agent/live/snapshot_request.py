"""`tidegauge snapshot`: requests to training processes for memory that only they can see, and their answers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from collector.agent.samplers.process_roles import EventTail
from collector.errors import TidegaugeError
from collector.report import wording
from collector.store import ProcessKey, Run, living_processes
from collector.units import duration
from training_harness.layout import FOR_TRAINING, REQUESTS, replace_file

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
        raise TidegaugeError(
            f"cannot write the request in {path.parent} ({error.strerror}); make it writable"
        ) from None
    finally:
        withdraw([path])
    if not answers and not waiting:
        why = "it has ended" if is_over else f"no process began to train in {timeout_seconds:g} s"
        raise TidegaugeError(f"no process of {run.run_id} took the snapshot: {why}; take it while the run trains")
    late = f"it finished no step in {timeout_seconds:g} s; raise --timeout"
    failures = [f"{names[key]}: {late}" for key in waiting]
    failures += [f"{names[key]}: {answer['error']}" for key, answer in answers.items() if "error" in answer]
    snapshots = {key: answer for key, answer in answers.items() if "error" not in answer}
    return [line for key, answer in snapshots.items() for line in _lines(run, names[key], answer)], failures


def request_path(run: Run, name: str) -> Path:
    """Return the path of the request of this name."""
    return run.path / REQUESTS / f"{name}.json"


def put_request(
    path: Path, what: str, *, steps: int, lasts_seconds: float, to: Mapping[str, Any], **more: object
) -> None:
    """Write a request, with `more` fields, to the processes that match `to`; the caller deletes it in the end.

    Raises:
        OSError: the request cannot be written.
    """
    expires_wall_ns = time.time_ns() + int(lasts_seconds * 1e9)
    body = {"what": what, "steps": steps, "expires_wall_ns": expires_wall_ns, "to": to, **more}
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, json.dumps(body), FOR_TRAINING)


def withdraw(paths: Iterable[Path]) -> None:
    """Delete requests, so that no process answers them any more."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class _Listener:
    """The processes that a request is for, by their names for people, and their answers."""

    def __init__(self, run: Run, request: str, worker: int | None) -> None:
        self.names: dict[ProcessKey, str] = {}
        self.answers: dict[ProcessKey, dict[str, Any]] = {}
        self._run = run
        self._request = request
        self._worker = worker
        self._exits: set[ProcessKey] = set()
        self._events = EventTail(run.events_dir)

    def listen(self) -> list[ProcessKey]:
        """Read the events since the last call; return the processes that may still answer."""
        for event in self._events.read():
            self._note_event(event)
        waiting = self.names.keys() - self._exits - self.answers.keys()
        living = living_processes(self._run, waiting)
        return sorted(waiting if living is None else living)

    def _note_event(self, event: dict[str, Any]) -> None:
        kind, rank, key = event["kind"], event["rank"], (event["host"], event["pid"], event["start_ticks"])
        name = f"pid {key[1]}" if rank is None else f"rank {rank} (pid {key[1]})"
        if kind == "process-start" and self._worker is None:
            self.names[key] = name
        elif kind == "worker-start" and self._worker == event["worker"]:
            self.names[key] = f"worker {self._worker} of loader {event['loader']}, {name}"
        elif kind == ("process-exit" if self._worker is None else "worker-exit"):
            self._exits.add(key)
        elif kind == "snapshot" and event.get("request") == self._request:
            self.answers[key] = event


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
            place = "of host memory" if device == "cpu" else f"on GPU {device.rpartition(':')[2]}"
            yield f"{wording.bytes_growth(site)} {place} at {site.site}: {wording.count_growth(site)}"
        if not sites:
            yield f"no memory grew within {grown.window}"
