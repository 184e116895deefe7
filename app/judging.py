"""The verdict on a run: drawn up beside the pages, which do not wait long for it, and kept between refreshes."""

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

from app.format import one_line
from collector.diagnosis.frames import key_of
from collector.diagnosis.tables import load_tables
from collector.diagnosis.verdict import Verdict, diagnose
from collector.store import moment_queries
from collector.store.reader import read
from collector.store.runs import Run, living_processes

#: The verdict of a live run is drawn up this often at most; the one before is shown meanwhile.
VERDICT_SECONDS = 10
#: And rests so long as this, in times of what it cost: however large the run, 40 ms for each second of a live page.
REST_PER_COST = 24
#: Older than this, it says so.
OLD_SECONDS = 15
#: A page waits so long for a first verdict: one of a long run takes seconds, and figures are worth a look before.
PATIENCE_SECONDS = 0.5
_KEPT = 32

_log = logging.getLogger("tidegauge.app")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict on a run; or why there is none, as one line; or neither, while it is drawn up.

    It is of the moment `begun` (time.monotonic). Its cost is the CPU time of the server meanwhile: that others use
    the cores makes none older.
    """

    verdict: Verdict | None = None
    why_not: str = ""
    begun: float = math.nan
    cost_seconds: float = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether it is not there yet."""
        return self.verdict is None and not self.why_not

    @property
    def age_seconds(self) -> float:
        """How old it is, NaN while there is none."""
        return time.monotonic() - self.begun if self.verdict else math.nan

    @property
    def lasts_seconds(self) -> float:
        """From its begin to the begin of the next, while the run goes on."""
        return max(VERDICT_SECONDS, (1 + REST_PER_COST) * self.cost_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A verdict that was asked for, and what was known before; the version of a run that goes on is empty."""

    version: tuple[Any, ...]
    asked: float
    future: Future[Judged]
    before: Judged

    @property
    def newest(self) -> Judged:
        return self.future.result() if self.future.done() else self.before

    @property
    def is_old(self) -> bool:
        """Whether it is to be asked for anew: that of a run that is over stays, if there is one."""
        changes = not self.version or not self.newest.verdict
        # The first one tells the least, and pays for what the server loads once.
        lasts_seconds = VERDICT_SECONDS if self.before.is_awaited else self.newest.lasts_seconds
        return self.future.done() and changes and time.monotonic() - self.asked > lasts_seconds


_lock = threading.Lock()
_orders: dict[Path, _Order] = {}
_pool = ThreadPoolExecutor(1, thread_name_prefix="tidegauge-verdict")


def judged(run: Run) -> Judged:
    """What the diagnosis says of a run, as far as it is known by now."""
    try:
        manifest = run.manifest
        goes_on = manifest.get("end_time_ns") is None and not _is_left(run, manifest)
        version = () if goes_on else _version(run)
    except Exception as error:  # noqa: BLE001 - whatever it is, the refresh tells of it
        _log.exception("manifest of %s", run.path)
        return Judged(why_not=one_line(error))
    with _lock:
        order = _orders.get(run.path)
        if order is None or order.version != version or order.is_old:
            before = order.newest if order and order.version == version else Judged()
            future = _pool.submit(draw_up, run)
            order = _orders[run.path] = _Order(
                version=version, asked=time.monotonic(), future=future, before=before
            )
            for path in list(_orders)[:-_KEPT]:
                del _orders[path]
    if order.newest.is_awaited:
        wait([order.future], max(0.0, order.asked + PATIENCE_SECONDS - time.monotonic()))
    return order.newest


def status_of(run: Run) -> str:
    """`running`, `finished`, `failed` or `killed`; what the manifest says while no verdict can be had."""
    verdict = judged(run).verdict
    if verdict is not None:
        return verdict.status
    try:
        exit_status = run.manifest.get("exit_status")
    except Exception:  # noqa: BLE001 - as above
        return "failed"
    if exit_status is None:
        return "running"
    return "finished" if exit_status == 0 else "failed" if exit_status > 0 else "killed"


@st.cache_data(ttl=VERDICT_SECONDS, refresh_mode="background", max_entries=_KEPT, show_spinner=False)
def ranks_of(path: Path) -> tuple[int, ...]:
    """The ranks that said hello, ascending; none outside a distributed job, or if the run cannot be read."""
    try:
        with read(Run(path)) as snapshot:
            started = moment_queries.told(snapshot, "process-start")
            return tuple(sorted({int(rank) for rank in started["rank"].dropna()}))
    except Exception:  # noqa: BLE001 - the refresh tells of it
        _log.exception("ranks of %s", path)
        return ()


def draw_up(run: Run) -> Judged:
    """The verdict on a run anew."""
    begun, spent, verdict, why_not = time.monotonic(), time.process_time(), None, ""
    try:
        verdict = diagnose(load_tables(run))
    except Exception as error:  # noqa: BLE001 - kept as a verdict would be: to fail again costs as much
        _log.exception("diagnosis of %s", run.path)
        why_not = one_line(error)
    return Judged(verdict=verdict, why_not=why_not, begun=begun, cost_seconds=time.process_time() - spent)


def _is_left(run: Run, manifest: Mapping[str, Any]) -> bool:
    """Whether the command and the collector are gone: of a run that nobody ended, nobody tells."""
    keys = [key for name in ("command", "collector") if (key := key_of(manifest.get(name))) is not None]
    return bool(keys) and living_processes(run, keys) == frozenset()


def _version(run: Run) -> tuple[Any, ...]:
    """Changes with the files of a run that is over, when an old verdict must not be shown any more."""
    files = (run.path / "run.json", run.path / "lake.sqlite", run.journal_dir, run.events_dir)
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
