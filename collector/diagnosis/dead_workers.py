"""Which DataLoader workers were ended from outside, and which merely followed their training process."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from collector.diagnosis.frames import floats, key_of, sampled, whole
from collector.diagnosis.lifecycle import SIGINT, SIGTERM, Lifecycle, is_interrupt, signal_of
from collector.diagnosis.loops import worker_slots
from collector.store.runs import ProcessKey

_WORKER_MESSAGE = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")

_SIGNAL_MESSAGE = re.compile(r"is killed by signal: ([\w ]+)")
#: As DataLoader's message names them (torch/csrc/DataLoader.cpp).
_SIGNALS = {signals.strsignal(number): int(number) for number in signals.valid_signals()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadWorker:
    """A worker that died: its place, its process if it said hello, and what is known of its end."""

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
        """(host, pid)."""
        return self.host, self.pid

    @property
    def signal(self) -> int | None:
        """The signal that ended it, None if unknown or if it exited by itself."""
        if self.exit_code is not None:
            return signal_of(self.exit_code)
        named = _SIGNAL_MESSAGE.search(self.message or "")
        return _SIGNALS.get(named[1]) if named else None


@dataclass(frozen=True)
class Workers:
    """The workers of one run and their ends."""

    life: Lifecycle

    def killed(self) -> list[DeadWorker]:
        """Workers that ended by a signal or an abrupt exit, and not because their loader was done."""
        dead = {worker.address: worker for worker in self._reported_dead()}
        for address in self._named:
            if address not in dead and (worker := self._worker_at(address, None)):
                dead[address] = worker
        for worker in self._gone_before_their_main():
            dead.setdefault(worker.address, worker)
        return sorted(dead.values(), key=lambda worker: (worker.main, worker.loader, worker.worker))

    @cached_property
    def _named(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """(host, pid) of the workers that DataLoader blamed in an exception of their training process."""
        named = {}
        for (host, _, _), event in self.life.exceptions.items():
            match = _WORKER_MESSAGE.search(str(event.get("message")))
            for pid in match[1].replace(",", " ").split() if match else ():
                named[(host, int(pid))] = event
        return named

    def _reported_dead(self) -> list[DeadWorker]:
        found = []
        for event in self.life.tables.events_of("worker-died"):
            owner, pid, code = key_of(event), whole(event.get("worker_pid")), whole(event.get("exit_code"))
            if owner is None or pid is None or self._stopped_on_purpose(owner, code):
                continue
            worker = self._worker_at((owner[0], pid), code)
            if worker is not None and not self._was_let_go(worker):
                found.append(worker)
        return found

    def _was_let_go(self, worker: DeadWorker) -> bool:
        """Whether it had come to its loop's end before, and the training did not fail of it.

        What the interpreter and its libraries meet when a spawned worker unloads them costs no batch.
        """
        return worker.message is None and worker.key is not None and self._farewells.get(worker.key) == "done"

    def _stopped_on_purpose(self, main: ProcessKey, code: int | None) -> bool:
        """Whether a worker's end by this code follows from a signal to the whole job."""
        exception = self.life.exceptions.get(main)
        stopped = exception is not None and is_interrupt(exception)
        stopped = stopped or self.life.killed_mains.get(main) in (SIGINT, SIGTERM)
        return stopped and code in (-SIGINT, -SIGTERM, 1)

    def _gone_before_their_main(self) -> list[DeadWorker]:
        """Workers without farewell of a killed training process that did not merely follow it.

        A worker that outlives its training process notices and says so within seconds. So beside a sibling that
        did, or that still lives, a silent one was killed itself; if all are silent, one signal met the whole job.
        """
        found = []
        for (main, _), event in self._newest_epochs.items():
            if main not in self.life.killed_mains or self.life.killed_mains[main] in (SIGINT, SIGTERM):
                continue
            addresses = [
                (main[0], pid) for slot in event.get("worker_pids") or () if (pid := whole(slot)) is not None
            ]
            silent = [address for address in addresses if self._vanished(address)]
            if len(silent) == len(addresses):
                silent = [address for address in silent if self._died_before(self._keys[address], main)]
            found += [worker for address in silent if (worker := self._worker_at(address, None))]
        return found

    @cached_property
    def _newest_epochs(self) -> dict[tuple[ProcessKey, int], Mapping[str, Any]]:
        newest = {}
        for event in self.life.tables.events_of("epoch-start"):
            owner, loader = key_of(event), whole(event.get("loader"))
            if owner is not None and loader is not None:
                newest[(owner, loader)] = event
        return newest

    def _vanished(self, address: tuple[str, int]) -> bool:
        """Whether a worker that said hello is known to be gone, and said no farewell."""
        key, living = self._keys.get(address), self.life.tables.living
        return key is not None and living is not None and key not in living and key not in self._farewells

    @cached_property
    def _farewells(self) -> dict[ProcessKey, str]:
        """Why each worker that said farewell left its loop."""
        events = self.life.tables.events_of("worker-exit")
        return {key: str(event.get("reason")) for event in events if (key := key_of(event))}

    def _died_before(self, worker: ProcessKey, main: ProcessKey) -> bool:
        """Whether the collector saw the training process alive after it had seen the worker's end."""
        ends, lives = sampled(self.life.tables, worker), sampled(self.life.tables, main)
        ended = floats(ends, "time_ns")[floats(ends, "alive") == 0]
        alive = floats(lives, "time_ns")[floats(lives, "alive") == 1]
        return len(ended) > 0 and len(alive) > 0 and bool(ended[0] < alive[-1])

    @cached_property
    def _slots(self) -> dict[tuple[str, int], tuple[ProcessKey, int, int]]:
        return worker_slots(self.life.tables)

    @cached_property
    def _keys(self) -> dict[tuple[str, int], ProcessKey]:
        starts = self.life.tables.events_of("worker-start")
        return {(key[0], key[1]): key for event in starts if (key := key_of(event))}

    def _worker_at(self, address: tuple[str, int], code: int | None) -> DeadWorker | None:
        slot = self._slots.get(address)
        if slot is None:
            return None
        main, loader, worker = slot
        named = self._named.get(address)
        return DeadWorker(
            main=main,
            loader=loader,
            worker=worker,
            host=address[0],
            pid=address[1],
            key=self._keys.get(address),
            exit_code=code,
            message=str(named.get("message")) if named else None,
        )
