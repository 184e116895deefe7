"""Samples, and their conversion to records of a stream."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeAlias

from training_harness.records import MISSING, STREAMS, Stream

#: One record: column of the stream -> value. An absent column, or None, is missing.
Sample: TypeAlias = Mapping[str, float | None]
#: A sample that may also hold names.
NamedSample: TypeAlias = Mapping[str, float | bytes | None]


def record_values(stream: Stream, time_ns: int, sample: NamedSample) -> tuple[float | bytes, ...]:
    """Return the values of a record, in the order of the stream's columns."""
    values: list[float | bytes] = [time_ns]
    for name, missing in _columns(stream.name):
        value = sample.get(name)
        values.append(missing if value is None else value)
    return tuple(values)


@functools.cache
def _columns(stream_name: str) -> tuple[tuple[str, float | bytes], ...]:
    """Return name and missing value of each column after the time: needed 70 times per tick on a large node."""
    return tuple((column.name, MISSING[column.code]) for column in STREAMS[stream_name].columns[1:])
