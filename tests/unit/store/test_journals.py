"""Results of the journal reader on whole, torn, older, newer and damaged files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pytest

from collector.store.journals import arrow, segments
from collector.store.runs.run import Run
from training_harness.journal import MAGIC, EventLog, Identity, JournalWriter
from training_harness.records import MISSING, NAME, STEP, STREAMS, Stream

WRITER = Identity(host="node.example", pid=41, start_ticks=977, rank=3)


def write(directory: Path, stream: Stream, rows: list[tuple[float, ...]], **options) -> Path:
    writer = JournalWriter(directory, stream, WRITER, **options)
    for row in rows:
        writer.append(*row)
    writer.close()
    (path,) = directory.glob(f"node.example.41.{stream.name}.*.journal")
    return path


def step_rows(count: int) -> list[tuple[float, ...]]:
    names = [column.name for column in STEP.columns]
    return [
        tuple(2 if name == "unit" else 1000 * step + column for column, name in enumerate(names))
        for step in range(count)
    ]


def read_all(path: Path) -> pa.Table:
    header = segments.read_header(path)
    assert header is not None
    return arrow.read_records(path, header, 0)


def rewrite_header(path: Path, change) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[4:8], "little")
    body = json.loads(raw[8 : 8 + length])
    change(body)
    text = json.dumps(body).encode()
    path.write_bytes(MAGIC + len(text).to_bytes(4, "little") + text + raw[8 + length :])


@pytest.mark.parametrize("stream", STREAMS.values(), ids=lambda stream: stream.name)
def test_every_stream_reads_back_with_missing_values_as_null(tmp_path, stream):
    values = [f"stage {at}" if column.code == NAME else at + 1 for at, column in enumerate(stream.columns)]
    full = tuple(value.encode() if isinstance(value, str) else value for value in values)
    path = write(tmp_path, stream, [full, tuple(MISSING[column.code] for column in stream.columns)])

    first, second = read_all(path).to_pylist()

    identity = {"host": "node.example", "pid": 41, "start_ticks": 977, "rank": 3}
    assert first == {column.name: value for column, value in zip(stream.columns, values, strict=True)} | identity
    assert second == {column.name: None for column in stream.columns} | identity


def test_extreme_values_that_are_not_missing_survive(tmp_path):
    largest, smallest = 2**63 - 1, -(2**63) + 1
    path = write(tmp_path, STEP, [(largest, smallest, *[0] * 8, 2**31 - 1, 0, -(2**31) + 1, 2)])
    row = read_all(path).to_pylist()[0]
    assert (row["time_ns"], row["step"]) == (largest, smallest)
    assert (row["batches_count"], row["samples_count"]) == (2**31 - 1, -(2**31) + 1)


def test_zero_is_a_value_and_nan_is_missing(tmp_path):
    host = STREAMS["host"]
    row = [0.0 if column.code == "d" else 0 for column in host.columns]
    row[-1] = math.nan
    read = read_all(write(tmp_path, host, [tuple(row)])).to_pylist()[0]
    assert read["cpu_some_avg10_ratio"] == 0.0
    assert read[host.columns[-1].name] is None


def test_a_writer_outside_a_distributed_job_has_no_rank(tmp_path):
    writer = JournalWriter(tmp_path, STEP, Identity(host="h", pid=1, start_ticks=2))
    writer.append(*step_rows(1)[0])
    writer.close()
    (path,) = tmp_path.glob("h.1.step.*.journal")
    assert read_all(path)["rank"].to_pylist() == [None]


def test_torn_record_is_read_once_it_is_whole(tmp_path):
    path = write(tmp_path, STEP, step_rows(3))
    whole = path.read_bytes()
    for cut in range(1, STEP.struct.size + 1):
        path.write_bytes(whole[:-cut])
        assert read_all(path)["step"].to_pylist() == [1, 1001]
    path.write_bytes(whole)
    assert read_all(path)["step"].to_pylist() == [1, 1001, 2001]


def test_reading_in_pieces_gives_each_record_once(tmp_path):
    path = write(tmp_path, STEP, step_rows(7))
    header = segments.read_header(path)
    offset, steps = 0, []
    for stop in range(0, path.stat().st_size + 1, 37):
        piece = arrow.read_records(path, header, offset, stop)
        steps += piece["step"].to_pylist()
        offset = max(offset, header.header_bytes) + piece.num_rows * header.record_bytes
    steps += arrow.read_records(path, header, offset)["step"].to_pylist()
    assert steps == [1000 * step + 1 for step in range(7)]


def test_incomplete_header_is_read_as_none(tmp_path):
    path = write(tmp_path, STEP, step_rows(1))
    whole = path.read_bytes()
    header = segments.read_header(path)
    for length in range(header.header_bytes):
        path.write_bytes(whole[:length])
        assert segments.read_header(path) is None


def test_missing_column_is_null_and_unknown_column_is_ignored(tmp_path):
    columns = [column for column in STEP.columns if column.name != "h2d_ns"]
    other = Stream("step", "", (*columns, type(STEP.columns[0])("from_the_future_bytes", "q", "bytes", "")))
    path = write(tmp_path, other, [tuple(range(len(other.columns)))])
    table = read_all(path)
    assert table.schema == arrow.arrow_schema(STEP)
    row = table.to_pylist()[0]
    assert row["h2d_ns"] is None
    assert row["forward_ns"] == 4
    assert row["unit"] == len(columns) - 1


def spoil_magic(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])


def spoil_json(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[20] = 0xFF
    path.write_bytes(raw)


def spoil_length(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4:8] = b"\xff\xff\xff\xff"
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_magic, "begins with b'PK"),
        (spoil_json, "header is damaged"),
        (spoil_length, "4294967295 bytes"),
        (lambda path: rewrite_header(path, lambda body: body.update(version=2)), "upgrade Tidegauge"),
        (lambda path: rewrite_header(path, lambda body: body.update(stream="dreams")), "'dreams'"),
        (lambda path: rewrite_header(path, lambda body: body.pop("pid")), "pid"),
        (lambda path: rewrite_header(path, lambda body: body.update(pid=2**40)), "header is damaged"),
        (lambda path: rewrite_header(path, lambda body: body.update(record_bytes=8)), "record of 8 bytes"),
        (lambda path: rewrite_header(path, lambda body: body["layout"].__setitem__(1, ["step", "i"])), "'step'"),
        (lambda path: rewrite_header(path, lambda body: body["layout"].__setitem__(1, ["x", "Q"])), "'Q'"),
        (lambda path: rewrite_header(path, lambda body: body.update(layout=[], record_bytes=0)), "damaged"),
        (lambda path: (path.unlink(), path.mkdir()), "directory"),
    ],
)
def test_damaged_journal_is_a_one_line_error(tmp_path, spoil, said):
    path = write(tmp_path, STEP, step_rows(2))
    spoil(path)
    with pytest.raises(segments.JournalError) as caught:
        segments.read_header(path)
    message = str(caught.value)
    assert str(path) in message
    assert said in message
    assert "\n" not in message


def test_segments_are_listed_in_the_order_of_writing(tmp_path):
    run = Run(tmp_path)
    run.journal_dir.mkdir()
    writer = JournalWriter(run.journal_dir, STEP, WRITER, segment_bytes=1, segments_at_most=12)
    for row in step_rows(12):
        writer.append(*row)
    writer.close()
    steps = [read_all(path)["step"].to_pylist() for path in segments.list_segments(run)]
    assert steps == [[1000 * step + 1] for step in range(12)]


def test_a_run_without_journals_has_no_segments(tmp_path):
    assert segments.list_segments(Run(tmp_path)) == []
    assert segments.list_event_logs(Run(tmp_path)) == []


def test_events_keep_their_fields_and_a_torn_line_is_read_later(tmp_path):
    log = EventLog(tmp_path, WRITER)
    log.append("loader", loader=0, num_workers=4)
    log.append("process-exit", lost_count=0)
    path = tmp_path / "node.example.41.jsonl"
    whole = path.read_bytes()

    path.write_bytes(whole[:-1])
    first = segments.read_events(path, 0)
    path.write_bytes(whole)
    second = segments.read_events(path, first.end_bytes)

    (loader,), (end,) = first.rows, second.rows
    assert (loader["kind"], loader["host"], loader["rank"]) == ("loader", "node.example", 3)
    assert json.loads(loader["body"]) == {"loader": 0, "num_workers": 4}
    assert end["kind"] == "process-exit"
    assert second.end_bytes == len(whole)
    assert first.damaged_count == second.damaged_count == 0


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"\xff\xfe",
        b"[1, 2]",
        b"3",
        b'{"kind": "loader"}',
        b'{"time_ns": null, "kind": "x", "host": "h", "pid": 1, "start_ticks": 2, "rank": null}',
        b'{"time_ns": 99999999999999999999999, "kind": "x", "host": "h", "pid": 1, "start_ticks": 2, "rank": null}',
        b'{"time_ns": 1, "kind": "\\ud800", "host": "h", "pid": 1, "start_ticks": 2, "rank": null}',
        b'{"time_ns": "1", "kind": "x", "host": "h", "pid": 1, "start_ticks": 2, "rank": null}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_skipped_and_counted(tmp_path, line):
    log = EventLog(tmp_path, WRITER)
    log.append("loader", loader=0)
    path = tmp_path / "node.example.41.jsonl"
    with path.open("ab") as file:
        file.write(line + b"\n")
    log.append("epoch-start", epoch=0)
    lines = segments.read_events(path, 0)
    assert [row["kind"] for row in lines.rows] == ["loader", "epoch-start"]
    assert lines.damaged_count == 1


def test_the_last_report_of_a_loss_counts(tmp_path):
    log = EventLog(tmp_path, WRITER)
    log.append("records-lost", stream="step", count=2)
    log.append("records-lost", stream="step", count=5)
    log.append("records-lost", stream="batch", count=1)
    log.append("loader", loader=0)
    rows = segments.read_events(tmp_path / "node.example.41.jsonl", 0).rows
    assert sorted(segments.reported_losses(rows).values()) == [1, 5]
