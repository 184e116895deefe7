"""The ends of a run's processes, from their own records, from those of other processes, and from which still live.

A process that is killed records no exit. So a process counts as killed only if it recorded none *and* is known to
be dead. Where that can't be known (another host, another boot), nothing is claimed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from signal import SIGINT, SIGTERM, Signals
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import pandas as pd

from collector.diagnosis.run.columns import (
    ITERATIONS,
    SECOND_NS,
    by_process,
    floats,
    key_of,
    origin_ns,
    sampled,
    whole,
    written,
)
from collector.diagnosis.run.processes import rank_of, signal_name
from collector.diagnosis.run.tables import RunTables, once, writer_of
from collector.diagnosis.statistics.growth import MIN_POINTS
from collector.findings import Locus
from collector.store import ProcessKey
from collector.units import number
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_OTHER, ROLE_WORKER, ROLES

Status = Literal["running", "finished", "failed", "killed"]
_SHELL_SIGNAL_BASE = 128
_PROGRAM_CHARACTERS = 60
_LAST_SIGNAL = 64
_LAUNCHER_MESSAGE = re.compile(r"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")  # torch.distributed.elastic
# torch.multiprocessing.spawn: a child that a signal or a status of its own ended, and one that raised
_SPAWN_MESSAGE = re.compile(r"process (\d+) terminated with (?:signal|exit code) (SIG\w+|\d+)")
SPAWN_ERROR = re.compile(r"-- Process (\d+) terminated with the following error")
SPAWN_MODULE = "multiprocessing/spawn.py"  # that of torch, and that of CPython
_SIGNAL_MESSAGE = re.compile(r"got signal: (\d+)")  # torch.distributed.elastic's SignalException


@dataclass(frozen=True)
class Lifecycle:
    """The starts and ends of the processes of one run."""

    tables: RunTables

    @cached_property
    def mains(self) -> tuple[ProcessKey, ...]:
        """The training processes that reported, without those that their launcher has replaced."""
        return tuple(key for key in self._attempts if key not in self.replaced)

    @cached_property
    def replaced(self) -> dict[ProcessKey, int]:
        """Training processes of earlier attempts -> attempt: when a rank fails, torchrun restarts all ranks."""
        newest: dict[tuple[str, int | None], int] = {}
        for launcher, attempt in self._attempts.values():
            newest[launcher] = max(attempt, newest.get(launcher, 0))
        return {key: attempt for key, (launcher, attempt) in self._attempts.items() if attempt < newest[launcher]}

    @cached_property
    def attempts(self) -> int:
        """Number of times that the ranks were started."""
        return 1 + max((attempt for _, attempt in self._attempts.values()), default=0)

    @cached_property
    def _attempts(self) -> dict[ProcessKey, tuple[tuple[str, int | None], int]]:
        """Training process -> its launcher (host, pid), and the attempt that it is part of.

        A spawned worker runs the script too. If that trains where it should only define, the worker is no launch.
        """
        workers = {
            (*writer_of(event)[:2], pid)
            for event in self.tables.events_of("epoch-start")
            for pid in event.get("worker_pids") or ()
        }
        return {
            key: ((key[0], whole(event.get("parent_pid"))), whole(event.get("attempt")) or 0)
            for event in self.tables.events_of("process-start")
            if (key := writer_of(event)) and (key[0], event.get("parent_pid"), key[1]) not in workers
        }

    def launcher(self, key: ProcessKey) -> tuple[str, int | None] | None:
        """Return the host and pid of the process that started a training process; None for another process."""
        return self._attempts[key][0] if key in self._attempts else None

    def of_last_attempt(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a stream without those of replaced processes: their steps were repeated, or lost."""
        for host, pid, ticks in self.replaced:
            rows = rows[(rows["pid"] != pid) | (rows["start_ticks"] != ticks) | (rows["host"] != host)]
        return rows

    @cached_property
    def others(self) -> tuple[ProcessKey, ...]:
        """Processes that are no training, worker or watched process, and have enough samples to be judged."""
        return tuple(key for key, count in self.samples_of_others.items() if count >= MIN_POINTS)

    @cached_property
    def samples_of_others(self) -> dict[ProcessKey, int]:
        """Processes that are no training, worker or watched process -> the number of their samples."""
        process = self.tables.stream("process")
        rows = process[~np.isin(floats(process, "role"), (ROLE_WORKER, ROLE_COLLECTOR))]
        counts = ((key, len(samples)) for key, samples in by_process(rows))
        return {key: n for key, n in counts if key not in self._attempts and key not in self.watched}

    @cached_property
    def with_torch(self) -> frozenset[ProcessKey]:
        """Processes that are known to have loaded torch, with Tidegauge's hooks or without."""
        torch_users = {
            key
            for event in self.tables.events_of("process-seen")
            if event.get("has_torch") and (key := key_of(event, "process_"))
        }
        return frozenset(self._importers | torch_users)

    @cached_property
    def _importers(self) -> frozenset[ProcessKey]:
        """Processes with Tidegauge's hooks, which imported torch or train."""
        return frozenset(map(writer_of, self.tables.events_of("process-attached", "process-start")))

    @cached_property
    def programs(self) -> dict[ProcessKey, str]:
        """Command line of each process, as recorded by the process itself, else by the collector."""
        arguments = {}
        for event in self.tables.events_of("process-seen"):
            if key := key_of(event, "process_"):
                arguments[key] = event.get("argv")
        for event in self.tables.events_of("process-attached", "process-start"):
            arguments[writer_of(event)] = event.get("argv")
        return {key: _program(list(map(str, argv))) for key, argv in arguments.items() if argv}

    @cached_property
    def forks(self) -> frozenset[ProcessKey]:
        """Processes that never imported torch themselves, with torch and the command line of one that did."""
        programs = {(key[0], self.programs[key]) for key in self._importers if key in self.programs}
        heirs = self.with_torch - self._importers
        return frozenset(key for key in heirs if (key[0], self.programs.get(key)) in programs)

    def has_raised(self, key: ProcessKey) -> bool:
        """Return whether a process ended by an exception, but not for lack of memory or by a signal."""
        error = self.exceptions.get(key)
        return error is not None and error.get("type") != "MemoryError" and signal_raised(error) is None

    def may_train(self, key: ProcessKey) -> bool:
        """Return whether a process is the command, trains, is watched or has loaded torch; a helper does not.

        A child of a watched process may do the work where no process has torch.
        """
        is_known = key in self.with_torch or key in self.watched or key == self.command
        return is_known or (bool(self.watched) and not self.with_torch)

    def name(self, key: ProcessKey) -> str:
        """Return a name for a process, for use in the middle of a sentence."""
        if key in self._attempts:
            rank = rank_of(self.tables, key) if len(self.mains) > 1 else None
            return f"{'the training process' if rank is None else f'rank {rank}'} (pid {key[1]})"
        if key in self.watched:
            return f"the watched process (pid {key[1]})"
        if key in self.forks:
            return f"process {key[1]} (forked from the training process)"
        program = shorten(self.programs.get(key, ""), _PROGRAM_CHARACTERS, placeholder=" …")
        return f"process {key[1]} ({program})" if program else f"process {key[1]}"

    def role(self, key: ProcessKey) -> str:
        """Return the role of a process, a word of `records.ROLES`; a watched process counts as training."""
        return ROLES[ROLE_MAIN if key in self._attempts or key in self.watched else ROLE_OTHER]

    def locus(self, key: ProcessKey) -> Locus:
        """Return the place of a process in the run."""
        return Locus(host=key[0], rank=rank_of(self.tables, key), role=self.role(key), pid=key[1])

    @cached_property
    def left_running(self) -> dict[ProcessKey, Mapping[str, Any]]:
        """Processes that the command left running and that still run -> what the collector recorded of each."""
        processes = {
            (str(event["host"]), int(process["pid"]), int(process["start_ticks"])): process
            for event in self.tables.events_of("left-running")
            for process in event["processes"]
        }
        return {key: process for key, process in processes.items() if self.is_living(key)}

    @property
    def _leaves_training(self) -> bool:
        """True if the command ended with status 0 and left a Python process of the run behind that may train.

        Next to a training that was seen, a process without torch is a helper.
        """
        return self.exit_status == 0 and any(
            process.get("is_python") and (not self.mains or key in self.with_torch)
            for key, process in self.left_running.items()
        )

    @cached_property
    def watched(self) -> tuple[ProcessKey, ...]:
        """The process that `tidegauge watch` follows. It has no hooks, so how it ends is not known."""
        return (self.command,) if self.command is not None and self.tables.manifest.get("watched") else ()

    @cached_property
    def command(self) -> ProcessKey | None:
        """The process of the run's command."""
        return key_of(self.tables.manifest.get("command"))

    @cached_property
    def exit_status(self) -> int | None:
        """Exit code of the command, or -n for signal n; None if it runs or its end was not seen."""
        exits = [whole(event.get("exit_status")) for event in self.tables.events_of("command-exit")]
        return exits[-1] if exits else whole(self.tables.manifest.get("exit_status"))

    @cached_property
    def exceptions(self) -> dict[ProcessKey, Mapping[str, Any]]:
        """The last uncaught exception of each process."""
        return {writer_of(event): event for event in self.tables.events_of("exception")}

    @cached_property
    def exit_messages(self) -> tuple[Mapping[str, Any], ...]:
        """The `sys.exit` calls with a message or a failing status, without those in the code that spawns processes.

        A child of mp.spawn that raises writes the exception for its launcher, which raises it, and calls sys.exit.
        CPython calls sys.exit again in each spawned child, with the status that its target ended with.
        """
        events = self.tables.events_of("exit-message")
        return tuple(event for event in events if SPAWN_MODULE not in str(event.get("site")))

    @cached_property
    def detached(self) -> frozenset[ProcessKey]:
        """Processes that left the run by `detach()`, and may go on."""
        exits = self.tables.events_of("process-exit")
        return frozenset(writer_of(event) for event in exits if event.get("detached"))

    @cached_property
    def recorded_exits(self) -> frozenset[ProcessKey]:
        """Training processes that recorded their exit, at the end of the interpreter."""
        return frozenset(map(writer_of, self.tables.events_of("process-exit")))

    @property
    def trained_to_the_end(self) -> bool:
        """True if there were training processes, and each of them ended by itself, without an exception."""
        ended_normally = self.recorded_exits.issuperset(self.mains) and not self.exceptions.keys() & set(self.mains)
        return bool(self.mains) and ended_normally

    def is_dead(self, key: ProcessKey) -> bool:
        """Return whether the process is known to have ended."""
        if self.tables.living is not None:
            return key not in self.tables.living
        return bool((floats(sampled(self.tables, key), "alive") == 0).any())

    def is_living(self, key: ProcessKey | None) -> bool:
        """Return whether the process is known to be alive."""
        return key is not None and self.tables.living is not None and key in self.tables.living

    @cached_property
    def fatal_signal(self) -> int | None:
        """The signal that ended the command, in its own status or in that of the shell that ran it.

        A positive status is no signal where the training itself chose it: it is the command, or ended normally. The
        same holds for a command with the hooks that had not begun to train.
        """
        is_own_status = self.command in self.mains or (
            self.trained_to_the_end if self.mains else self.command in self.with_torch
        )
        return None if is_own_status and (self.exit_status or 0) > 0 else signal_of(self.exit_status)

    def ancestors(self, key: ProcessKey) -> tuple[ProcessKey, ...]:
        """The processes above a training process that raised an exception or are the command, nearest first."""
        chain, parent = [], self._parents.get(key)
        while parent is not None and parent not in chain:
            chain.append(parent)
            parent = self._parents.get(parent)
        if self.command is not None and self.command not in (key, *chain):
            chain.append(self.command)
        return tuple(chain)

    @cached_property
    def _parents(self) -> dict[ProcessKey, ProcessKey]:
        """Training process -> its parent, if that is the command, trains or raised an exception."""
        parents = {key[:2]: key for key in (self.command, *self.exceptions, *self.mains) if key is not None}
        starts = [
            (writer_of(event), whole(event.get("parent_pid"))) for event in self.tables.events_of("process-start")
        ]
        return {key: parents[key[0], pid] for key, pid in starts if pid and (key[0], pid) in parents}

    def is_under_program(self, key: ProcessKey) -> bool:
        """Return whether a program without Python, such as a shell or timeout, started a training process."""
        starts = self.tables.events_of("process-start", by=key)
        parents = {(key[0], whole(event.get("parent_pid"))) for event in starts}
        seen = self.tables.events_of("process-seen")
        others = (key_of(event, "process_") for event in seen if event.get("is_python") is False)
        return any(other is not None and other[:2] in parents for other in others)

    @cached_property
    def exceptions_above(self) -> dict[ProcessKey, Mapping[str, Any]]:
        """The exceptions of the command, of the training processes, and of the processes that started them."""
        keys = {self.command, *self.mains, *(above for key in self.mains for above in self.ancestors(key))}
        return {key: event for key, event in self.exceptions.items() if key in keys}

    @cached_property
    def killed_mains(self) -> dict[ProcessKey, int | None]:
        """Training processes (or the command itself) that ended abruptly -> the signal, None if unknown."""
        exit_codes = self.exit_codes_by_launcher
        killed: dict[ProcessKey, int | None] = {}
        for key in self.mains:
            if key in self.exceptions:
                if number := signal_raised(self.exceptions[key]):
                    killed[key] = number
            elif (number := signal_of(exit_codes.get(key[:2]))) is not None:
                killed[key] = number
            elif not exit_codes and self._ended_abruptly(key):
                killed[key] = self._signal_from_command(key)
        is_command_alone = not killed and (self.trained_to_the_end or not self.mains)
        if self.command is not None and self.fatal_signal is not None and is_command_alone:
            killed[self.command] = self.fatal_signal
        if not killed:  # then a launcher's own signal is the first one
            raised = ((key, signal_raised(event)) for key, event in self.exceptions_above.items())
            killed.update((key, number) for key, number in raised if number)
        return killed

    def raiser(self, key: ProcessKey) -> ProcessKey:
        """Return the process that raised the exception of a process: its child, where a launcher quotes that."""
        place = SPAWN_ERROR.search(str(self.exceptions[key].get("message")))
        children = self._children(key)
        return children[int(place[1])] if place and int(place[1]) < len(children) else key

    def _children(self, launcher: ProcessKey) -> list[ProcessKey]:
        """Return the training processes that a process started, the oldest first."""
        return sorted(
            (key for key in self.mains if self._parents.get(key) == launcher), key=lambda key: (key[2], key[1])
        )

    def _ended_abruptly(self, key: ProcessKey) -> bool:
        """Return whether a process vanished, and not because its launcher failed and stopped it."""
        if not self.is_dead(key) or self.exit_status == 0:
            return False
        if self._signal_from_command(key) is not None:
            return True
        if key in self.recorded_exits or (key == self.command and self.exit_status is not None):
            return False
        command_failed = self.exit_status is not None and self.exit_status > 0 and self.fatal_signal is None
        return not command_failed and not any(above in self.exceptions for above in self.ancestors(key))

    def _signal_from_command(self, key: ProcessKey) -> int | None:
        """Return the signal in the command's exit status, if the command is this process or merely wraps it.

        A wrapper may have a status of its own, so a process that recorded its exit has no signal from it.
        """
        is_wrapped = len(self.mains) == 1 and key not in self.recorded_exits
        return self.fatal_signal if key == self.command or is_wrapped else None

    @cached_property
    def exit_codes_by_launcher(self) -> dict[tuple[str, int], int]:
        """(host, pid) -> exit code of the training processes that a launcher names as the cause of its failure."""
        codes: dict[tuple[str, int], int] = {}
        for launcher, event in self.exceptions.items():
            text = str(event.get("message"))
            codes |= {(launcher[0], int(pid)): int(code) for code, pid in _LAUNCHER_MESSAGE.findall(text)}
            children = self._children(launcher)
            for place, end in _SPAWN_MESSAGE.findall(text):
                if int(place) < len(children) and (end.isdecimal() or end in Signals.__members__):
                    codes[children[int(place)][:2]] = int(end) if end.isdecimal() else -Signals[end]
        # A launcher stops the other ranks by SIGTERM.
        return {place: code for place, code in codes.items() if code != -SIGTERM} or codes

    def collectors_killed(self) -> list[Mapping[str, Any]]:
        """Return the `collector-start` events of collectors that ended without `collector-stop`."""
        stopped = {writer_of(event) for event in self.tables.events_of("collector-stop")}
        starts = self.tables.events_of("collector-start")
        killed = []
        for position, event in enumerate(starts):
            key = writer_of(event)
            if key in stopped:
                continue
            has_successor = any(e.get("resumed") and e.get("host") == key[0] for e in starts[position + 1 :])
            if has_successor or (self.tables.living is not None and key not in self.tables.living):
                killed.append(event)
        return killed

    def status(self) -> Status:
        """Return whether the run is running, finished, failed or killed."""
        if self.watched:
            return "finished" if self.watch_saw_the_end else "running"
        if self._leaves_training:
            return "running"
        if any(self.is_living(key) and key not in self.detached for key in (self.command, *self.mains)):
            return "running"
        if self.exit_status is not None:
            if self.exit_status == 0:
                return "finished"
            return "failed" if self.fatal_signal is None else "killed"
        if self.killed_mains:
            return "killed"
        if self.exceptions_above:
            return "failed"
        if self.recorded_exits.issuperset(self.mains) if self.mains else self.command in self.detached:
            return "finished"
        return "killed" if self.tables.living is not None and self.command is not None else "running"

    @cached_property
    def watch_saw_the_end(self) -> bool:
        """True if the watched process ended while it was watched, or is known to have ended since."""
        return any(self.is_dead(key) for key in self.watched)

    @cached_property
    def watch_ended(self) -> bool:
        """True if a watch was given up while its process went on."""
        return bool(self.watched) and not self.watch_saw_the_end and self._end_time_ns is not None

    @cached_property
    def _end_time_ns(self) -> int | None:
        return whole(self.tables.manifest.get("end_time_ns"))

    @cached_property
    def wall_seconds(self) -> float | None:
        """Seconds from the start of the run to its end, or to now while it runs; None without a record."""
        begin = origin_ns(self.tables)
        exits = [float(event["time_ns"]) for event in self.tables.events_of("command-exit")]
        if self.status() == "running" and not self.watch_ended:
            finish = float(self.tables.now_ns)
        elif exits:
            finish = max(exits[-1], *self._last_signs_ns)  # a training may go on in the background
        elif self._end_time_ns is not None:
            finish = float(self._end_time_ns)
        else:
            times = [floats(rows, "time_ns")[-1] for rows in self.tables.streams.values() if len(rows)]
            times += [float(event["time_ns"]) for event in self.tables.events[-1:]]
            if not times:
                return None
            finish = max(times)
        return max(0.0, (finish - begin) / SECOND_NS)

    @property
    def _last_signs_ns(self) -> list[float]:
        """The times of the last step, batch and end that training processes recorded which the command left."""
        left = {
            (event["host"], process["pid"])
            for event in self.tables.events_of("left-running")
            for process in event["processes"]
        }
        mains = [key for key in self.mains if key[:2] in left]
        records = (written(self.tables, name, key) for name in ITERATIONS for key in mains)
        times = (floats(rows, "time_ns").max(initial=0.0) for rows in records)
        ends = self.tables.events_of("process-exit", "exception")
        return [0.0, *times, *(float(event["time_ns"]) for event in ends if writer_of(event) in mains)]


@once
def lifecycle_of(tables: RunTables) -> Lifecycle:
    """Return the lifecycle of a run's processes, computed once."""
    return Lifecycle(tables)


def _program(argv: list[str]) -> str:
    """Return a command line without the folders of the interpreter and of the script."""
    words = [os.path.basename(word) if os.path.isabs(word) else word for word in argv[:2]]
    return " ".join(shlex.join([*words, *argv[2:]]).split())


def signal_of(exit_status: int | None) -> int | None:
    """Return the signal behind an exit status: -n, or 128+n as shells and launchers report it."""
    if exit_status is None:
        return None
    if exit_status < 0:
        return -exit_status
    if _SHELL_SIGNAL_BASE < exit_status <= _SHELL_SIGNAL_BASE + _LAST_SIGNAL:
        return exit_status - _SHELL_SIGNAL_BASE
    return None


def signal_of_child(exit_code: int | None) -> int | None:
    """Return the signal that ended a child, from the code that its parent waited for; a positive one is its own."""
    return -exit_code if exit_code is not None and exit_code < 0 else None


def end_words(exit_code: int | None) -> str:
    """Return how a child ended: `SIGKILL`, or `exit status 1`."""
    return signal_name(signal_of_child(exit_code)) or f"exit status {number(exit_code)}"


def signal_raised(exception: Mapping[str, Any]) -> int | None:
    """Return the signal that a process turned into its uncaught exception, as Ctrl-C or under torchrun."""
    if exception.get("type") == "KeyboardInterrupt":
        return SIGINT
    if exception.get("type") == "SIGTERMException":  # Lightning
        return SIGTERM
    number = _SIGNAL_MESSAGE.search(str(exception.get("message")))
    return int(number[1]) if number and exception.get("type") == "SignalException" else None
