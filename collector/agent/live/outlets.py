"""Live output of a run: metrics, verdicts, alerts, hangs, settings of loaders, requests of `--investigate`.

A cheap estimate from the newest samples of each limit decides how soon a verdict is worth its cost. The verdict
itself, which reads much more, comes from another process. With `--investigate`, a training process that
leaks is asked once which lines allocate the memory that stays.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collector.agent.live.alerts import Alerts, Sender
from collector.agent.live.before_oom import BeforeOom
from collector.agent.live.hangs import HangReports
from collector.agent.live.limits import Headroom
from collector.agent.live.line_sampling import LineSampler
from collector.agent.live.notebook_card import NotebookCard
from collector.agent.live.prometheus import View
from collector.agent.live.snapshot_request import put_request, request_path, withdraw
from collector.agent.live.trackers import Trackers
from collector.agent.live.verdicts import LiveVerdicts
from collector.agent.loader_settings import LoaderSettings
from collector.agent.problems import Problems
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.samples import NamedSample, Sample
from collector.errors import TidegaugeError
from collector.findings import KINDS, Finding, Locus
from collector.store import Counts, Run
from training_harness.layout import SNAPSHOT_STEPS, read_manifest

if TYPE_CHECKING:
    from collector.store import Totals

#: Seconds after which a request expires, if the process ends no step.
EXPIRY_SECONDS = 600.0


class Outlets:
    """Everything that reports on a run while it goes on. It is made before the run; `begin` names the run.

    Args:
        senders: senders of new findings.
        investigate: ask a process that leaks for its allocation sites, and sample stacks before there is a warning.
        hangs: reports of hangs.
        before_oom: what to do before a limit is met.
        trackers: experiment trackers that get series and findings.
        settings: settings for the DataLoaders.
        card: write the card that a notebook shows.
        is_regular: make a verdict now and then; else only when the training seems to hang.

    Attributes:
        lines: samples stacks.
        headroom: levels of the limits; the loop adds the samples of the host that it takes between two ticks.
        before_oom, trackers: as above.
        investigates: a process that leaks is asked for its allocation sites.
    """

    def __init__(
        self,
        senders: Iterable[Sender] = (),
        *,
        investigate: bool = False,
        hangs: HangReports | None = None,
        before_oom: BeforeOom | None = None,
        trackers: Trackers | None = None,
        settings: LoaderSettings | None = None,
        card: bool = False,
        is_regular: bool = True,
    ) -> None:
        #: Stream -> the newest samples that the collector took.
        self._samples: dict[str, Sequence[Sample]] = {}
        self._processes: dict[tuple[float | None, float | None], Sample] = {}
        self.counts: Counts | None = None
        self._alerts = Alerts(senders)
        self.investigates = investigate
        self.lines = LineSampler(always=investigate)
        self._hangs = hangs or HangReports()
        self.before_oom = before_oom or BeforeOom()
        self.trackers = trackers or Trackers(())
        self._settings = settings or LoaderSettings()
        self._has_card = card
        self._card: NotebookCard | None = None
        self._is_regular = is_regular
        self._investigator: Investigator | None = None
        self._host = socket.gethostname()
        self._run: Run | None = None
        self._has_started = self._has_ended = False
        self._name = ""
        self._verdicts: LiveVerdicts  # from `begin` on
        self.headroom = Headroom()
        self._verdict: tuple[Sequence[Finding], float] | None = None

    def begin(self, run: Run) -> Counts | None:
        """Report on this run from now on; return the counts, which the ingest has to update."""
        self._verdicts = LiveVerdicts(run, self.publish, self._settings, is_regular=self._is_regular)
        with suppress(OSError, ValueError):
            self._name = str(read_manifest(run.path)["name"])
        if self._is_regular:
            self.counts = Counts(run)
        self._investigator = Investigator(run) if self.investigates else None
        self.before_oom.begin(run, self._name)
        self._settings.begin(run)
        self.trackers.begin(run, self._name)
        if self._has_card:
            self._card = NotebookCard(run.path)
        self._run = run
        return self.counts

    def tick(self, now_ns: int, problems: Problems) -> None:
        """Begin a verdict if one is due; the loop calls this at every tick."""
        self.headroom.note(now_ns / 1e9, self._samples)
        with problems.guard("loader settings"):
            if self._settings.tick(now_ns):
                self._verdicts.hurry()
        self._verdicts.tick(now_ns, problems, self.headroom.nearest_seconds)
        self.trackers.tick(now_ns / 1e9, self.view)
        if self._card is not None:
            self._card.tick(now_ns / 1e9, self.view)

    def act_before_oom(self, now_ns: int, processes: Sequence[LocalProcess]) -> Iterator[Mapping[str, Any]]:
        """Do what is due before a limit is met; yield the fields of the events about it."""
        if not self._has_ended:
            yield from self.before_oom.tick(now_ns / 1e9, self.headroom, processes)

    def hurry(self) -> None:
        """Make a verdict at the next tick, since stacks of a training that stands still were taken."""
        self._verdicts.hurry()

    def note_samples(self, stream: str, samples: Sequence[NamedSample]) -> None:
        """Take note of the numbers of one tick's samples; the loop calls this with those of each stream."""
        if not self._is_regular:
            return
        numbers = [
            {column: value for column, value in sample.items() if not isinstance(value, bytes)}
            for sample in samples
        ]
        self._samples[stream] = self._with_readings(numbers) if stream == "process" else numbers

    def _with_readings(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Add the last readings of smaps to the samples: most ticks read those of some processes only."""
        before, self._processes = self._processes, {}
        for sample in samples:
            if sample["alive"]:
                key = (sample["process_pid"], sample["process_start_ticks"])
                self._processes[key] = {**before.get(key, {}), **sample}
        return list(self._processes.values())

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Take note of an event of the run's processes on this host; the loop calls this with each."""
        if self._investigator is not None:
            self._investigator.note_event(event)
        self.before_oom.note_event(event)
        self._settings.note_event(event)
        self._hangs.note_event(event)
        if self.before_oom.is_wanted:
            self._is_regular = self._verdicts.is_regular = True
        if event["kind"] == "process-start" and not self._has_started:
            self._has_started = True
            self._verdicts.restart()  # a verdict on its imports delays none on the training

    def run_ended(self) -> None:
        """Stop verdicts, a running one too, and take back open requests."""
        self._has_ended = True
        self._verdicts.close()
        if self._investigator is not None:
            self._investigator.close()
        self.before_oom.run_ended()
        self._settings.run_ended()

    @property
    def spent_ns(self) -> int:
        """CPU time of the verdicts and series of stacks so far."""
        return self.lines.spent_ns + self._verdicts.spent_ns

    @property
    def verdict_anon_bytes(self) -> int | None:
        """Anonymous memory of the process that is making a verdict; None without one."""
        return self._verdicts.anon_bytes

    def publish(self, findings: Sequence[Finding]) -> None:
        """Publish a verdict: in the metrics, as alerts, and as requests for allocation sites."""
        self._verdict = (findings, time.time())
        self.before_oom.note_findings(findings, time.monotonic())
        self.lines.note([finding for finding in findings if finding.locus.host in (None, self._host)])
        if self._investigator is not None:
            self._investigator.investigate(findings)
        if self._run is None:
            return
        self.trackers.note(findings)
        self._alerts.send(self._run.run_id, self._name, findings)
        if not self._has_ended:
            self._hangs.report(self._run, self._name, findings)

    def close(self) -> None:
        """Wait for queued alerts and trackers, for a bounded time."""
        self.trackers.close()
        self._hangs.close()
        self.before_oom.close()
        self._alerts.close()

    def view(self) -> View | None:
        """Return the present state for the metrics; None without a run. Called in other threads."""
        run, counts, verdict = self._run, self.counts, self._verdict
        if run is None or counts is None:
            return None
        totals: Totals | None = None
        with suppress(TidegaugeError):
            totals = counts.now()
        return View(
            run_id=run.run_id,
            name=self._name,
            host=self._host,
            totals=totals,
            samples=dict(self._samples),
            findings=verdict[0] if verdict else None,
            verdict_seconds=verdict[1] if verdict else None,
        )


class Investigator:
    """The requests for allocation sites: one to each process or worker of a run that leaks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._requests: dict[str, Path] = {}
        self._closed = False

    def investigate(self, findings: Iterable[Finding]) -> None:
        """Request the allocation sites of leaks that have none.

        Raises:
            OSError: the request cannot be written.
        """
        for finding in findings:
            if (
                not KINDS[finding.kind].has_allocation_sites
                or finding.locus.role == "other"
                or finding.held_by
                or self._closed
            ):
                continue
            to = _addressee(finding.locus)
            name = "growth-of-" + "-".join(str(part) for part in to.values())
            if name not in self._requests:
                self._requests[name] = path = request_path(self._run, name)
                put_request(path, "growth", steps=SNAPSHOT_STEPS["growth"], lasts_seconds=EXPIRY_SECONDS, to=to)

    def note_event(self, event: Mapping[str, Any]) -> None:
        """Mark a request as answered, to this collector or one before, so that it is not repeated."""
        name = event.get("request", "")
        if event["kind"] == "snapshot" and name.startswith("growth-of-"):
            self._requests.setdefault(name, request_path(self._run, name)).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the requests, and make no further ones."""
        self._closed = True
        withdraw(self._requests.values())


def _addressee(locus: Locus) -> dict[str, Any]:
    if locus.role == "worker":  # Several workers grow if none is named; the first answers for all.
        rank = {} if locus.rank is None else {"rank": locus.rank}
        return {"role": "worker", "host": locus.host, **rank, "loader": locus.loader, "worker": locus.worker or 0}
    return {"role": "main", "host": locus.host, "pid": locus.pid}
