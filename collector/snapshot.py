"""`tidegauge snapshot`: asks the training processes of a run for what only they can see, and waits for it."""

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

from collector import wording
from collector.errors import TidegaugeError
from collector.quantities import duration
from collector.store.journals import list_event_logs, read_events, size_bytes
from collector.store.runs import ProcessKey, Run, living_processes
from training_harness.layout import REQUESTS

_LOOK_EVERY_SECONDS = 0.2


def take(
    run: Run,
    what: str,
    *,
    steps: int,
    timeout_seconds: float,
    say: Callable[[str], None],
    worker: int | None = None,
) -> tuple[list[str], list[str]]:
    """Have every training process of a run take a snapshot, and wait until all have.

    Args:
        run: the run.
        what: one of `layout.SNAPSHOT_KINDS`.
        steps: that a profile or a growth lasts.
        timeout_seconds: to wait at most.
        say: told again and again who is waited for.
        worker: ask the worker of this id of every loader, not the training processes.

    Returns:
        Lines for people: what was taken and where it is, and what was not and why.

    Raises:
        TidegaugeError: nobody could answer, and why.
    """
    name = f"{what}-{secrets.token_hex(4)}"
    deadline = time.monotonic() + timeout_seconds
    heard = _Heard(run, name, worker)
    names, answers = heard.names, heard.answers
    path = request_path(run, name)
    to = {"role": "main"} if worker is None else {"role": "worker", "worker": worker}
    try:
        put_request(path, what, steps=steps, lasts_seconds=timeout_seconds, to=to)
        while True:
            silent = heard.listen()
            over = not silent and (bool(answers) or _is_over(run, started=bool(names)))
            if over or time.monotonic() > deadline:
                break
            say("waiting for the next step of " + (", ".join(names[key] for key in silent) or "a training process"))
            time.sleep(_LOOK_EVERY_SECONDS)
    except OSError as error:
        raise TidegaugeError(f"cannot ask in {path.parent} ({error.strerror}); make it writable") from None
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if not answers and not silent:
        why = "it has ended" if over else f"none began to train in {timeout_seconds:g} s"
        raise TidegaugeError(f"no process of {run.run_id} took the snapshot: {why}; ask while it trains")
    late = f"it came to no step's end in {timeout_seconds:g} s; give --timeout more"
    refused = [f"{names[key]}: {late}" for key in silent]
    refused += [f"{names[key]}: {said['error']}" for key, said in answers.items() if "error" in said]
    told = [key for key, said in answers.items() if "error" not in said]
    return [line for key in told for line in _told(run, names[key], answers[key])], refused


def request_path(run: Run, name: str) -> Path:
    """Where the request of this name is put."""
    return run.path / REQUESTS / f"{name}.json"


def put_request(path: Path, what: str, *, steps: int, lasts_seconds: float, to: Mapping[str, Any]) -> None:
    """Ask the processes that are what `to` says; who asks takes it away again.

    Raises:
        OSError: it cannot be written.
    """
    body = {"what": what, "steps": steps, "expires_wall_ns": time.time_ns() + int(lasts_seconds * 1e9), "to": to}
    path.parent.mkdir(mode=0o700, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(body))
    os.replace(scratch, path)


@dataclass(slots=True)
class _Heard:
    """What the processes that are asked are called, and their answers to a request."""

    run: Run
    request: str
    worker: int | None
    names: dict[ProcessKey, str] = field(default_factory=dict)
    answers: dict[ProcessKey, Any] = field(default_factory=dict)
    gone: set[ProcessKey] = field(default_factory=set)
    ends: dict[str, int] = field(default_factory=dict)

    def listen(self) -> list[ProcessKey]:
        """Hear what was said since the last time; returns the processes that may still answer."""
        for path in list_event_logs(self.run):
            begin = self.ends.get(path.name, 0)
            if size_bytes(path) <= begin:
                continue
            lines = read_events(path, begin)
            self.ends[path.name] = lines.end_bytes
            for row in lines.table.to_pylist():
                self._hear(row)
        waiting = self.names.keys() - self.gone - self.answers.keys()
        living = living_processes(self.run, waiting)
        return sorted(waiting if living is None else living)

    def _hear(self, row: dict[str, Any]) -> None:
        key = (row["host"], row["pid"], row["start_ticks"])
        begins, ends = (
            ("worker-start", "worker-exit") if self.worker is not None else ("process-start", "process-exit")
        )
        if row["kind"] == begins and self.worker in (None, (said := json.loads(row["body"])).get("worker")):
            rank = row["rank"]
            name = f"pid {key[1]}" if rank is None else f"rank {rank} (pid {key[1]})"
            self.names[key] = (
                name if self.worker is None else f"worker {self.worker} of loader {said['loader']}, {name}"
            )
        elif row["kind"] == ends:
            self.gone.add(key)
        elif row["kind"] == "snapshot" and (said := json.loads(row["body"])).get("request") == self.request:
            self.answers[key] = said


def _is_over(run: Run, *, started: bool) -> bool:
    """Whether nobody will come any more; between two attempts of an elastic job somebody will."""
    manifest = run.manifest
    command = manifest["command"]
    if manifest["end_time_ns"] is not None:
        return True
    if command is None:
        return started
    living = living_processes(run, [(command["host"], command["pid"], command["start_ticks"])])
    return living is not None and not living


def _told(run: Run, who: str, said: dict[str, Any]) -> Iterator[str]:
    places = [str(run.path / said[part]) for part in ("path", "trace", "pickle") if said.get(part)]
    held = duration(said["held_ns"] / 1e9)
    yield f"{who}, step {said['step']}, the training waited {held}: {'  '.join(places)}"
    if said["what"] == "growth":
        from collector.diagnosis.holders import ranked
        from collector.store.snapshots import growth

        grown = growth(run, said)
        largest_first = sorted(grown.held_bytes, key=lambda device: -grown.held_bytes[device])
        holders = [(device, holder) for device in largest_first for holder in ranked(grown, device)]
        for device, holder in holders:
            yield f"{wording.more(holder)} {_memory(device)} at {holder.site}: {wording.kept(holder)}"
        if not holders:
            yield f"nothing stays within {grown.window}"


def _memory(device: str) -> str:
    """Return the words for the memory of a device, as PyTorch names it."""
    return "of host memory" if device == "cpu" else f"on GPU {device.rpartition(':')[2]}"
