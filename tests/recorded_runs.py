"""The recorded runs of tests/data: unpacked, as the tables that the rules read, and with changed records.

Tests of what a rule or a page says start from a run that real processes recorded. Where no run shows a case, they
take the nearest one and drop or scale rows of it: `with_columns` changes tables, `edit` and `add_process` the
journals of an unpacked run.
"""

from __future__ import annotations

import atexit
import gzip
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from collector.diagnosis.run.tables import RunTables, load_tables
from collector.store.runs.run import Run
from training_harness.journal import MAGIC

DATA = Path(__file__).parent / "data"
RUNS, GPU_RUNS = DATA / "runs", DATA / "gpu"
#: PyTorch's own statistics of its allocators (tests/cuda_sim/programs/allocator_state.py).
ALLOCATOR = GPU_RUNS / "allocator.json.gz"
#: Struct code of a column -> dtype of its values in a journal.
_DTYPES = {"q": "<i8", "i": "<i4", "h": "<i2", "b": "<i1", "d": "<f8"}


def archives() -> dict[str, Path]:
    """Return name -> archive of each recorded run."""
    found = (path for place in (RUNS, GPU_RUNS) for path in place.glob("*.tar.gz"))
    return {path.name.removesuffix(".tar.gz"): path for path in found}


def unpack(name: str, home: Path) -> Path:
    """Unpack a recorded run into a home and return its directory; its boot is one that no machine has."""
    with tarfile.open(archives()[name]) as archive:
        archive.extractall(home / "runs", filter="data")
    run = home / "runs" / name
    (run / "result.json").unlink(missing_ok=True)
    manifest = json.loads((run / "run.json").read_text())
    for anchor in manifest["anchors"].values():
        anchor["boot_id"] = "recorded"
    (run / "run.json").write_text(json.dumps(manifest))
    return run


def allocator_state() -> dict[str, Any]:
    """Return PyTorch's statistics of its allocators, as its functions return them."""
    state: dict[str, Any] = json.loads(gzip.decompress(ALLOCATOR.read_bytes()))
    for name in ("device", "unused"):
        pools = state[name].pop("private_pools")
        state[name]["reserved_bytes_by_private_pools"] = {tuple(pool): told for pool, told in pools}
    return state


@cache
def recorded(name: str) -> RunTables:
    """Return the tables of a recorded run."""
    return load_tables(Run(unpacked(name)))


@cache
def unpacked(name: str) -> Path:
    """Return the directory of a recorded run, to be read only."""
    return unpack(name, _scratch() / name)


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="recorded-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def with_columns(tables: RunTables, stream: str, change: Callable[[pd.DataFrame], Mapping[str, Any]]) -> RunTables:
    """Return a run with other columns in one stream: `change` gets its rows and returns name -> values."""
    rows = tables.streams[stream]
    return replace(tables, streams={**tables.streams, stream: rows.assign(**change(rows))})


def with_hidden_processes(tables: RunTables) -> RunTables:
    """Return a run whose driver names no processes, as in a container."""
    return with_columns(tables, "device", lambda rows: {"process_used_bytes": np.nan, "other_used_bytes": np.nan})


def only_rows(tables: RunTables, stream: str, chosen: Callable[[pd.DataFrame], Any]) -> RunTables:
    """Return a run with those rows of a stream that `chosen` is true for."""
    rows = tables.streams[stream]
    return replace(tables, streams={**tables.streams, stream: rows[chosen(rows)]})


def with_event(tables: RunTables, kind: str, **fields: Any) -> RunTables:
    """Return a run with one more event of the training process."""
    events = [*tables.events, {**_main_process(tables), "kind": kind, **fields}]
    return replace(tables, events=sorted(events, key=lambda event: event["time_ns"]))


def with_fields(event: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event with other fields; one that is None is missing."""
    return {name: value for name, value in {**event, **fields}.items() if name not in fields or value is not None}


def with_changed_event(tables: RunTables, kind: str, **fields: Any) -> RunTables:
    """Return a run whose events of one kind have other fields; a field that is None there is missing."""
    events = [with_fields(event, fields) if event["kind"] == kind else event for event in tables.events]
    return replace(tables, events=events)


def _main_process(tables: RunTables) -> Mapping[str, Any]:
    command = tables.manifest["command"]
    return {**command, "rank": None}


def until(tables: RunTables, time_ns: float) -> RunTables:
    """Return a run as it was at a time while its processes lived."""
    manifest = {**tables.manifest, "end_time_ns": None, "exit_status": None}
    command = tables.manifest["command"]
    return replace(
        tables,
        manifest=manifest,
        events=[event for event in tables.events if event["time_ns"] <= time_ns],
        streams={name: rows[rows["time_ns"] <= time_ns] for name, rows in tables.streams.items()},
        living=frozenset({(command["host"], command["pid"], command["start_ticks"])}),
        now_ns=int(time_ns),
        totals={},
    )


def at_last_step(tables: RunTables) -> RunTables:
    """Return a run as it was when its last step ended, with its processes alive."""
    return until(tables, float(tables.streams["step"]["time_ns"].iloc[-1]))


def rise(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return how far a gauge is above its first known value, row by row."""
    values = rows[column].astype(float)
    return values - values[values.first_valid_index()]


def at_times(times_ns: Any, rows: pd.DataFrame, column: str) -> npt.NDArray[np.float64]:
    """Return a gauge as it was at other times: the newest record then, or the first of all."""
    place = np.searchsorted(rows["time_ns"].to_numpy(), np.asarray(times_ns), side="right") - 1
    values: npt.NDArray[np.float64] = rows[column].to_numpy(dtype=float)[np.maximum(place, 0)]
    return values


def edit(
    run: Path,
    stream: str,
    change: Callable[[npt.NDArray[Any]], npt.NDArray[Any] | None],
    *,
    only: Path | None = None,
) -> None:
    """Change the records of one stream in the journals of an unpacked run.

    Args:
        run: its directory.
        stream: which one.
        change: gets the records of a process as an array with a field for each column, changes it in place or
            returns another one.
        only: the one journal to change.
    """
    for path in _segments(run, stream) if only is None else [only]:
        header, records = _read(path)
        result = change(records)
        _write(path, header, records if result is None else result)


def records_of(run: Path, stream: str) -> npt.NDArray[Any]:
    """Return the records of one stream of an unpacked run, in order of time."""
    found = np.concatenate([_read(path)[1] for path in _segments(run, stream)])
    return found[np.argsort(found["time_ns"], kind="stable")]


def add_process(
    run: Path,
    streams: Iterable[str],
    *,
    host: str | None = None,
    pid: int = 0,
    rank: int | None = None,
    change: Callable[[npt.NDArray[Any]], npt.NDArray[Any] | None] = lambda _: None,
) -> None:
    """Give another process the same records in some streams of an unpacked run, or what `change` makes of them.

    Args:
        run: its directory.
        streams: names.
        host: of the process, else the same one.
        pid: what is added to the number of the process that recorded them.
        rank: its rank.
        change: as of `edit`.
    """
    for stream in streams:
        for path in _segments(run, stream):
            header, records = _read(path)
            other = header | {"host": host or header["host"], "pid": header["pid"] + pid, "rank": rank}
            result = change(records)
            name = f"{other['host']}.{other['pid']}.{path.name.split('.', 2)[2]}"
            _write(path.with_name(name), other, records if result is None else result)


def remove(run: Path, stream: str, *, host: str = "*") -> None:
    """Remove the journals of one stream from an unpacked run, or those of one host."""
    for path in (run / "journal").glob(f"{host}.*.{stream}.*.journal"):
        path.unlink()


def add_event(run: Path, kind: str, *, host: str | None = None, rank: int | None = None, **fields: Any) -> None:
    """Add an event like the first of its kind in an unpacked run, with other fields, of another host or rank."""
    logs = sorted((run / "events").glob("*.jsonl"))
    events = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    like = next(event for event in events if event["kind"] == kind)
    event = {**like, "host": host or like["host"], "rank": rank, **fields}
    with (run / "events" / f"{event['host']}.{event['pid']}.jsonl").open("a") as log:
        log.write(json.dumps(event) + "\n")


def change_events(run: Path, kind: str, **fields: Any) -> None:
    """Give the events of one kind in an unpacked run other fields; one that is None is left out."""
    for path in (run / "events").glob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [json.dumps(with_fields(each, fields) if each["kind"] == kind else each) for each in events]
        path.write_text("".join(f"{line}\n" for line in lines))


def _segments(run: Path, stream: str) -> list[Path]:
    found = sorted((run / "journal").glob(f"*.{stream}.*.journal"))
    assert found, f"{run.name} has no journal of {stream}"
    return found


def _read(path: Path) -> tuple[dict[str, Any], npt.NDArray[Any]]:
    content = path.read_bytes()
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(content[len(MAGIC) : begin], "little")
    header = json.loads(content[begin:end])
    dtype = np.dtype([(name, _DTYPES.get(code, f"S{code[:-1]}")) for name, code in header["layout"]])
    count = (len(content) - end) // dtype.itemsize
    return header, np.frombuffer(content, dtype, count, end).copy()


def _write(path: Path, header: Mapping[str, Any], records: npt.NDArray[Any]) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(MAGIC + len(text).to_bytes(4, "little") + text + records.tobytes())
