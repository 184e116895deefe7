"""Statistics on plain arrays: growth, first passages and paces."""

from collector.diagnosis.statistics.first_passage import FUTURES_COUNT, first_passage_times
from collector.diagnosis.statistics.growth import MIN_POINTS, Floats, Growth, spread
from collector.diagnosis.statistics.step_pace import StepPace

__all__ = [
    "FUTURES_COUNT",
    "MIN_POINTS",
    "Floats",
    "Growth",
    "StepPace",
    "first_passage_times",
    "spread",
]
