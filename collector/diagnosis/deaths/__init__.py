"""Findings about processes that died."""

from collector.diagnosis.deaths.catalogue import FIX_LEAK
from collector.diagnosis.deaths.deaths import find_deaths
from collector.diagnosis.deaths.hang import find_hangs
from collector.diagnosis.deaths.idle_hang import find_idle_hangs
from collector.diagnosis.deaths.last_minute import (
    LAST_MINUTE_SECONDS,
    earlier_workers,
    last_states,
    to_records,
)
from collector.diagnosis.deaths.victims import end_of

__all__ = [
    "FIX_LEAK",
    "LAST_MINUTE_SECONDS",
    "earlier_workers",
    "end_of",
    "find_deaths",
    "find_hangs",
    "find_idle_hangs",
    "last_states",
    "to_records",
]
