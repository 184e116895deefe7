"""Find DataLoader workers that were ended from outside, and did not merely follow their training process."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from signal import SIGINT, SIGTERM
from typing import Any

from collector.diagnosis.loading.loaders import epochs_of, worker_slots
from collector.diagnosis.run.columns import floats, sampled, whole
from collector.diagnosis.run.lifecycle import Lifecycle, signal_of_child, signal_raised
from collector.diagnosis.run.tables import writer_of
from collector.store import ProcessKey

_WORKER_MESSAGE = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
#: torch/_utils.py: how DataLoader passes on the exception of a worker.
_RAISED_MESSAGE = re.compile(r"in DataLoader worker process (\d+)")
_SIGNAL_MESSAGE = re.compile(r"is killed by signal: ([\w ]+)")
#: Name of a signal in DataLoader's message (torch/csrc/DataLoader.cpp) -> its number.
_SIGNALS = {signals.strsignal(number): int(number) for number in signals.valid_signals()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadWorker:
    """A worker that died: its place, its process if it recorded its start, and what is known about its end."""

    main: ProcessKey
    loader: int
    worker: int
    host: str
    pid: int
    key: ProcessKey | None
    exit_code: int | None
    message: str | None

    @property
    def address(self) -> tuple[str, int]:
        """Host and pid."""
        return self.host, self.pid

    @property
    def signal(self) -> int | None:
        """The signal that ended it, None if unknown or if it exited by itself."""
        if self.exit_code is not None:
            return signal_of_child(self.exit_code)
        match = _SIGNAL_MESSAGE.search(self.message or "")
        return _SIGNALS.get(match[1]) if match else None


@dataclass(frozen=True)
class Workers:
    """The workers of one run and their ends."""

    life: Lifecycle

    def killed(self) -> list[DeadWorker]:
        """Return the workers that ended by a signal or an abrupt exit, and not because their loader was done."""
        dead = {worker.address: worker for worker in self._reported_dead()}
        for address in self._blamed:
            if address not in dead and (worker := self._worker_at(address, None)):
                dead[address] = worker
        for worker in (*self._raised_before_their_main(), *self._gone_before_their_main()):
            dead.setdefault(worker.address, worker)
        return sorted(dead.values(), key=lambda worker: (worker.main, worker.loader, worker.worker))

    def raiser(self, main: ProcessKey, message: str) -> ProcessKey | None:
        """Return the worker whose exception ended its training process, to which DataLoader passed it on."""
        match = _RAISED_MESSAGE.search(message)
        errors = [error for error in self.life.tables.events_of("loader-error", by=main) if error.get("in_worker")]
        if match is None or not errors:
            return None
        loader = whole(max(errors, key=lambda error: error["error_time_ns"])["loader"])
        addresses = [address for address, slot in self._slots.items() if slot == (main, loader, int(match[1]))]
        return self._keys.get(addresses[-1]) if addresses else None

    @cached_property
    def _blamed(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """(host, pid) of a worker -> the exception of its training process in which DataLoader blamed it."""
        blamed = {}
        for (host, _, _), event in self.life.exceptions.items():
            match = _WORKER_MESSAGE.search(str(event.get("message")))
            for pid in match[1].replace(",", " ").split() if match else ():
                blamed[(host, int(pid))] = event
        return blamed

    def _reported_dead(self) -> list[DeadWorker]:
        dead = []
        for event in self.life.tables.events_of("worker-died"):
            owner, pid, code = writer_of(event), whole(event.get("worker_pid")), whole(event.get("exit_code"))
            if pid is None or self._stopped_on_purpose(owner, code) or self._ended_by_exit(event):
                continue
            worker = self._worker_at((owner[0], pid), code)
            # An error while a spawned worker unloads the interpreter, after its loop, costs no batch.
            if worker and not (worker.message is None and self._exit_reasons.get(worker.key) == "done"):
                dead.append(worker)
        return dead

    def _raised_before_their_main(self) -> Iterator[DeadWorker]:
        """Yield workers with an exception of their own, outside DataLoader's loop, that made their main raise."""
        for key, event in self.life.exceptions.items():
            worker = self._worker_at(key[:2], None)
            if worker is None or signal_raised(event) is not None:
                continue
            effect = self.life.exceptions.get(worker.main)
            if effect is not None and event["time_ns"] <= effect["time_ns"]:
                yield worker

    def _stopped_on_purpose(self, main: ProcessKey, code: int | None) -> bool:
        """Return whether a worker's end by this code follows from a signal to the whole job."""
        exception = self.life.exceptions.get(main)
        is_stopped = exception is not None and signal_raised(exception) is not None
        is_stopped = is_stopped or self.life.killed_mains.get(main) in (SIGINT, SIGTERM)
        return is_stopped and code in (-SIGINT, -SIGTERM, 0, 1)

    def _ended_by_exit(self, event: Mapping[str, Any]) -> bool:
        """Return whether an exiting interpreter terminated this worker: torch's handler of SIGTERM exits with 0."""
        exits = self.life.tables.events_of("process-exit", by=writer_of(event))
        is_exiting = bool(exits) and exits[-1]["time_ns"] <= event["time_ns"] and not exits[-1].get("detached")
        return is_exiting and whole(event.get("exit_code")) in (0, -SIGTERM)

    def _gone_before_their_main(self) -> list[DeadWorker]:
        """Return workers of a killed training process that recorded no exit and did not merely follow it.

        A worker that outlives its training process notices that and records its exit within seconds. So if another
        worker did, or still lives, a silent one was killed itself. If all are silent, one signal ended the job.
        """
        dead = []
        newest = {(epoch.main, epoch.loader): epoch for epoch in epochs_of(self.life.tables)}
        for (main, _), epoch in newest.items():
            if main not in self.life.killed_mains or self.life.killed_mains[main] in (SIGINT, SIGTERM):
                continue
            addresses = [(main[0], pid) for pid in epoch.pids.values()]
            silent = [address for address in addresses if self._vanished(address)]
            if len(silent) == len(addresses):
                silent = [address for address in silent if self._died_before(self._keys[address], main)]
            dead += [worker for address in silent if (worker := self._worker_at(address, None))]
        return dead

    def _vanished(self, address: tuple[str, int]) -> bool:
        """Return whether a worker that recorded its start is known to be gone, and recorded no exit."""
        key, living = self._keys.get(address), self.life.tables.living
        return key is not None and living is not None and key not in living and key not in self._exit_reasons

    @cached_property
    def _exit_reasons(self) -> dict[ProcessKey | None, str]:
        """Worker -> the reason that it recorded for leaving its loop."""
        events = self.life.tables.events_of("worker-exit")
        return {writer_of(event): str(event.get("reason")) for event in events}

    def _died_before(self, worker: ProcessKey, main: ProcessKey) -> bool:
        """Return whether the collector saw the training process alive after it had seen the worker's end."""
        worker_rows, main_rows = sampled(self.life.tables, worker), sampled(self.life.tables, main)
        dead_ns = floats(worker_rows, "time_ns")[floats(worker_rows, "alive") == 0]
        alive_ns = floats(main_rows, "time_ns")[floats(main_rows, "alive") == 1]
        return len(dead_ns) > 0 and len(alive_ns) > 0 and bool(dead_ns[0] < alive_ns[-1])

    @cached_property
    def _slots(self) -> dict[tuple[str, int], tuple[ProcessKey, int, int]]:
        return worker_slots(self.life.tables)

    @cached_property
    def _keys(self) -> dict[tuple[str, int], ProcessKey]:
        return {key[:2]: key for key in map(writer_of, self.life.tables.events_of("worker-start"))}

    def _worker_at(self, address: tuple[str, int], code: int | None) -> DeadWorker | None:
        slot = self._slots.get(address)
        if slot is None:
            return None
        main, loader, worker = slot
        exception = self._blamed.get(address)
        return DeadWorker(
            main=main,
            loader=loader,
            worker=worker,
            host=address[0],
            pid=address[1],
            key=self._keys.get(address),
            exit_code=code,
            message=str(exception.get("message")) if exception else None,
        )
