"""The verdict on a run: computed in its own thread, so that pages hardly wait, and cached between refreshes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app.format import first_line
from collector import report
from collector.diagnosis import Verdict, diagnose, load_tables
from collector.store import Run, command_and_collector, living_processes, queries, read

#: Seconds between two verdicts of a live run, at least; the previous one is shown meanwhile.
VERDICT_SECONDS = 10
#: Pause after a verdict, in multiples of its cost: a live page takes at most 40 ms of CPU per second for verdicts.
REST_PER_COST = 24
#: Seconds that a page waits for a first verdict, which takes longer for a long run: figures are shown before it.
PATIENCE_SECONDS = 0.5
_MAX_RUNS = 32

_log = logging.getLogger("tidegauge.app")
_lock = threading.Lock()
_requests: dict[Path, _Request] = {}
_pool = ThreadPoolExecutor(1, thread_name_prefix="tidegauge-verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictState:
    """The verdict on a run, or the reason for its absence as one line, or neither while it is computed.

    `start_seconds` (time.monotonic) is the moment that it describes. Its cost is the CPU time of the server
    meanwhile: other programs on the cores do not make a verdict older.
    """

    verdict: Verdict | None = None
    why_not: str = ""
    start_seconds: float = math.nan
    cost_seconds: float = 0.0

    @property
    def is_pending(self) -> bool:
        """True while it is computed for the first time."""
        return self.verdict is None and not self.why_not

    @property
    def age_seconds(self) -> float:
        """Age of the verdict, NaN while there is none."""
        return time.monotonic() - self.start_seconds if self.verdict else math.nan

    @property
    def lifetime_seconds(self) -> float:
        """Seconds from its start to the start of the next one, while the run goes on."""
        return max(VERDICT_SECONDS, (1 + REST_PER_COST) * self.cost_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A verdict being computed, and the state before it. The version of a run that goes on is empty."""

    version: tuple[Any, ...]
    request_seconds: float
    future: Future[VerdictState]
    previous: VerdictState

    @property
    def newest(self) -> VerdictState:
        return self.future.result() if self.future.done() else self.previous

    @property
    def is_outdated(self) -> bool:
        """True if a new verdict is due. One on a finished run stays, unless it is missing."""
        can_change = not self.version or not self.newest.verdict
        # The first verdict covers the least of the run, and its cost includes what the server loads once.
        lifetime_seconds = VERDICT_SECONDS if self.previous.is_pending else self.newest.lifetime_seconds
        return self.future.done() and can_change and time.monotonic() - self.request_seconds > lifetime_seconds


def current_verdict(run: Run) -> VerdictState:
    """Return the newest verdict on a run, and start computing the next one if it is due."""
    try:
        manifest = run.manifest
        is_running = manifest.get("end_time_ns") is None and not _is_abandoned(run, manifest)
        version = () if is_running else _version(run)
    except Exception as error:  # noqa: BLE001 - the refresh shows any error as one line
        _log.exception("manifest of %s", run.path)
        return VerdictState(why_not=first_line(error))
    with _lock:
        request = _requests.get(run.path)
        if request is None or request.version != version or request.is_outdated:
            previous = request.newest if request and request.version == version else VerdictState()
            request = _requests[run.path] = _Request(
                version=version,
                request_seconds=time.monotonic(),
                future=_pool.submit(compute_verdict, run),
                previous=previous,
            )
            for path in list(_requests)[:-_MAX_RUNS]:
                del _requests[path]
    if request.newest.is_pending:
        wait([request.future], max(0.0, request.request_seconds + PATIENCE_SECONDS - time.monotonic()))
    return request.newest


def status_of(run: Run) -> str:
    """Return `running`, `finished`, `failed` or `killed`, from the manifest as long as there is no verdict."""
    verdict = current_verdict(run).verdict
    if verdict is not None:
        return verdict.status
    try:
        exit_status = run.manifest.get("exit_status")
    except Exception:  # noqa: BLE001 - as above
        return "failed"
    if exit_status is None:
        return "running"
    return "finished" if exit_status == 0 else "failed" if exit_status > 0 else "killed"


@st.cache_data(ttl=VERDICT_SECONDS, refresh_mode="background", max_entries=_MAX_RUNS, show_spinner=False)
def ranks_of(path: Path) -> tuple[int, ...]:
    """Return the ranks that reported, ascending; none outside a distributed job or if the run cannot be read."""
    try:
        with read(Run(path)) as snapshot:
            started = queries.events(snapshot, "process-start")
            return tuple(sorted({int(rank) for rank in started["rank"].dropna()}))
    except Exception:  # noqa: BLE001 - the refresh shows the error
        _log.exception("ranks of %s", path)
        return ()


def compute_verdict(run: Run) -> VerdictState:
    """Diagnose a run."""
    start_seconds, start_cpu_seconds, verdict, why_not = time.monotonic(), time.process_time(), None, ""
    try:
        verdict = report.with_known(diagnose(load_tables(run)), run)
    except Exception as error:  # noqa: BLE001 - cached like a verdict: failing again would cost as much
        _log.exception("diagnosis of %s", run.path)
        why_not = first_line(error)
    cost_seconds = time.process_time() - start_cpu_seconds
    return VerdictState(verdict=verdict, why_not=why_not, start_seconds=start_seconds, cost_seconds=cost_seconds)


def _is_abandoned(run: Run, manifest: Mapping[str, Any]) -> bool:
    """Return True if command and collector are gone: no process is left to record the run's end."""
    keys = command_and_collector(manifest)
    return bool(keys) and living_processes(run, keys) == frozenset()


def _version(run: Run) -> tuple[Any, ...]:
    """Return a value that changes with the files of a finished run, whose verdict is then out of date."""
    known = report.known_files(run.home)
    files = (run.path / "run.json", run.path / "lake.sqlite", run.journal_dir, run.events_dir, *known)
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
