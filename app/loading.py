"""The recent data loading of the run that a view looks at, read once for all its panels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app.moment import Moment
from collector.diagnosis.exposed import Exposed, expose, recent_loops
from collector.diagnosis.frames import floats
from collector.diagnosis.recent import BATCHES, longest_waiting, recent_loading
from collector.diagnosis.speed_ups import in_short
from collector.diagnosis.stage_costs import stage_costs
from collector.diagnosis.tables import RunTables
from collector.diagnosis.tuning import Forecast, forecast

#: What other settings would give takes up to a second, and changes slowly: for a live run it is asked so often. So
#: is which rank waits longest: of ranks that wait alike, a page would show another one each time.
_OUTLOOK_SECONDS = 30
#: Of a live run a page looks at so many batches of a rank: it must be quick rather than long.
_LIVE_BATCHES = 1_500


@dataclass(frozen=True, kw_only=True)
class Recent:
    """The loop of the chosen loader over its last batches; of several ranks the one that waited longest."""

    run_id: str
    tables: RunTables
    seen: Exposed

    @cached_property
    def stages(self) -> pd.DataFrame:
        """What each stage takes per batch."""
        return stage_costs(self.tables, self.seen.loop)

    @cached_property
    def stall(self) -> dict[str, Any]:
        """What it waited for, as in the report."""
        return in_short(self.tables, self.seen)

    @property
    def outlook(self) -> Forecast | str:
        """What other settings would give it, or why that cannot be told."""
        loop = self.seen.loop
        return _forecast((self.run_id, loop.rank, loop.loader), self.tables, self.seen)


def recent(moment: Moment) -> Recent | None:
    """The loop that a view is about; None if it has yielded no batch in the window."""
    return moment.once("recent", lambda: _recent(moment))


def _recent(moment: Moment) -> Recent | None:
    running = moment.verdict is not None and moment.verdict.status == "running"
    most = _LIVE_BATCHES if running else BATCHES
    rank = moment.span.rank
    if rank is None:
        rank = _longest_waiting((str(moment.run.path), moment.loader, moment.span.is_whole), moment)
    tables = recent_loading(
        moment.snapshot, moment.manifest, from_ns=moment.span.from_ns, rank=rank, batches_count=most
    )
    found = recent_loops(tables)
    mine = [loop for loop in found if loop.loader == moment.loader] or found
    if not mine:
        return None
    longest = max(mine, key=lambda loop: np.fmax(floats(loop.batches, "wait_ns"), 0.0).sum())
    seen = expose(longest, tables.stream("stage"))
    return Recent(run_id=moment.run_id, tables=tables, seen=seen)


@st.cache_resource(ttl=_OUTLOOK_SECONDS, max_entries=8, show_spinner=False)  # one object: what hangs on it is kept
def _forecast(key: tuple[object, ...], _tables: RunTables, _seen: Exposed) -> Forecast | str:
    del key  # stands for the others
    return forecast(_tables, _seen.loop)


@st.cache_data(ttl=_OUTLOOK_SECONDS, max_entries=32, show_spinner=False)
def _longest_waiting(key: tuple[object, ...], _moment: Moment) -> int | None:
    del key  # stands for the other
    return longest_waiting(_moment.snapshot, from_ns=_moment.span.from_ns, loader=_moment.loader)
