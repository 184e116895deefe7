"""The verdict on a run, as the dashboard keeps it between refreshes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import streamlit as st

from collector.diagnosis.tables import load_tables
from collector.diagnosis.verdict import Verdict, diagnose
from collector.store.runs import Run

#: The verdict of a live run is drawn up this often, beside the refreshes, which show the one before meanwhile.
VERDICT_SECONDS = 10

_log = logging.getLogger("tidegauge.app")


def verdict_of(run: Run) -> Verdict | None:
    """The verdict; None if the diagnosis failed."""
    judged = _judged(run)
    return judged[0] if judged else None


def ranks_of(run: Run) -> tuple[int, ...]:
    """The ranks that said hello, ascending; none outside a distributed job, or if the run cannot be read."""
    judged = _judged(run)
    return judged[1] if judged else ()


def status_of(run: Run) -> str:
    """`running`, `finished`, `failed` or `killed`; what the manifest says if no verdict can be had."""
    verdict = verdict_of(run)
    if verdict is not None:
        return verdict.status
    try:
        exit_status = run.manifest.get("exit_status")
    except Exception:  # noqa: BLE001 - whatever it is, the refresh tells of it
        _log.exception("manifest of %s", run.path)
        return "failed"
    return "running" if exit_status is None else "finished" if exit_status == 0 else "failed"


def _judged(run: Run) -> tuple[Verdict, tuple[int, ...]] | None:
    try:
        return _cached_verdict(str(run.path), _version(run))
    except Exception:  # noqa: BLE001 - without a verdict, the records are still worth a look
        _log.exception("diagnosis of %s", run.path)
        return None


@st.cache_data(ttl=VERDICT_SECONDS, refresh_mode="background", max_entries=8, show_spinner=False)
def _cached_verdict(path: str, version: tuple[Any, ...]) -> tuple[Verdict, tuple[int, ...]]:
    """The verdict, and the ranks that the same tables name."""
    del version  # a key alone
    tables = load_tables(Run(Path(path)))
    ranks = {event["rank"] for event in tables.events_of("process-start")} - {None}
    return diagnose(tables), tuple(sorted(ranks))


def _version(run: Run) -> tuple[Any, ...]:
    """Changes when an old verdict must not be shown any more: at the end of a run, then with its files."""
    if run.manifest.get("end_time_ns") is None:
        return ()
    files = (run.path / "run.json", run.path / "lake.sqlite", run.journal_dir, run.events_dir)
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
