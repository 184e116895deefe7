"""Any bytes in a journal or an event log give a table, nothing yet, or a one-line error."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from collector.store.journals import arrow, segments
from training_harness.journal import MAGIC, EventLog, Identity, JournalWriter
from training_harness.records import STEP, STREAMS

NAME = "h.4.step.1.journal"
EVENT = {"time_ns": 1, "kind": "x", "host": "h", "pid": 1, "start_ticks": 2, "rank": None}
FUZZ = settings(max_examples=50, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.sampled_from([0, -1, 2**31, 2**62, 2**63, -(2**63) - 1, 10**400, float("inf"), float("nan")])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | NUMBERS
    | st.text()
    | st.sampled_from(["\ud800", "\0", "step", "q"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CODES = st.sampled_from([*"qihbds", "n", "Q", "9q"])
LAYOUTS = st.lists(st.tuples(st.sampled_from(["time_ns", "step", "rank", "host", "", "\ud800"]), CODES), max_size=9)


def segment(directory: Path) -> Path:
    writer = JournalWriter(directory, STEP, Identity(host="h", pid=4, start_ticks=5, rank=1))
    for step in range(5):
        writer.append(*range(step, step + len(STEP.columns)))
    writer.close()
    return next(directory.glob("*.journal"))


def header(body: object, records: bytes = b"x" * 200) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + records


def good_header(**changes: object) -> dict[str, object]:
    body = {"version": 1, "stream": "step", "layout": STEP.layout, "record_bytes": STEP.struct.size}
    who = {"host": "h", "pid": 4, "start_ticks": 5, "rank": 1, "lost_before_count": 0}
    return {**body, **who, **changes}


def read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found = segments.read_header(path)
        if found is None:
            return
        table = arrow.read_records(path, found, 0)
    except segments.JournalError:
        return
    table.validate(full=True)
    assert table.schema == arrow.arrow_schema(STREAMS[found.stream])
    assert table.nbytes < 300 * len(content) + 10_000


@FUZZ
@given(content=st.binary(max_size=300), behind_magic=st.booleans())
def test_any_bytes_are_read_or_reported(tmp_path, content, behind_magic):
    read(tmp_path / NAME, header(content) if behind_magic else content)


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=5), cut=st.integers(0, 4000))
def test_changed_and_cut_segment_is_read_or_reported(tmp_path, changes, cut):
    for path in tmp_path.iterdir():  # those of the example before
        path.unlink()
    whole = bytearray(segment(tmp_path).read_bytes())
    for at, value in changes:
        whole[at % len(whole)] = value
    read(tmp_path / NAME, bytes(whole[:cut]))


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(list(good_header())), VALUES, max_size=3))
def test_any_header_value_is_read_or_reported(tmp_path, changes):
    read(tmp_path / NAME, header(good_header(**changes)))


@FUZZ
@given(layout=LAYOUTS, fits=st.booleans(), claimed=NUMBERS)
def test_any_layout_is_read_or_reported(tmp_path, layout, fits, claimed):
    try:
        size = struct.calcsize("<" + "".join(code for _, code in layout)) if fits else claimed
    except struct.error:
        size = claimed
    read(tmp_path / NAME, header(good_header(layout=layout, record_bytes=size)))


@pytest.mark.parametrize(
    "body",
    [
        good_header(record_bytes=2**62),
        good_header(record_bytes=-1),
        good_header(record_bytes=float("inf")),
        good_header(lost_before_count=2**70),
        good_header(host="h" * 100_000),
        good_header(host="\ud800"),
        good_header(stream="batch"),
        good_header(version="9" * 100_000),
        b"[" * 200_000,
        b'{"pid": ' + b"9" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body)[-30:],
)
def test_impossible_header_is_a_short_one_line_error(tmp_path, body):
    path = tmp_path / NAME
    path.write_bytes(header(body))
    with pytest.raises(segments.JournalError, match="is skipped") as caught:
        segments.read_header(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@FUZZ
@given(
    changes=st.lists(st.dictionaries(st.sampled_from([*EVENT, "stream", "count"]), VALUES, max_size=4), max_size=3),
    kind=st.sampled_from(["x", "records-lost"]),
    rubbish=st.binary(max_size=100),
)
def test_good_event_after_any_others_is_read(tmp_path, changes, kind, rubbish):
    lines = [*(json.dumps({**EVENT, "kind": kind, **change}).encode() for change in changes), rubbish]
    path = tmp_path / "h.1.jsonl"
    path.write_bytes(b"\n".join([*lines, json.dumps({**EVENT, "kind": "good"}).encode(), b""]))
    found = segments.read_events(path, 0)
    table = arrow.tabulate_events(found.rows)
    table.validate(full=True)
    assert table["kind"].to_pylist()[-1] == "good"
    assert found.end_bytes == path.stat().st_size
    for body in table["body"].to_pylist():
        assert isinstance(json.loads(body), dict)
    assert all(count < 2**63 for count in segments.reported_losses(found.rows).values())


def test_files_of_other_kinds_are_skipped_in_little_memory(tmp_path):
    for suffix in (".step.1.journal", ".jsonl"):
        (tmp_path / f"h.1{suffix}").mkdir()
        os.mkfifo(tmp_path / f"h.2{suffix}")
        (tmp_path / f"h.3{suffix}").symlink_to("/dev/zero")
        with (tmp_path / f"h.4{suffix}").open("wb") as file:
            file.truncate(2**40)
    code = (
        "import resource, sys; from pathlib import Path; from collector.store.journals import segments\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, -1))\n"
        "for path in Path(sys.argv[1]).iterdir():\n"
        "    try: segments.read_header(path) if path.suffix == '.journal' else segments.read_events(path, 0)\n"
        "    except segments.JournalError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert all("is skipped" in line for line in done.stdout.splitlines())
    assert done.stdout.count("\n") == 8


def test_long_event_log_is_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_EVENTS_AT_ONCE_BYTES", 1000)
    log = EventLog(tmp_path, Identity(host="h", pid=1, start_ticks=2))
    for epoch in range(50):
        log.append("epoch-start", epoch=epoch)
    epochs, end = [], 0
    while end < (tmp_path / "h.1.jsonl").stat().st_size:
        lines = segments.read_events(tmp_path / "h.1.jsonl", end)
        end = lines.end_bytes
        epochs += [json.loads(row["body"])["epoch"] for row in lines.rows]
    assert epochs == list(range(50))
