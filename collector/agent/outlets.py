"""What the collector tells while the run goes on: its metrics, and its findings so far."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from collector.agent.feed import Problems
from collector.agent.headroom import Headroom
from collector.agent.investigate import Investigator
from collector.agent.outlook import Outlook
from collector.agent.samples import NamedSample, Sample
from collector.alerts import Alerts
from collector.errors import TidegaugeError
from collector.metrics import View
from collector.store.runs import Run
from training_harness.layout import read_manifest

if TYPE_CHECKING:
    from collector.diagnosis.findings import Finding
    from collector.store.counts import Counts, Totals


class Latest:
    """The newest samples of each stream that the collector takes itself."""

    def __init__(self) -> None:
        self.samples: dict[str, Sequence[Sample]] = {}
        self._processes: dict[tuple[float | None, float | None], Sample] = {}

    def note(self, stream: str, samples: Sequence[NamedSample]) -> None:
        """Keep the numbers of the samples of one tick."""
        numbers = [
            {column: value for column, value in sample.items() if not isinstance(value, bytes)}
            for sample in samples
        ]
        self.samples[stream] = self._with_readings(numbers) if stream == "process" else numbers

    def _with_readings(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Most ticks read the smaps of some processes only, so what was read of the others before stays."""
        before, self._processes = self._processes, {}
        for sample in samples:
            if sample["alive"]:
                key = (sample["process_pid"], sample["process_start_ticks"])
                self._processes[key] = {**before.get(key, {}), **sample}
        return list(self._processes.values())


class Outlets:
    """The state that they share. Made before the run, which begins when its directory is there.

    Args:
        alerts: are given every verdict.
        investigate: whether a process that leaks may be asked what it keeps.

    """

    def __init__(self, alerts: Alerts | None = None, *, investigate: bool = False) -> None:
        self.latest = Latest()
        self.counts: Counts | None = None
        self._alerts = alerts
        self._investigate = investigate
        self._investigator: Investigator | None = None
        self._host = socket.gethostname()
        self._run: Run | None = None
        self._name = ""
        self._outlook: Outlook | None = None
        self._headroom = Headroom()
        self._verdict: tuple[Sequence[Finding], float] | None = None

    def begin(self, run: Run) -> Counts:
        """Tell of this run from now on; returns the counts, which the ingest is to feed."""
        # Imported here: the command has started, and does not wait for this second of imports.
        from collector.store.counts import Counts

        with suppress(OSError, ValueError):
            self._name = str(read_manifest(run.path)["name"])
        self.counts = Counts(run)
        self._outlook = Outlook(run, self.tell)
        self._investigator = Investigator(run) if self._investigate else None
        self._run = run
        return self.counts

    def tick(self, now_ns: int, problems: Problems) -> None:
        """Called by the loop: see to it that there is a verdict when it is time for one."""
        if self._outlook is not None:
            self._headroom.note(now_ns / 1e9, self.latest.samples)
            self._outlook.tick(now_ns, problems, self._headroom.nearest_seconds)

    def heard(self, event: Mapping[str, Any]) -> None:
        """Called by the loop with each event of the run's processes on this host."""
        if self._investigator is not None:
            self._investigator.heard(event)

    def run_ended(self) -> None:
        """No verdict is begun from now on, and one that is being made is given up; nothing is asked any more."""
        if self._outlook is not None:
            self._outlook.close()
        if self._investigator is not None:
            self._investigator.close()

    @property
    def spent_ns(self) -> int:
        """CPU time of the verdicts so far."""
        return self._outlook.spent_ns if self._outlook is not None else 0

    @property
    def verdict_anon_bytes(self) -> int | None:
        """Anonymous memory of the process that is making a verdict; None if there is none."""
        return self._outlook.anon_bytes if self._outlook is not None else None

    def tell(self, findings: Sequence[Finding]) -> None:
        """Tell of a verdict on the run."""
        self._verdict = (findings, time.time())
        if self._investigator is not None:
            self._investigator.look_into(findings)
        if self._alerts is not None and self._run is not None:
            self._alerts.tell(self._run.run_id, self._name, findings)

    def close(self) -> None:
        """See to it that what was to be told is told, for a bounded time."""
        if self._alerts is not None:
            self._alerts.close()

    def look(self) -> View | None:
        """What is known at this moment, for the metrics; None without a run. Called in other threads."""
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
            samples=dict(self.latest.samples),
            findings=verdict[0] if verdict else None,
            verdict_seconds=verdict[1] if verdict else None,
        )
