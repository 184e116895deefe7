"""The collector's side of the lake: the ingest, kept going whatever happens to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from collector.store.runs import Run
from training_harness.journal import EventLog

if TYPE_CHECKING:
    from collector.store.counts import Counts
    from collector.store.ingest import Ingester, IngestResult


#: A part that finds a new fault at every turn must not flood the events.
_TOLD_AT_MOST = 20


class Problems:
    """Fail-open guard: a part that raises stops neither the others nor the loop; it is told once."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._told: dict[str, set[str]] = {}

    @contextmanager
    def guard(self, part: str) -> Iterator[None]:
        """Run a block; an exception becomes an event, the first of its kind in this part."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the run must be followed on with what still works
            kind = type(error).__name__
            self.tell(part, f"{kind}: {error}", key=kind)

    def tell(self, part: str, text: str, *, key: str | None = None) -> None:
        """Write `collector-problem`, once per part and key; the key is the text itself by default."""
        told = self._told.setdefault(part, set())
        if (key or text) not in told and len(told) < _TOLD_AT_MOST:
            told.add(key or text)
            self._events.append("collector-problem", part=part, error=text)


class Feed:
    """Moves the run's journals into its lake from time to time.

    An ingest that fails is tried anew the next time: what was not committed is still in the journals.
    """

    def __init__(
        self, run: Run, problems: Problems, ingester: Ingester | None = None, counts: Counts | None = None
    ) -> None:
        self.records_count = 0
        self.last: IngestResult | None = None
        self._run = run
        self._problems = problems
        self._ingester = ingester
        self._counts = counts

    def step(self) -> int:
        """Ingest what the journals hold by now; returns how many records were moved."""
        before_count = self.records_count
        with self._problems.guard("ingest"):
            if self._ingester is None:
                # Imported here, so that a command neither waits for this second of imports nor fails with it.
                from collector.store.ingest import Ingester

                self._ingester = Ingester(self._run, counts=self._counts)
            self.last = self._ingester.step()
            self.records_count += self.last.records_count
            self._tell(self.last.problems)
        return self.records_count - before_count

    def maintain(self) -> None:
        """Compact the lake: flush, merge, expire, delete."""
        with self._problems.guard("ingest"):
            if self._ingester is not None:
                self._tell(self._ingester.maintain())

    def close(self) -> None:
        """Compact the lake a last time and let go of it."""
        with self._problems.guard("ingest"):
            if self._ingester is not None:
                self._tell(self._ingester.close())

    def _tell(self, problems: Iterable[str]) -> None:
        for text in problems:
            self._problems.tell("ingest", text)
