"""The ingest as the collector runs it: in another process, from time to time, whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from collector.agent.ingest_process import IngestProcess
from collector.agent.problems import Problems
from collector.store import Counts, IngestResult, Run

#: Shortest and longest pause between two ingests.
SHORTEST_PAUSE_NS = 10_000_000_000
LONGEST_PAUSE_NS = 300_000_000_000
#: Pause between two times that the lake is compacted: merge, expire, delete.
MAINTAIN_EVERY_NS = 300_000_000_000
#: Largest share of a core that ingests take. One costs 0.7 s of CPU, most of it to start its process, so the pauses
#: are made long enough. Readers take the records meanwhile from the journals.
INGEST_RATIO = 0.003
#: Records that a pause waits for at most: a reader takes 0.1 s to read these from the journals.
WAITING_RECORDS = 100_000
#: Seconds that the end of a run waits for a store on the network.
FINISH_SECONDS = 60.0


def pause_ns(records_count: int, cost_ns: int, before_ns: int) -> int:
    """Return the pause after an ingest, from its records, its CPU time and the pause in which they were written."""
    filling_ns = before_ns * WAITING_RECORDS / max(records_count, 1)
    wanted_ns = round(min(cost_ns / INGEST_RATIO, filling_ns))
    return min(max(wanted_ns, SHORTEST_PAUSE_NS), LONGEST_PAUSE_NS)


class Feed:
    """The feed of the run's lake: it ingests the journals, and updates the counts, from time to time.

    An ingest that fails is repeated the next time: records that were not committed are still in the journals. A
    thread waits for each, and the sampling goes on: a store on the network may take a minute to fail.

    Attributes:
        records_count: records moved so far.
        last: result of the last ingest.
        pause_ns: pause until the next one.
        failure: why the last failed ingest failed; empty if none did.
    """

    def __init__(
        self,
        run: Run,
        problems: Problems,
        ingester: IngestProcess | None = None,
        counts: Counts | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.records_count = 0
        self.last: IngestResult | None = None
        self.pause_ns = SHORTEST_PAUSE_NS
        self._run = run
        self._problems = problems
        self._ingester = ingester
        self._counts = counts
        self._clock_ns = clock_ns
        self._is_remote = run.is_shared
        self._thread: threading.Thread | None = None
        self._fails_since_ns: int | None = None
        self._stored_ns: int | None = None
        # A new run has nothing to store yet. A store on the network is tried at once, in case it cannot be reached.
        is_new = ingester is None and not self._is_remote
        self._due_ns = clock_ns() + (SHORTEST_PAUSE_NS if is_new else 0)
        self._maintain_due_ns = self._due_ns + MAINTAIN_EVERY_NS
        self.failure = ""

    def lag_ns(self, now_ns: int) -> int | None:
        """Return the age of the oldest record that is not in the lake; None until an ingest has begun.

        The lake has every record that was written before its last whole ingest began. Records are written all the
        time, by the collector too, so the oldest one outside the lake is as old as that.
        """
        if self._stored_ns is not None:
            return max(0, now_ns - self._stored_ns)
        if self._fails_since_ns is None:
            return None
        return max(0, now_ns - self._fails_since_ns, (self.last and self.last.lag_ns) or 0)

    @property
    def spent_ns(self) -> int:
        """CPU time of the ingests so far."""
        return self._ingester.spent_ns if self._ingester is not None else 0

    @property
    def anon_bytes(self) -> int:
        """Anonymous memory of the process that ingests; 0 while there is none."""
        return self._ingester.anon_bytes if self._ingester is not None else 0

    @property
    def is_busy(self) -> bool:
        """True while an ingest runs in its thread."""
        return self._thread is not None and self._thread.is_alive()

    def tick(self, now_ns: int) -> None:
        """Ingest if that is due, and from time to time compact the lake, too."""
        if self._ingester is None:
            with self._problems.guard("ingest"), self._note_failure():
                self._ingester = IngestProcess(self._run, self._counts)
        if now_ns < self._due_ns or self.is_busy:
            return
        maintains = now_ns >= self._maintain_due_ns
        if maintains:
            self._maintain_due_ns = now_ns + MAINTAIN_EVERY_NS
        self.step(maintains=maintains)

    def step(self, *, maintains: bool = False) -> None:
        """Ingest the journals' present content, unless the ingest before still goes on; compact the lake, too."""
        if not self.is_busy:
            self._start(lambda: self._ingest_once(maintains=maintains))

    def finish(self, write_last: Callable[[], None]) -> bool:
        """Ingest everything, then the events that `write_last` writes; compact the lake and close it.

        Return whether everything is in the lake. A store on the network gets `FINISH_SECONDS`, since the user waits
        for the training's exit status.
        """
        results: list[bool] = []
        deadline = time.monotonic() + FINISH_SECONDS if self._is_remote else None
        if not self._join(deadline):
            write_last()
        else:
            self._start(lambda: results.append(self._finish(write_last)))
            self._join(deadline)
        return results == [True]

    def _join(self, deadline: float | None) -> bool:
        """Wait for the thread; return False if its store does not answer until the deadline."""
        if self._thread is not None:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self.is_busy and self._ingester is not None:
            self._ingester.kill()
            return False
        return True

    def _start(self, task: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=task, name="ingest", daemon=True)
        self._thread.start()

    def _finish(self, write_last: Callable[[], None]) -> bool:
        # A store on the network may not answer; then its process can be killed.
        if self._ingester is not None and not self._is_remote:
            self._ingester.move_here()
        self._ingest()
        write_last()
        if self._fails_since_ns is None:
            self._ingest()
        with self._problems.guard("ingest"):
            if self._ingester is not None:
                self._record(self._ingester.close(), part="upkeep")
        return self._fails_since_ns is None

    def _ingest(self) -> None:
        began_ns = self._clock_ns()
        if self._fails_since_ns is None:  # A whole ingest resets it below.
            self._fails_since_ns = began_ns
        with self._problems.guard("ingest"), self._note_failure():
            if self._ingester is None:
                self._ingester = IngestProcess(self._run, self._counts)
            cost_before_ns = self._ingester.spent_ns
            self.last = self._ingester.step()
            self.records_count += self.last.records_count
            if self.last.is_whole:
                self._stored_ns, self._fails_since_ns = began_ns, None
            else:
                self.failure = self.last.problems[-1]
            self._record(self.last.problems)
            if not self._is_remote:  # A shared store keeps the shortest pause: others wait for its records.
                cost_ns = self._ingester.spent_ns - cost_before_ns
                self.pause_ns = pause_ns(self.last.records_count, cost_ns, self.pause_ns)

    @contextmanager
    def _note_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = str(error)
            raise

    def _ingest_once(self, *, maintains: bool) -> None:
        began_ns = self._clock_ns()
        self._ingest()
        with self._problems.guard("ingest"):
            if self._ingester is not None:
                if maintains:
                    self._record(self._ingester.maintain(), part="upkeep")
                if not self._is_remote:
                    self._ingester.rest()
        self._due_ns = began_ns + self.pause_ns

    def _record(self, problems: Iterable[str], *, part: str = "ingest") -> None:
        for text in problems:
            self._problems.record(part, text)
