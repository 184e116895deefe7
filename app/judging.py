"""The verdict on a run, as the dashboard keeps it between refreshes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app.format import one_line
from collector.diagnosis.tables import load_tables
from collector.diagnosis.verdict import Verdict, diagnose
from collector.store.runs import Run

#: The verdict of a live run is drawn up this often, beside the refreshes, which show the one before meanwhile.
VERDICT_SECONDS = 10

_log = logging.getLogger("tidegauge.app")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict on a run and the ranks that said hello, ascending; or why there is none, as one line."""

    verdict: Verdict | None = None
    ranks: tuple[int, ...] = ()
    why_not: str = ""


def judged(run: Run) -> Judged:
    """What the diagnosis says of a run: without a verdict, its records are still worth a look."""
    try:
        return _judged(str(run.path), _version(run))
    except Exception as error:  # noqa: BLE001 - whatever it is, the refresh tells of it
        _log.exception("manifest of %s", run.path)
        return Judged(why_not=one_line(error))


def status_of(run: Run) -> str:
    """`running`, `finished`, `failed` or `killed`; what the manifest says if no verdict can be had."""
    verdict = judged(run).verdict
    if verdict is not None:
        return verdict.status
    try:
        exit_status = run.manifest.get("exit_status")
    except Exception:  # noqa: BLE001 - as above
        return "failed"
    return "running" if exit_status is None else "finished" if exit_status == 0 else "failed"


@st.cache_data(ttl=VERDICT_SECONDS, refresh_mode="background", max_entries=8, show_spinner=False)
def _judged(path: str, version: tuple[Any, ...]) -> Judged:
    del version  # a key alone
    try:
        tables = load_tables(Run(Path(path)))
        ranks = {event["rank"] for event in tables.events_of("process-start")} - {None}
        return Judged(verdict=diagnose(tables), ranks=tuple(sorted(ranks)))
    except Exception as error:  # noqa: BLE001 - kept as the verdict would be: to fail again costs as much
        _log.exception("diagnosis of %s", path)
        return Judged(why_not=one_line(error))


def _version(run: Run) -> tuple[Any, ...]:
    """Changes when an old verdict must not be shown any more: at the end of a run, then with its files."""
    if run.manifest.get("end_time_ns") is None:
        return ()
    files = (run.path / "run.json", run.path / "lake.sqlite", run.journal_dir, run.events_dir)
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
