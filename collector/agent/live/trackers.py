"""Series and findings of a run in the experiment trackers where people look: W&B, MLflow, TensorBoard, trackio.

Each library runs in the collector's process, never in the training, in a thread of its own, so neither the
training nor the samples wait for it. What it prints goes to stderr, since stdout is the command's own. A failure is
one line.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import methodcaller
from pathlib import Path

from collector.agent.live.alerts import LastSent, new_findings
from collector.agent.live.prometheus import View, by_role
from collector.agent.live.tracker_libraries import EVERY_SECONDS, LIBRARIES, PREFIX, Tracker
from collector.agent.problems import say
from collector.errors import TidegaugeError, one_line
from collector.findings import Finding
from collector.store import Edit, Run, annotate

#: Calls that can wait for one tracker; further ones are dropped.
QUEUE_SIZE = 100
#: Seconds that the end of a run waits for the trackers.
PATIENCE_SECONDS = 60.0

#: Column of a sample of the host -> name of its series.
_HOST_COLUMNS = {
    "memory_available_bytes": "memory_available_bytes",
    "cgroup_anon_bytes": "cgroup_anonymous_bytes",
    "cgroup_limit_bytes": "cgroup_limit_bytes",
    "shm_used_bytes": "shm_used_bytes",
}

_Call = Callable[[Tracker], None]


class Trackers:
    """The trackers of `--log-to`; every call returns at once.

    Raises:
        ValueError: a tracker is not known, or its library is not installed.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._makers = {name: _maker(name) for name in names}
        self._channels: list[_Channel] = []
        self._last: tuple[float, View] | None = None
        self._last_sent: LastSent = {}
        self._warnings = _FirstWarnings()
        self._loggers = [logging.getLogger(_library(name)) for name in self._makers]

    @property
    def is_wanted(self) -> bool:
        """True if there is a tracker."""
        return bool(self._makers)

    def begin(self, run: Run, name: str) -> None:
        """Open the trackers for a run."""
        for logger in self._loggers:
            logger.addHandler(self._warnings)
        self._channels = [_Channel(tool, make, run, name) for tool, make in self._makers.items()]

    def tick(self, now_seconds: float, take_view: Callable[[], View | None]) -> None:
        """Add a point to every series, if that is due."""
        if not self.is_wanted or (self._last is not None and now_seconds - self._last[0] < EVERY_SECONDS):
            return
        view = take_view()
        if view is None:
            return
        if self._last is not None:
            step, numbers = series(view, self._last[1], now_seconds - self._last[0])
            values = {f"{PREFIX}/{name}": value for name, value in numbers.items()}
            self._put(lambda tracker: tracker.log(step, values))
        self._last = now_seconds, view

    def note(self, findings: Iterable[Finding]) -> None:
        """Report the findings of a verdict that are new or more severe."""
        new, self._last_sent = new_findings(findings, self._last_sent)
        for finding in new:
            self._put(methodcaller("note", finding))

    def attach_report(self, path: Path) -> None:
        """Add the HTML report, a file that stays."""
        self._put(lambda tracker: tracker.attach_report(path))

    def close(self) -> None:
        """Finish, and wait for what is queued, for a bounded time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for channel in self._channels:
            channel.close(deadline)
        for logger in self._loggers:
            logger.removeHandler(self._warnings)

    def _put(self, call: _Call) -> None:
        for channel in self._channels:
            channel.put(call)


def _maker(name: str) -> Callable[[Run, str], Tracker]:
    if name not in LIBRARIES:
        raise ValueError(f"{name!r} is not known; give one of {', '.join(LIBRARIES)}")
    package, make = LIBRARIES[name]
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{name} is not installed where Tidegauge runs: pip install {package}") from None
    return make


def _library(name: str) -> str:
    """Return the name of a tracker's library, and of the logger above all of its own."""
    return LIBRARIES[name][0].partition("-")[0]


class _FirstWarnings(logging.Handler):
    """Handler that writes each warning of a library once: one that cannot reach its server logs each attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._known: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        library = record.name.partition(".")[0]
        # A library that does not propagate, as MLflow, writes to stderr itself.
        if (library, str(record.msg)) not in self._known and logging.getLogger(library).propagate:
            self._known.add((library, str(record.msg)))
            say(f"{library}: {one_line(record.getMessage())}")


class _Channel:
    """One tracker, with its queue and its thread."""

    def __init__(self, name: str, make: Callable[[Run, str], Tracker], run: Run, run_name: str) -> None:
        self._name = name
        self._queue: queue.Queue[_Call | None] = queue.Queue(QUEUE_SIZE)
        self._thread = threading.Thread(target=self._work, args=(make, run, run_name), name=name, daemon=True)
        self._thread.start()

    def put(self, call: _Call) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(call)

    def close(self, deadline: float) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            say(f"{self._name} did not finish within {PATIENCE_SECONDS:g} s of the end")

    def _work(self, make: Callable[[Run, str], Tracker], run: Run, run_name: str) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                tracker = make(run, run_name)
                say(f"{self._name}: {tracker.address}")
                with contextlib.suppress(TidegaugeError):
                    annotate(run, Edit(add={self._name: tracker.address}))
                while (call := self._queue.get()) is not None:
                    call(tracker)
                tracker.close()
            except Exception as error:  # noqa: BLE001 - any error of a foreign library; the run goes on without it
                say(f"nothing more goes to {self._name}: {type(error).__name__}: {error}")


def series(view: View, before: View, seconds: float) -> tuple[int, dict[str, float]]:
    """Return the step that a run has reached, and the values of its series; `before` is its state `seconds` ago."""
    values = dict(_memory(view))
    now, then = (one.totals.sums if one.totals else {} for one in (view, before))
    gained = [
        {name: value - then.get(rank, {}).get(name, 0) for name, value in sums.items()}
        for rank, sums in now.items()
    ]
    if gained:
        values["steps_per_second"] = max(one.get("steps", 0) for one in gained) / seconds
    if any("samples" in one for one in gained):
        values["samples_per_second"] = sum(one.get("samples", 0) for one in gained) / seconds
    in_steps = sum(one.get("step_ns", 0) for one in gained if "data_wait_ns" in one)
    if in_steps > 0:
        values["data_wait_ratio"] = sum(one.get("data_wait_ns", 0) for one in gained) / in_steps
    return view.steps, values


def _memory(view: View) -> Iterator[tuple[str, float]]:
    pss_bytes: Counter[str] = Counter()
    for (_, role, _), total in by_role(view.samples.get("process", ())).items():
        if role in ("main", "worker") and "pss_bytes" in total:
            pss_bytes[f"memory/{role}_bytes"] += total["pss_bytes"]
    yield from ((name, float(value)) for name, value in pss_bytes.items())
    for sample in view.samples.get("host", ()):
        yield from _known("host/", sample, _HOST_COLUMNS)
    for sample in view.samples.get("device", ()):
        yield from _known(f"gpu{sample['device']:.0f}/", sample, {"used_bytes": "used_bytes"})
    for (_, rank, device), newest in (view.totals.allocator if view.totals else {}).items():
        place = f"gpu{device}/" if rank is None else f"gpu{device}/rank{rank}_"
        yield from _known(place, newest, {name: name for name in ("allocated_bytes", "reserved_bytes")})


def _known(
    place: str, sample: Mapping[str, float | None], columns: Mapping[str, str]
) -> Iterator[tuple[str, float]]:
    """Yield the columns of a sample that have a value, under the names of their series."""
    for column, name in columns.items():
        if (value := sample.get(column)) is not None:
            yield f"{place}{name}", float(value)
