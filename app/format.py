"""What the dashboard alone needs of numbers: the scales of its axes, and the time of day."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo

GIB = 2**30
MIB = 2**20


def clock(wall_ns: int, zone: tzinfo = UTC) -> str:
    """Wall time as hh:mm:ss in that time zone."""
    return datetime.fromtimestamp(wall_ns / 1e9, zone).strftime("%H:%M:%S")
