"""Read records of segments, and events, into Arrow tables in the reader's schema.

Columns that this Tidegauge does not know are left out. Columns that a segment lacks, and values that stand for
missing, are NULL.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from collector.store.journals.segments import SegmentHeader, read_error
from training_harness.records import IDENTITY, NAME, NAME_BYTES, STREAMS, Stream

Records: TypeAlias = np.ndarray[Any, Any]
#: struct code -> Arrow type.
_ARROW_TYPES: dict[str, pa.DataType] = {
    "q": pa.int64(),
    "i": pa.int32(),
    "h": pa.int16(),
    "b": pa.int8(),
    "d": pa.float64(),
    "s": pa.string(),
    NAME: pa.string(),
}
_EVENT_SCHEMA = pa.schema(
    [("time_ns", pa.int64()), ("kind", pa.string())]
    + [(column.name, _ARROW_TYPES[column.code]) for column in IDENTITY]
    + [("body", pa.string())]
)
_IDENTITY_NAMES = frozenset(column.name for column in IDENTITY)
_NUMPY_CODES = {"q": "<i8", "i": "<i4", "h": "<i2", "b": "<i1", "d": "<f8", NAME: f"S{NAME_BYTES}"}
#: Bytes of an integer -> value that stands for missing; `np.iinfo` would take a third of the time of a small read.
_SMALLEST = {np.dtype(code).itemsize: np.iinfo(code).min for code in ("<i8", "<i4", "<i2", "<i1")}


def arrow_schema(stream: Stream) -> pa.Schema:
    """Return the Arrow schema of a stream's columns and the identity columns."""
    return pa.schema([(column.name, _ARROW_TYPES[column.code]) for column in (*stream.columns, *IDENTITY)])


def tabulate_events(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the rows of `segments.read_events` as a table."""
    return pa.Table.from_pylist(list(rows), schema=_EVENT_SCHEMA)


def read_records(path: Path, header: SegmentHeader, offset_bytes: int, stop_bytes: int | None = None) -> pa.Table:
    """Return the whole records between two offsets of a segment, in the reader's schema.

    Args:
        path: the segment.
        header: its header, from `read_header`.
        offset_bytes: first byte; an offset before the first record means the first record.
        stop_bytes: byte at which to stop, by default the end of the file.

    Raises:
        JournalError: the file cannot be read.
    """
    return tabulate(header.stream, [(header, raw_records(path, header, offset_bytes, stop_bytes))])


def raw_records(path: Path, header: SegmentHeader, offset_bytes: int, stop_bytes: int | None) -> Records:
    """Return the records of `read_records` in the layout of the file.

    Raises:
        JournalError: the file cannot be read.
    """
    begin = max(offset_bytes, header.header_bytes)
    try:
        end = os.stat(path).st_size if stop_bytes is None else stop_bytes
        count = max(0, (end - begin) // header.record_bytes)
        dtype = np.dtype([(name, _NUMPY_CODES[code]) for name, code in header.layout])
        return np.fromfile(path, dtype, count, offset=begin)
    except OSError as error:
        raise read_error(path, error) from None


def tabulate(stream: str, segments: Sequence[tuple[SegmentHeader, Records]]) -> pa.Table:
    """Return records of several segments of a stream as one table."""
    schema = arrow_schema(STREAMS[stream])
    tables = [schema.empty_table()]
    for _, same_layout in itertools.groupby(segments, key=lambda segment: segment[0].layout):
        headers, parts = zip(*same_layout, strict=True)
        records = np.concatenate(parts)
        header_indexes = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        columns = [
            pa.array([getattr(header, field.name) for header in headers], field.type).take(pa.array(header_indexes))
            if field.name in _IDENTITY_NAMES
            else _column(records, field)
            for field in schema
        ]
        tables.append(pa.Table.from_arrays(columns, schema=schema))
    return pa.concat_tables(tables)


def _column(records: Records, field: pa.Field) -> pa.Array:
    if records.dtype.names is None or field.name not in records.dtype.names:
        return pa.nulls(len(records), field.type)
    values = np.ascontiguousarray(records[field.name])
    if values.dtype.kind == "S":
        names, indexes = np.unique(values, return_inverse=True)
        return pa.array([name.decode(errors="replace") or None for name in names], field.type).take(indexes)
    missing = np.isnan(values) if values.dtype.kind == "f" else values == _SMALLEST[values.itemsize]
    return pa.array(values, mask=missing) if missing.any() else pa.array(values)
