"""The recent data loading of the run that a view looks at, read once for all its panels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd
import streamlit as st

from app.runtime.moment import Moment, once
from collector.diagnosis.loading import (
    BATCHES,
    Loop,
    WaitBreakdown,
    break_down_waits,
    cost_per_stage,
    longest_waiting_rank,
    recent_loading,
    recent_loops,
)
from collector.diagnosis.tuning import Forecast, WaitSummary, forecast, summarize_waits

#: Seconds for which a forecast is cached: it takes up to a second and changes slowly. The rank that waits longest
#: is cached as long, else a page would switch between ranks that wait alike.
_CACHE_SECONDS = 30
#: Batches per rank that a page reads of a live run: fewer than of a finished one, to be quick.
_LIVE_BATCHES = 1_500


@dataclass(frozen=True, kw_only=True)
class Recent:
    """The loop of the chosen loader over its last batches, on the rank that waited longest."""

    run_id: str
    seen: WaitBreakdown

    @cached_property
    def stages(self) -> pd.DataFrame:
        """Cost of each stage per batch."""
        return cost_per_stage(self.seen.loop)

    @cached_property
    def stall(self) -> WaitSummary:
        """Entry of the report's `exposed_stall`: what the loop waited for."""
        return summarize_waits(self.seen)

    @property
    def outlook(self) -> Forecast | str:
        """Forecast for other settings, or the reason why there is none."""
        loop = self.seen.loop
        return _forecast((self.run_id, loop.rank, loop.loader), loop)


@once
def recent(moment: Moment) -> Recent | None:
    """Return the loop that a view is about; None if it has yielded no batch in the window."""
    rank = moment.span.rank
    if rank is None:
        rank = _longest_waiting((str(moment.run.path), moment.loader, moment.span.is_whole), moment)
    tables = recent_loading(
        moment.snapshot,
        moment.manifest,
        from_ns=moment.span.from_ns,
        rank=rank,
        batches_count=_LIVE_BATCHES if moment.is_running else BATCHES,
    )
    loops = recent_loops(tables)
    loops_of_loader = [loop for loop in loops if loop.loader == moment.loader] or loops
    if not loops_of_loader:
        return None
    longest = max(loops_of_loader, key=lambda loop: loop.wait_seconds)
    return Recent(run_id=moment.run_id, seen=break_down_waits(longest))


# A resource is not copied, so what the forecast caches itself stays with it.
@st.cache_resource(ttl=_CACHE_SECONDS, max_entries=8, show_spinner=False)
def _forecast(key: tuple[object, ...], _loop: Loop) -> Forecast | str:
    del key  # Streamlit's cache hashes it in place of the other arguments
    return forecast(_loop)


@st.cache_data(ttl=_CACHE_SECONDS, max_entries=32, show_spinner=False)
def _longest_waiting(key: tuple[object, ...], _moment: Moment) -> int | None:
    del key  # as above
    return longest_waiting_rank(_moment.snapshot, from_ns=_moment.span.from_ns, loader=_moment.loader)
