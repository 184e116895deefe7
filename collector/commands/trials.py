"""Short trials of a training: what `tidegauge tune` is asked for, with its settings and with its batch sizes."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from collector.commands.options import show_table, write_json
from collector.findings import finite
from collector.units import MISSING

if TYPE_CHECKING:
    from collector.agent.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The trials of a command that a user asked for, each of some seconds.

    Attributes:
        most: number of trials besides the one of the script as it is.
        signals: signals that asked for an end; then there is no further trial.
    """

    command: tuple[str, ...]
    home: Path
    seconds: float
    most: int
    as_json: bool
    signals: list[int]

    def once(self, name: str, loader: str | None, seconds: float) -> TrialResult:
        """Run one trial and read its run."""
        from collector.agent.trial import try_once

        return try_once(self.command, self.home, name=name, loader=loader, seconds=seconds, signals=self.signals)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collect the signals that ask for an end, so that the results so far are still shown."""
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def show_trials(columns: Sequence[str], rows: Iterable[Sequence[str]], *, names: Literal["left", "right"]) -> None:
    """Print a table with a row per trial: its name, on that side of the first column, and numbers.

    A column without any value is left out.
    """
    from rich.table import Table

    rows = list(rows)
    places = [place for place in range(len(columns)) if any(row[place] != MISSING for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place in places:
        table.add_column(columns[place], justify="right" if place else names)
    for row in rows:
        table.add_row(*(row[place] for place in places))
    show_table(table)


def write_results(facts: Mapping[str, Any]) -> None:
    """Write the results of trials as JSON (docs/cli.md); an unknown value is null."""
    write_json(finite({"schema": 1, **facts}))


def change_text(after: float, before: float) -> str:
    """Return a change in percent: `+5%`."""
    return f"{after / before - 1:+.0%}"
