"""Records of segments as Arrow tables, in the reader's schema.

Columns that this Tidegauge does not know are left out; those that a segment lacks, and the values that stand for
missing, are NULL.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from collector.store.journals import ARROW_TYPES, SegmentHeader, unreadable
from training_harness.records import IDENTITY, NAME, NAME_BYTES, STREAMS, Stream

Records: TypeAlias = np.ndarray[Any, Any]
_IDENTITY_NAMES = frozenset(column.name for column in IDENTITY)
_NUMPY_CODES = {"q": "<i8", "i": "<i4", "h": "<i2", "b": "<i1", "d": "<f8", NAME: f"S{NAME_BYTES}"}
#: Bytes of an integer -> what stands for missing; `np.iinfo` would take a third of the time of a small read.
_SMALLEST = {np.dtype(code).itemsize: np.iinfo(code).min for code in ("<i8", "<i4", "<i2", "<i1")}


def arrow_schema(stream: Stream) -> pa.Schema:
    """The columns of a stream and of the identity, as Arrow knows them."""
    return pa.schema([(column.name, ARROW_TYPES[column.code]) for column in (*stream.columns, *IDENTITY)])


def read_records(path: Path, header: SegmentHeader, offset_bytes: int, stop: int | None = None) -> pa.Table:
    """The whole records between two bytes of a segment, in the reader's schema (`tabulated`).

    Args:
        path: the segment.
        header: what `read_header` gave for it.
        offset_bytes: where to begin; before the first record means at the first record.
        stop: where to end, by default at the end of the file.

    Raises:
        JournalError: the file cannot be read.

    """
    return tabulated(header.stream, [(header, raw_records(path, header, offset_bytes, stop))])


def raw_records(path: Path, header: SegmentHeader, offset_bytes: int, stop: int | None = None) -> Records:
    """The same as they are in the file.

    Raises:
        JournalError: the file cannot be read.

    """
    begin = max(offset_bytes, header.header_bytes)
    try:
        end = os.stat(path).st_size if stop is None else stop
        count = max(0, (end - begin) // header.record_bytes)
        dtype = np.dtype([(name, _NUMPY_CODES[code]) for name, code in header.layout])
        return np.fromfile(path, dtype, count, offset=begin)
    except OSError as error:
        raise unreadable(path, error) from None


def tabulated(stream: str, pieces: Sequence[tuple[SegmentHeader, Records]]) -> pa.Table:
    """Records of several segments of a stream as one table."""
    schema = arrow_schema(STREAMS[stream])
    tables = [schema.empty_table()]
    for _, alike in itertools.groupby(pieces, key=lambda piece: piece[0].layout):
        headers, parts = zip(*alike, strict=True)
        records = np.concatenate(parts)
        of_piece = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        columns = [
            pa.array([getattr(header, field.name) for header in headers], field.type).take(pa.array(of_piece))
            if field.name in _IDENTITY_NAMES
            else _column(records, field)
            for field in schema
        ]
        tables.append(pa.Table.from_arrays(columns, schema=schema))
    return pa.concat_tables(tables)


def _column(records: np.ndarray[Any, Any], field: pa.Field) -> pa.Array:
    if records.dtype.names is None or field.name not in records.dtype.names:
        return pa.nulls(len(records), field.type)
    values = np.ascontiguousarray(records[field.name])
    if values.dtype.kind == "S":
        names, places = np.unique(values, return_inverse=True)
        return pa.array([name.decode(errors="replace") or None for name in names], field.type).take(places)
    missing = np.isnan(values) if values.dtype.kind == "f" else values == _SMALLEST[values.itemsize]
    return pa.array(values, mask=missing) if missing.any() else pa.array(values)
