"""The collector's side of the lake: the ingest, kept going whatever happens to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from collector.store.runs import Run
from training_harness.journal import EventLog

if TYPE_CHECKING:
    from collector.store.counts import Counts
    from collector.store.ingest import Ingester, IngestResult


#: The least and the most from one ingest to the next.
INGEST_EVERY_NS = 10_000_000_000
INGEST_LITTLE_EVERY_NS = 60_000_000_000
#: A commit costs 65 ms of CPU however little it moves, 200 ms where 72 processes write. So it waits until that is
#: this share of a core at most, but not for more records than these: readers take them from the journals.
INGEST_RATIO = 0.003
LITTLE_RECORDS = 20_000
#: How long a store on the network is waited for at the end.
FINISH_SECONDS = 60.0
#: A part that finds a new fault at every turn must not flood the events.
_TOLD_AT_MOST = 20


def pause_ns(records_count: int, cost_ns: int, before_ns: int) -> int:
    """From an ingest to the next.

    Args:
        records_count: that it moved.
        cost_ns: CPU time that it took.
        before_ns: the pause before it, in which the records were written.

    """
    until_many_ns = before_ns * LITTLE_RECORDS / max(records_count, 1)
    wanted_ns = round(min(cost_ns / INGEST_RATIO, until_many_ns))
    return min(max(wanted_ns, INGEST_EVERY_NS), INGEST_LITTLE_EVERY_NS)


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

    An ingest that fails is tried anew the next time: what was not committed is still in the journals. A store on
    the network may take a minute to fail, so it is fed in a thread of its own, and the sampling goes on.

    Args:
        run: what is followed.
        problems: told of failures.
        ingester: if it is open already.
        counts: kept up to date with what is in the lake, if somebody asks for them.
        clock_ns: CLOCK_MONOTONIC.

    Attributes:
        records_count: that were moved.
        last: what the last ingest did.
        pause_ns: how long the next one can wait.
        why: the last one did not go well.

    """

    def __init__(
        self,
        run: Run,
        problems: Problems,
        ingester: Ingester | None = None,
        counts: Counts | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.records_count = 0
        self.last: IngestResult | None = None
        self.pause_ns = INGEST_EVERY_NS
        self._run = run
        self._problems = problems
        self._ingester = ingester
        self._counts = counts
        self._clock_ns = clock_ns
        self._is_remote = run.is_shared
        self._under_way: threading.Thread | None = None
        self._fails_since_ns: int | None = None
        self._stored_ns: int | None = None
        self.why = ""

    def lag_ns(self, now_ns: int) -> int | None:
        """Age of the oldest record that is not in the lake; None until an ingest has begun.

        The lake has all that was written before its last whole ingest began, and records are written all the time,
        the collector's own among them: the oldest one outside is as old as that.
        """
        if self._stored_ns is not None:
            return max(0, now_ns - self._stored_ns)
        if self._fails_since_ns is None:
            return None
        return max(0, now_ns - self._fails_since_ns, (self.last and self.last.lag_ns) or 0)

    @property
    def is_busy(self) -> bool:
        """Whether an ingest goes on in its thread."""
        return self._under_way is not None and self._under_way.is_alive()

    def step(self) -> None:
        """Ingest what the journals hold by now; not if the ingest before still goes on."""
        self._do(self._ingest)

    def maintain(self) -> None:
        """Ingest, and compact the lake: merge, expire, delete."""
        self._do(self._ingest_and_maintain)

    def finish(self, say_last: Callable[[], None]) -> bool:
        """Ingest all that is there and what is said at the very end, compact the lake and let go of it.

        A store on the network is waited for so long and no longer: the training's exit status is waited for too.

        Returns:
            Whether the lake took it all.

        """
        took_all: list[bool] = []
        deadline = time.monotonic() + FINISH_SECONDS
        if self._under_way is not None:
            self._under_way.join(FINISH_SECONDS)
            if self.is_busy:
                say_last()
                return False
        self._do(lambda: took_all.append(self._finish(say_last)))
        if self._under_way is not None:
            self._under_way.join(max(0.0, deadline - time.monotonic()))
        return took_all == [True]

    def _do(self, part: Callable[[], object]) -> None:
        if not self._is_remote:
            part()
        elif not self.is_busy:
            # A daemon: nothing ends a query on a frozen server, and the process must be able to end.
            self._under_way = threading.Thread(target=part, name="ingest", daemon=True)
            self._under_way.start()

    def _finish(self, say_last: Callable[[], None]) -> bool:
        self._ingest()
        say_last()
        if self._fails_since_ns is None:
            self._ingest()
        with self._problems.guard("ingest"):
            if self._ingester is not None:
                self._tell(self._ingester.close(), part="upkeep")
        return self._fails_since_ns is None

    def _ingest(self) -> None:
        began_ns = self._clock_ns()
        if self._fails_since_ns is None:  # until it goes well
            self._fails_since_ns = began_ns
        with self._problems.guard("ingest"), self._remembering():
            if self._ingester is None:
                # Imported here, so that a command neither waits for this second of imports nor fails with it.
                from collector.store.ingest import Ingester

                self._ingester = Ingester(self._run, counts=self._counts)
            begun_ns = time.process_time_ns()
            self.last = self._ingester.step()
            self.records_count += self.last.records_count
            if self.last.is_whole:
                self._stored_ns, self._fails_since_ns = began_ns, None
            else:
                self.why = self.last.problems[-1]
            self._tell(self.last.problems)
            if not self._is_remote:  # else others wait for them, and the time is not that of the ingest alone
                cost_ns = time.process_time_ns() - begun_ns
                self.pause_ns = pause_ns(self.last.records_count, cost_ns, self.pause_ns)

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.why = str(error)
            raise

    def _ingest_and_maintain(self) -> None:
        self._ingest()
        with self._problems.guard("ingest"):
            if self._ingester is not None:
                self._tell(self._ingester.maintain(), part="upkeep")

    def _tell(self, problems: Iterable[str], *, part: str = "ingest") -> None:
        for text in problems:
            self._problems.tell(part, text)
