"""Read what a tool said of a run: `python reading.py TOOL FOLDER` in the tool's environment prints it as JSON.

The text is the output of the run, and the report that a command of the tool prints. The series are those that it
stored, each a list of (seconds, value). A row of a table that it prints is a series of one value.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[float, float]]]
_REPOSITORY = Path(__file__).resolve().parents[2]
#: Events of Stormlog's tracker that report a risk.
_ALERTS = ("warning", "critical", "error")
#: Terminal colours and cursor moves.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_SIZE = re.compile(r"([\d.]+)\s*([KMGT]?i?B)")
_MIB = {"B": 2**-20, "KB": 2**-10, "KiB": 2**-10, "MB": 1.0, "MiB": 1.0, "GB": 1024.0, "GiB": 1024.0}


def report(command: str, *arguments: str) -> str:
    """The output of a command of the tool."""
    words = [str(Path(sys.executable).with_name(command)), *arguments]
    environ = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, env=environ)
    return done.stdout + done.stderr


def stormlog(folder: Path) -> tuple[str, Series]:
    """Its tracker keeps the memory of its process, and alerts; `gpumemprof analyze` judges it."""
    events = json.loads((folder / "events.json").read_text())
    samples = [event for event in events if event["event_type"] == "sample"]
    alerts = [f"{each['event_type']}: {each['context']}" for each in events if each["event_type"] in _ALERTS]
    name = "allocated on the GPU" if os.environ["SIGHT_DEVICE"] == "cuda" else "RSS of the training process"
    used = [(event["timestamp_ns"] / 1e9, float(event["device_used_bytes"])) for event in samples]
    analysis = report("gpumemprof", "analyze", str(folder / "events.json"))
    return "\n".join([*alerts, analysis]), {name: used}


def wandb(folder: Path) -> tuple[str, Series]:
    series: Series = defaultdict(list)
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    begin = None
    for content in _log_records(path.read_bytes()):
        record = records.Record.FromString(content)
        if record.HasField("stats"):
            seconds = record.stats.timestamp.seconds + record.stats.timestamp.nanos / 1e9
            begin = begin or seconds
            for item in record.stats.item:
                with contextlib.suppress(ValueError):
                    series[f"system.{item.key}"].append((seconds - begin, float(item.value_json)))
        for item in record.history.item:
            if (item.key or ".".join(item.nested_key)) == "loss":
                series["loss"].append((0.0, float(item.value_json)))
    return "", series


def _log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after W&B's header of 7 bytes."""
    position, parts = 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _checksum, size, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + size])
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


def mlflow(folder: Path) -> tuple[str, Series]:
    series: Series = defaultdict(list)
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        for key, milliseconds, value in database.execute("SELECT key, timestamp, value FROM metrics ORDER BY 2"):
            series[key].append((milliseconds / 1e3, value))
    return "", series


def trackio(folder: Path) -> tuple[str, Series]:
    series: Series = defaultdict(list)
    text = []
    for path in folder.glob("trackio/*.db"):
        with contextlib.closing(sqlite3.connect(path)) as database:
            for table in ("metrics", "system_metrics"):
                rows = database.execute(f"SELECT julianday(timestamp) * 86400, metrics FROM {table} ORDER BY 1")
                for seconds, metrics in rows:
                    for key, value in json.loads(metrics).items():
                        if isinstance(value, int | float):
                            series[key].append((seconds, value))
            text += [" ".join(map(str, row)) for row in database.execute("SELECT level, title, text FROM alerts")]
    return "\n".join(text), series


def aim(folder: Path) -> tuple[str, Series]:
    """Its index of a run is made by its server, or on request."""
    series: Series = {}
    report("aim", "storage", "--repo", str(folder), "reindex", "-y")
    for run in importlib.import_module("aim").Repo(str(folder)).iter_runs():
        for metric in run.metrics():
            _steps, (values, _epochs, seconds) = metric.data.numpy()
            series[metric.name] = [(float(at), float(value)) for at, value in zip(seconds, values, strict=True)]
    return "", series


def tensorboard(folder: Path) -> tuple[str, Series]:
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return "", {
        tag: [(event.wall_time, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def memray(folder: Path) -> tuple[str, Series]:
    """Its `summary` of each process: the functions that held most at the peak, in MiB (`own memory`)."""
    text, series = [], {}
    for path in sorted(folder.glob("allocations.bin*")):
        process = "training process" if path.suffix == ".bin" else "worker"
        summary = report("memray", "summary", "--sort-column", "4", "--max-rows", "6", str(path))
        text += [f"{process} ({path.name}):", summary]
        for row in summary.splitlines():
            cells = [cell.strip() for cell in re.split("[│┃]", row)[1:-1]]
            if len(cells) == 6 and (own := _SIZE.fullmatch(cells[3])):
                series[f"{process}: {cells[0]}"] = [(0.0, float(own[1]) * _MIB[own[2]])]
    return "\n".join(text), series


def profiler(folder: Path) -> tuple[str, Series]:
    """Its table; the rows are (share of the CPU time in %, own memory in MiB)."""
    series: Series = {}
    for name, (share, memory) in json.loads((folder / "rows.json").read_text()).items():
        series[f"{name}: time"], series[f"{name}: memory"] = [(0.0, share)], [(0.0, memory)]
    return (folder / "table.txt").read_text(), series


def pyspy(folder: Path) -> tuple[str, Series]:
    return (folder / "dump").read_text(), {}


def output_only(_folder: Path) -> tuple[str, Series]:
    """Nothing more: the tool prints its summary at the end."""
    return "", {}


READERS: dict[str, Any] = {
    "tidegauge": output_only,
    "alone": output_only,
    "traceml": output_only,
    "traceml-unedited": output_only,
    "py-spy": pyspy,
    "torch.profiler": profiler,
    **{reader.__name__: reader for reader in (stormlog, wandb, mlflow, trackio, aim, tensorboard, memray)},
}


def said(tool: str, folder: Path) -> dict[str, Any]:
    """Return the text and the series of a tool; the text says if its files can't be read."""
    try:
        text, series = READERS[tool](folder)
    except Exception as error:  # noqa: BLE001 - a killed tool leaves files of any state
        text, series = f"(nothing to read: {type(error).__name__}: {error})", {}
    text = (folder / "output").read_text(errors="replace") + text
    text = _CONTROLS.sub("", text).replace(str(folder), "…").replace(f"{_REPOSITORY}/", "")
    return {
        "text": text,
        "series": {name.replace(f"{_REPOSITORY}/", ""): points for name, points in series.items() if points},
    }


if __name__ == "__main__":
    print(json.dumps(said(sys.argv[1], Path(sys.argv[2]))))
