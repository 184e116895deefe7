"""One short trial of a training for `tidegauge tune`: its run, read, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collector.agent.trials import run_trial
from collector.diagnosis.findings import finite
from collector.diagnosis.loops import Loop, loops
from collector.diagnosis.tables import RunTables, load_tables
from collector.errors import one_line


def try_once(
    command: Sequence[str], home: Path, *, name: str, loader: str | None, seconds: float, caught: Sequence[int]
) -> tuple[RunTables, Loop | None, str]:
    """Train for so long; its tables, the loop with most batches if there is one, and why it failed, empty if not.

    Raises:
        TidegaugeError: its run cannot be made or read.
    """
    trial = run_trial(
        command, home=home, name=name, loader=loader, seconds=seconds, interrupted=lambda: bool(caught)
    )
    tables = load_tables(trial.run)
    return tables, max(loops(tables), key=lambda loop: len(loop.batches), default=None), trial.failure


def raised(tables: RunTables) -> str:
    """The exception that ended the training, empty if there was none: it may be told before the process ends."""
    found = tables.events_of("exception")
    return one_line(f"the training failed: {found[-1]['type']}: {found[-1]['message']}") if found else ""


def json_text(facts: Mapping[str, Any]) -> str:
    """What the trials told, for programs: docs/cli.md. What is not known is null."""
    return json.dumps(finite({"schema": 1, **facts}), indent=1, allow_nan=False)
