"""The collector's loop: sample, append to the run's journals, ingest into the lake; and its end."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from collector.agent.ingest_feed import Feed
from collector.agent.ingest_process import IngestProcess
from collector.agent.problems import Problems
from collector.agent.recorder_dumps import RecorderDumps
from collector.agent.samplers import procfs
from collector.agent.samplers.devices import find_devices
from collector.agent.samplers.hang_watch import HangWatch
from collector.agent.samplers.host import HostSampler, MemoryLimit, headroom_bytes
from collector.agent.samplers.process_roles import EventTail, ProcessRoles
from collector.agent.samplers.processes import EARLY_INTERVAL_NS, EarlySampler, ProcessSampler
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.programs import ProgramLog, find_left_running, read_program
from collector.agent.samplers.samples import NamedSample, Sample, record_values
from collector.store import Run, of_this_boot
from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.layout import read_manifest, write_manifest
from training_harness.records import STREAMS

if TYPE_CHECKING:
    from collector.agent.live.outlets import Outlets

#: Seconds that orphaned workers have to end before the run is closed.
ORPHANS_SECONDS = 1.0
_ORPHANS_POLL_SECONDS = 0.05
#: Seconds that a tick, and the end of a run, wait for dumps of the Flight Recorder.
_DUMPS_SECONDS, _LAST_DUMPS_SECONDS = 0.5, 3.0
#: Events of a training that asks for live output.
_REQUESTS = ("risk-listener", "setting-asked")


class Agent:
    """The agent that follows one run on this node.

    Args:
        run: the run to follow.
        command: the run's command, if it is known and runs on this host.
        is_parent: whether this process started the command and will learn its exit status.
        resumed: whether another collector followed the run before.
        ingester: opened by the caller; None opens it at the first ingest.
        outlets: live metrics, alerts and investigations, already begun; None without any.
    """

    def __init__(
        self,
        run: Run,
        *,
        command: LocalProcess | None,
        is_parent: bool = False,
        resumed: bool = False,
        ingester: IngestProcess | None = None,
        outlets: Outlets | None = None,
    ) -> None:
        self._run = run
        self._command = command
        self._is_parent = is_parent
        identity = Identity.of_this_process()
        self.key = LocalProcess(identity.pid, identity.start_ticks)
        self._events = EventLog(run.events_dir, identity)
        self._events.append(
            "collector-start",
            resumed=resumed,
            investigates=outlets is not None and outlets.investigates,
            acts_before_oom=outlets is not None and outlets.before_oom.is_wanted,
            command_pid=command.pid if command else None,
        )
        self._problems = Problems(self._events)
        self._outlets = outlets
        self._feed = Feed(run, self._problems, ingester, outlets.counts if outlets else None)
        self._writers = {
            name: JournalWriter(run.journal_dir, stream, identity, events=self._events)
            for name, stream in STREAMS.items()
        }
        self._event_tail = EventTail(run.events_dir, identity.host)
        self._roles = ProcessRoles(identity.host, partial(procfs.start_ticks, procfs.PROC))
        now_ns = time.monotonic_ns()
        self._processes = ProcessSampler(self._roles, self.key, child=command if is_parent else None, now_ns=now_ns)
        self._early: EarlySampler | None = EarlySampler(now_ns)
        self._hangs = HangWatch(run.journal_dir, identity.host, self._roles)
        self._dumps = RecorderDumps()
        self._programs = ProgramLog(str(run.path.absolute()))
        self._host = HostSampler(command.pid if command else None)
        self._limit: MemoryLimit | None = None
        self._devices = find_devices()
        self._pids_before = frozenset[int]()
        self._verdict_bytes = 0
        self._ticked_ns: int | None = None
        self._has_succeeded = False

    def is_run_alive(self) -> bool:
        """Return whether the command, or a training process of this host, is alive and has not detached."""
        command = self._command
        attached = [command] if command is not None and not self._roles.has_detached(command) else []
        return any(process.is_alive() for process in [*attached, *self._roles.mains()])

    @property
    def recorded_end_ns(self) -> int | None:
        """Time at which the command recorded that it ended or detached; None if it did not."""
        return self._roles.exit_ns(self._command) if self._command is not None else None

    def tick(self) -> None:
        """Take one sample of everything, and ingest if that is due."""
        now_ns = time.monotonic_ns()
        self._sample(now_ns)
        with self._problems.guard("stacks"):
            self._watch_for_hangs(now_ns)
        self._feed.tick(now_ns)
        with self._problems.guard("agent"):
            self._write("agent", now_ns, [self._collector_sample(now_ns)])
        if self._outlets is not None:
            with self._problems.guard("outlets"):
                self._outlets.tick(now_ns, self._problems)
            self._act_before_oom(now_ns)
            with self._problems.guard("lines"):
                mains = [(key, self._roles.role_of(key).rank) for key in self._roles.mains()]
                workers_count = len(self._roles.workers())
                self._record_series(self._outlets.lines.tick(now_ns, mains, workers_count, self._problems))
        self._ticked_ns = now_ns

    def _record_series(self, series: Sequence[Mapping[str, Any]]) -> None:
        for fields in series:
            self._events.append("stack-series", **fields)

    def _act_before_oom(self, now_ns: int) -> None:
        if self._outlets is None or not self._outlets.before_oom.is_wanted:
            return
        with self._problems.guard("before-oom"):
            processes = self._roles.mains() or ([self._command] if self._command else [])
            for fields in self._outlets.act_before_oom(now_ns, processes):
                self._events.append("before-oom", **fields)

    def samples_between_ticks(self, now_ns: int) -> bool:
        """Return whether `sample_between_ticks` is to be called: the collector has just begun, or guards limits."""
        if self._early is not None and self._early.is_over(now_ns):
            self._early = None
        return self._early is not None or (self._outlets is not None and self._outlets.before_oom.is_wanted)

    def sample_between_ticks(self, now_ns: int) -> None:
        """Sample the memory and descriptors of the processes that the last tick saw, and the levels of limits."""
        if self._outlets is not None and self._outlets.before_oom.is_wanted:
            with self._problems.guard("host"):
                self._outlets.headroom.note(now_ns / 1e9, {"host": [self._host.sample()]})
            self._act_before_oom(now_ns)
        if self._early is not None:
            with self._problems.guard("processes"):
                self._append("early_process", now_ns, self._early.sample(now_ns, self._processes.alive))

    def _watch_for_hangs(self, now_ns: int) -> None:
        fields = self._hangs.tick(now_ns, self._processes.alive)
        if fields is None:
            return
        self._events.append("stacks", **fields)
        self._record_dumps(_DUMPS_SECONDS, map(LocalProcess.of, fields["processes"]))
        is_suspicious = fields["idle_seconds"] is not None or any(
            one["silent_seconds"] >= one["budget_seconds"] for one in fields["silent"]
        )
        if not fields["is_last"] or not is_suspicious:
            return
        self._open_outlets().hurry()

    def _open_outlets(self) -> Outlets:
        """Return the live output; open it if it has not been needed so far."""
        if self._outlets is None:
            # Imported here, since its 4 MiB are wasted on most trainings.
            from collector.agent.live.outlets import Outlets

            self._outlets = Outlets(is_regular=False)
            self._outlets.begin(self._run)
        return self._outlets

    def _record_dumps(self, wait_seconds: float, processes: Iterable[LocalProcess] = ()) -> None:
        with self._problems.guard("flight recorder"):
            self._dumps.note(processes)
            for fields in self._dumps.read_new(wait_seconds):
                self._events.append("flight-recorder", **fields)

    def read_all(self) -> None:
        """Read the memory of all processes at the next tick; later ticks read less to make up for the cost."""
        self._processes.reads_all = True

    def command_ended(self, exit_status: int) -> None:
        """Record how the command ended: its exit code, or -n for signal n."""
        command = self._command
        if command is None:
            return
        self._events.append("command-exit", command_pid=command.pid, exit_status=exit_status)
        self._has_succeeded = exit_status == 0
        with self._problems.guard("processes"):
            last = self._processes.last_sample(command, exit_status)
            self._write("process", time.monotonic_ns(), [last])

    def finish(self) -> bool:
        """Sample once more, give orphans a moment, record those left running, ingest everything and close.

        Return whether everything is in the lake; the rest waits in the journals.
        """
        self._sample(time.monotonic_ns())
        if self._outlets is not None:
            with self._problems.guard("lines"):
                self._record_series(self._outlets.lines.close())
        orphans = [*self._roles.workers(), *self._roles.mains(), *self._left_running()]
        if any(process.is_alive() for process in orphans):
            deadline_ns = time.monotonic_ns() + round(ORPHANS_SECONDS * 1e9)
            while any(process.is_alive() for process in orphans) and time.monotonic_ns() < deadline_ns:
                time.sleep(_ORPHANS_POLL_SECONDS)
            self._sample(time.monotonic_ns())
            with self._problems.guard("events"):
                self._record_left_running()
        if not self._has_succeeded:  # NCCL's watchdog writes a dump just before it ends its process
            self._record_dumps(_LAST_DUMPS_SECONDS)
        for writer in self._writers.values():
            writer.close()
        is_stored = self._feed.finish(
            lambda: self._events.append("collector-stop", records_count=self._feed.records_count)
        )
        with self._problems.guard("devices"):
            self._devices.close()
        with self._problems.guard("manifest"):
            _note_stored(self._run, is_stored=is_stored)
        if self._outlets is not None:
            self._outlets.run_ended()
        return is_stored

    def _left_running(self) -> list[LocalProcess]:
        """Return the processes that the command started and left behind; none if this process is not its parent."""
        if not self._is_parent or self._command is None:
            return []
        keys = find_left_running(str(self._run.path.absolute()), self._command.start_ticks)
        return [key for key in keys if key != self._command]

    def _record_left_running(self) -> None:
        processes: list[dict[str, Any]] = []
        for key in self._left_running():
            program = read_program(procfs.PROC, key.pid)
            argv, is_python = (program.argv, program.is_python) if program else ((), False)
            processes.append(
                {"pid": key.pid, "start_ticks": key.start_ticks, "argv": list(argv), "is_python": is_python}
            )
        if processes:
            self._events.append("left-running", processes=processes)

    @property
    def ingest_failure(self) -> str:
        """Reason of the last failed ingest; empty if none failed, or if the store does not answer."""
        return self._feed.failure

    def _sample(self, now_ns: int) -> None:
        with self._problems.guard("events"):
            for event in self._event_tail.read():
                with self._problems.guard("events"):
                    self._note_event(event)
        host: Sample = {}
        self._verdict_bytes = self._verdict_anon_bytes()
        with self._problems.guard("host"):
            if self._command is None and (mains := self._roles.mains()):
                self._host.pid = mains[0].pid  # it may be in another container than this collector
            host = self._host.sample()
            self._write("host", now_ns, [host])
            if (limit := self._host.limit) is not None and limit != self._limit:
                self._limit = limit
                self._events.append("memory-limit", **limit._asdict())
        with self._problems.guard("processes"):
            self._sample_processes(now_ns, headroom_bytes(host))
            for fields in self._programs.update(self._processes.alive - {*self._roles}):
                self._events.append("process-seen", **fields)
        with self._problems.guard("flight recorder"):
            self._dumps.note(self._roles.mains())
        with self._problems.guard("devices"):
            self._sample_devices()

    def _note_event(self, event: dict[str, Any]) -> None:
        self._roles.learn(event)
        self._hangs.note_event(event)
        outlets = self._open_outlets() if event["kind"] in _REQUESTS else self._outlets
        if outlets is not None:
            outlets.note_event(event)

    def _sample_processes(self, now_ns: int, headroom_bytes: float | None) -> None:
        roots = [self._command] if self._command else []
        begin_ns, smaps_before_ns = time.thread_time_ns(), self._processes.budget.spent_ns
        self._write("process", now_ns, self._processes.sample(now_ns, roots, headroom_bytes=headroom_bytes))
        if self._early is not None and self._ticked_ns is not None:  # the first tick reads the whole machine
            smaps_ns = self._processes.budget.spent_ns - smaps_before_ns
            self._early.charge(time.thread_time_ns() - begin_ns - smaps_ns)

    def _sample_devices(self) -> None:
        pids = frozenset(key.pid for key in self._processes.alive)
        # The driver may still hold memory of a process that has just ended.
        sampled = pids | self._pids_before
        # PyTorch's records are compared with these: a busy machine may be late in the tick.
        read_ns = time.monotonic_ns()
        self._write("device", read_ns, self._devices.sample(sampled, self._roles.recording_pids))
        self._pids_before = pids

    def _verdict_anon_bytes(self) -> int:
        verdict_bytes = (self._outlets.verdict_anon_bytes or 0) if self._outlets is not None else 0
        return self._feed.anon_bytes + verdict_bytes

    def _collector_sample(self, now_ns: int) -> Sample:
        status = procfs.read_status(procfs.PROC, self.key.pid)
        ingest = self._feed.last
        lost_count = sum(writer.lost_count for writer in self._writers.values())
        return {
            "cpu_ns": time.process_time_ns()
            + self._feed.spent_ns
            + (self._outlets.spent_ns if self._outlets else 0),
            "smaps_ns": self._processes.budget.spent_ns,
            "rss_bytes": status.rss_bytes if status else None,
            # From before and after the host was sampled: a verdict can begin or end in between.
            "verdict_anon_bytes": max(self._verdict_bytes, self._verdict_anon_bytes()) or None,
            "interval_ns": None if self._ticked_ns is None else now_ns - self._ticked_ns,
            "ingest_lag_ns": self._feed.lag_ns(now_ns),
            "records_ingested_count": self._feed.records_count,
            # The lake's count may include the collector's own losses.
            "records_lost_count": max(lost_count, ingest.lost_count if ingest else 0),
        }

    def _write(self, name: str, now_ns: int, samples: Sequence[NamedSample]) -> None:
        if self._outlets is not None:
            self._outlets.note_samples(name, samples)
        self._append(name, now_ns, samples)

    def _append(self, name: str, now_ns: int, samples: Sequence[NamedSample]) -> None:
        if samples:
            self._writers[name].append_all([record_values(STREAMS[name], now_ns, sample) for sample in samples])


def next_deadline_ns(deadline_ns: int, now_ns: int, interval_ns: int) -> int:
    """Return the first deadline of the series `deadline + k · interval` that is still to come."""
    return deadline_ns + max((now_ns - deadline_ns) // interval_ns + 1, 1) * interval_ns


def follow(
    agent: Agent,
    wait: Callable[[float], bool],
    *,
    interval_seconds: float,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> None:
    """Tick at a fixed rate, free of drift, until the run has ended; skip a tick that is late.

    At the beginning, sample the processes between two ticks too.

    `wait` waits up to the given seconds and returns whether the run has ended.
    """
    interval_ns = round(interval_seconds * 1e9)
    early_ns = math.ceil(interval_ns / max(1, round(interval_ns / EARLY_INTERVAL_NS)))
    deadline_ns = clock_ns()
    while True:
        agent.tick()
        now_ns = clock_ns()
        deadline_ns = next_deadline_ns(deadline_ns, now_ns, interval_ns)
        while now_ns < deadline_ns:
            is_early = agent.samples_between_ticks(now_ns)
            wake_ns = next_deadline_ns(deadline_ns - interval_ns, now_ns, early_ns) if is_early else deadline_ns
            if wait((min(wake_ns, deadline_ns) - now_ns) / 1e9):
                return
            now_ns = clock_ns()
            if is_early and now_ns < deadline_ns:
                agent.sample_between_ticks(now_ns)


def collect(run: Run, *, interval_seconds: float, outlets: Outlets | None = None) -> bool:
    """Resume an abandoned run: ingest everything, and follow its living processes until they end.

    A run of another host, or of this one before its last boot, is only ingested: its clock is not
    this machine's. Ctrl-C stops following and leaves the run to be resumed again. Return whether every record of
    the journals is in the lake.

    Raises:
        TidegaugeError: another collector follows the run.
    """
    ingester = IngestProcess(run, outlets.begin(run) if outlets else None)
    is_of_this_boot = of_this_boot(run)
    if not (is_of_this_boot and run.is_shared):  # A store on the network may be unreachable when sampling begins.
        ingester.open()
    if not is_of_this_boot:
        result = ingester.step()
        ingester.close()
        _note_stored(run, is_stored=result.is_whole)
        return result.is_whole
    manifest = run.manifest
    recorded = manifest["command"]
    is_local = recorded is not None and recorded["host"] == socket.gethostname()
    command = LocalProcess.of(recorded) if is_local else None
    agent = Agent(run, command=command, resumed=True, ingester=ingester, outlets=outlets)
    update_manifest(run, collector=manifest_process(agent.key))
    was_alive = agent.is_run_alive()
    interrupted = threading.Event()

    def wait(seconds: float) -> bool:
        nonlocal was_alive
        if not agent.is_run_alive():
            return True
        was_alive = True
        return interrupted.wait(seconds)

    # A KeyboardInterrupt could be lost: DuckDB turns it into an error of the query that runs.
    handler_before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        follow(agent, wait, interval_seconds=interval_seconds)
    finally:
        signal.signal(signal.SIGINT, handler_before)
    # A run that ended before the collector came may have recorded its end.
    end_ns = time.monotonic_ns() if was_alive else agent.recorded_end_ns
    if end_ns is not None and not interrupted.is_set() and manifest["end_time_ns"] is None:
        update_manifest(run, end_time_ns=end_ns)
    return agent.finish()


def manifest_process(key: LocalProcess) -> dict[str, Any]:
    """Return a process of this host in the form of the manifest."""
    return {"host": socket.gethostname(), "pid": key.pid, "start_ticks": key.start_ticks}


def update_manifest(run: Run, **fields: object) -> None:
    """Change fields of the manifest."""
    write_manifest(run.path, {**read_manifest(run.path), **fields})


def _note_stored(run: Run, *, is_stored: bool) -> None:
    if run.is_shared:
        update_manifest(run, is_stored=is_stored)
