"""Export of a run: the files hold all that a reader sees, in order, or there are none."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from store_helpers import Writer, journalled, make_run

from collector.errors import TidegaugeError
from collector.store import export_run as export
from collector.store.lake.ingest import Ingester
from collector.store.redaction import VOCABULARY
from tests.conftest import bare_environment, tidegauge
from training_harness.events import EVENTS
from training_harness.records import IDENTITY, STREAMS

TIDEGAUGE = (sys.executable, "-P", "-m", "collector")
READERS = {"parquet": pd.read_parquet, "csv": pd.read_csv}


def ingest(run):
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()


@pytest.fixture
def run(tmp_path):
    """A run of two writers, partly in the lake, which goes on."""
    made = make_run(tmp_path / "home")
    writers = [Writer(made, pid) for pid in (11, 12)]
    for writer in writers:
        writer.write(120)
    ingest(made)
    for writer in writers:
        writer.write(30)
    return made


def sorted_rows(frame):
    return sorted(
        (tuple(None if value != value else value for value in row) for row in frame.itertuples(index=False)),
        key=repr,
    )


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_exported_files_hold_lake_and_journals_in_order_of_time(run, tmp_path, form):
    target = tmp_path / "deep" / "exported"
    done = export(run, target, form)
    names = [f"step.{form}", f"batch.{form}", f"event.{form}", "schema.json", "run.json"]
    assert [file.name for file in done.files] == names
    assert sorted(path.name for path in target.iterdir()) == sorted(names)
    assert [file.rows_count for file in done.files] == [300, 300, 4, None, None]
    assert [file.size_bytes for file in done.files] == [(target / name).stat().st_size for name in names]
    assert done.problems == ()
    for stream in ("step", "batch"):
        frame = READERS[form](target / f"{stream}.{form}")
        assert frame["time_ns"].is_monotonic_increasing
        assert sorted_rows(frame) == journalled(run)[stream]
    events = READERS[form](target / f"event.{form}")
    assert sorted(json.loads(body)["epoch"] for body in events["body"]) == [0, 0, 1, 1]


def test_schema_has_unit_and_meaning_of_every_column(run, tmp_path):
    export(run, tmp_path / "out", "parquet")
    schema = json.loads((tmp_path / "out" / "schema.json").read_text())
    assert set(schema["tables"]) == {"step", "batch", "event"}
    assert schema["tables"]["step"]["one_per"] == STREAMS["step"].one_per
    for table, description in schema["tables"].items():
        assert set(description["columns"]) == set(pd.read_parquet(tmp_path / "out" / f"{table}.parquet"))
        assert all(column["unit"] and column["meaning"] for column in description["columns"].values())
    assert list(schema["tables"]["batch"]["columns"]) == [
        column.name for column in (*STREAMS["batch"].columns, *IDENTITY)
    ]
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == run.manifest


def test_export_reports_unreadable_journals(run, tmp_path):
    (run.journal_dir / "training-node.9.step.1.journal").write_bytes(b"no journal")
    [problem] = export(run, tmp_path / "out", "parquet").problems
    assert "training-node.9.step.1.journal is skipped" in problem
    assert len(pd.read_parquet(tmp_path / "out" / "step.parquet")) == 300


def test_export_refuses_a_folder_that_is_not_empty(run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(TidegaugeError, match=r"is not empty, it holds .*: name a new or an empty folder"):
        export(run, tmp_path, "parquet")
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "home"}


def test_an_unknown_format_makes_no_folder(run, tmp_path):
    with pytest.raises(TidegaugeError, match="no format 'xlsx'; this version writes parquet and csv"):
        export(run, tmp_path / "out", "xlsx")
    assert not (tmp_path / "out").exists()


def test_export_error_names_a_folder_that_cannot_be_made(run):
    with pytest.raises(TidegaugeError, match=r"cannot export to /proc/out \(.*\): name a folder"):
        export(run, Path("/proc/out"), "parquet")


@pytest.mark.parametrize("form", ["parquet", "csv"])
@pytest.mark.parametrize("made_before", [True, False])
def test_export_to_a_full_disk_leaves_no_file(run, tmp_path, form, made_before):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs can't be mounted here (needs root)")
    target = disk / "out"
    try:
        if made_before:
            target.mkdir()
        with pytest.raises(TidegaugeError, match=r"cannot export to .*/out \(No space left on device\)"):
            export(run, target, form)
        assert list(disk.rglob("*")) == ([target] if made_before else [])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_export_error_names_a_damaged_lake(run, tmp_path):
    next(run.data_dir.rglob("batch/*.parquet")).unlink()
    with pytest.raises(TidegaugeError, match=rf"{run.data_dir} is damaged"):
        export(run, tmp_path / "out", "parquet")
    assert not (tmp_path / "out").exists()


SECRETIVE = """
import torch
from torch.utils.data import DataLoader, Dataset

class Confidential(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.zeros(4)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Confidential(), batch_size=8, num_workers=1):
    model(batch).sum().backward()
    optimizer.step()
raise ValueError("the customer is Acme")
"""


def test_redacted_export_has_the_numbers_of_a_real_run_and_none_of_its_texts(tmp_path):
    folder = tmp_path / "acme-project"
    folder.mkdir()
    (folder / "forecast.py").write_text(SECRETIVE)
    home = tmp_path / "home"
    command = [sys.executable, "forecast.py", "--customer", "Acme"]
    done = subprocess.run(
        [*TIDEGAUGE, "run", "--home", str(home), "--name", "acme", "--tag", "customer=Acme", "--", *command],
        cwd=folder,
        env=bare_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    for options in ([], ["--redact"]):
        written = tidegauge(
            home, "export", "--to", str(tmp_path / f"out{len(options)}"), "--format", "csv", *options
        )
        assert written.returncode == 0, written.stderr
    plain, redacted = tmp_path / "out0", tmp_path / "out1"
    texts = {path.name: path.read_text() for path in redacted.iterdir()}
    assert texts.keys() == {path.name for path in plain.iterdir()}
    secrets = re.compile(rf"acme|forecast|confidential|customer|{tmp_path}|{sys.executable}", re.IGNORECASE)
    assert {name: secrets.findall(text) for name, text in texts.items()} == {name: [] for name in texts}
    host = re.compile(rf"\b{socket.gethostname()}\b")
    assert {name: host.findall(text) for name, text in texts.items()} == {name: [] for name in texts}
    for name in texts.keys() - {"run.json", "schema.json", "event.csv"}:
        before, after = (pd.read_csv(directory / name) for directory in (plain, redacted))
        numbers = before.select_dtypes("number").columns
        pd.testing.assert_frame_equal(before[numbers], after[numbers])
        assert set(after["host"]) == {"host-1"}
    kinds, bodies = (pd.read_csv(redacted / "event.csv")[column] for column in ("kind", "body"))
    assert list(kinds) == list(pd.read_csv(plain / "event.csv")["kind"])
    started = next(json.loads(body) for kind, body in zip(kinds, bodies, strict=True) if kind == "process-start")
    assert started["torch"] == torch.__version__
    assert started["capabilities"]
    assert json.loads(texts["run.json"])["exit_status"] == 1


def test_vocabulary_of_redaction_names_declared_fields():
    fields = {field.name for event in EVENTS.values() for field in event.fields}
    of_manifest = {"environment", "store"}
    nested = {"kind", "operation", "role"}
    assert fields | of_manifest | nested >= VOCABULARY
