"""Findings about processes that died."""

from collector.diagnosis.deaths.deaths import find_deaths
from collector.diagnosis.deaths.hang import find_hangs
from collector.diagnosis.deaths.idle_hang import find_idle_hangs
from collector.diagnosis.deaths.last_minute import LAST_MINUTE_SECONDS, last_states, to_records

__all__ = ["LAST_MINUTE_SECONDS", "find_deaths", "find_hangs", "find_idle_hangs", "last_states", "to_records"]
