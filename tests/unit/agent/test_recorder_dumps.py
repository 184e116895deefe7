"""Dumps of the Flight Recorder are found by the environment of the training, and read once each."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from collector.agent.recorder_dumps import RecorderDumps, prefixes
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.programs import read_environ
from tests.conftest import wait_for
from training_harness.journal import start_ticks

RECORDED = Path(__file__).parents[2] / "data" / "flight_recorder"


@pytest.fixture
def training(tmp_path):
    """Start a process whose environment says where it writes dumps; it is rank 0."""
    environ = {**os.environ, "RANK": "0", "TORCH_FR_DUMP_TEMP_FILE": "traces/rank_"}
    (tmp_path / "traces").mkdir()
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path, env=environ) as process:
        wait_for(lambda: "RANK" in (read_environ("/proc", process.pid) or {}), "its environment")
        yield LocalProcess(process.pid, start_ticks(process.pid))
        process.kill()


@pytest.fixture
def dumps(training):
    found = RecorderDumps()
    found.note([training])
    return found


def write(folder, rank, contents=b"no dump", *, seconds=0.0):
    """Write a dump of a rank, last changed that many seconds from now."""
    path = folder / "traces" / f"rank_{rank}"
    path.write_bytes(contents)
    os.utime(path, (time.time() + seconds,) * 2)
    return path


def read(dumps):
    return {fields["path"]: fields for fields in dumps.read_new(30)}


def test_a_dump_is_read_once_and_again_when_it_has_changed(dumps, tmp_path):
    path = write(tmp_path, 0)
    (fields,) = read(dumps).values()
    assert (fields["path"], fields["of_rank"]) == (str(path), 0)
    assert read(dumps) == {}
    write(tmp_path, 0, b"another", seconds=1)
    assert list(read(dumps)) == [str(path)]


def test_dumps_of_ranks_of_other_nodes_on_a_shared_file_system_are_read_after_the_own_ones(dumps, tmp_path):
    paths = [str(write(tmp_path, rank)) for rank in (0, *range(10, 30))]
    first, rest = list(read(dumps)), list(read(dumps))
    assert first[0] == paths[0]
    assert sorted(first + rest) == paths


def test_files_from_before_the_training_and_other_things_are_ignored(dumps, tmp_path):
    write(tmp_path, 0, seconds=-3600)
    write(tmp_path, "0.new")
    os.mkfifo(tmp_path / "traces" / "rank_1")
    (tmp_path / "traces" / "rank_2").symlink_to(write(tmp_path, "copy"))
    (tmp_path / "traces" / "rank_3").mkdir()
    assert read(dumps) == {}


def test_a_dump_that_holds_collectives_of_an_earlier_training_is_not_used(dumps, tmp_path):
    write(tmp_path, 0, (RECORDED / "missing_0").read_bytes())
    (fields,) = read(dumps).values()
    assert fields["groups"] == []
    assert "before this one" in fields["error"]


def test_a_file_that_is_too_large_or_no_dump_has_a_reason(dumps, tmp_path):
    large = write(tmp_path, 0, b"\0" * ((8 << 20) + 1))
    other = write(tmp_path, 1)
    found = read(dumps)
    assert "larger than 8 MiB" in found[str(large)]["error"]
    assert "no whole pickle" in found[str(other)]["error"]


def test_without_a_training_nothing_is_looked_for():
    assert RecorderDumps().read_new(30) == []


def test_prefixes_are_those_of_the_environment_else_those_of_torch():
    home = {"HOME": "/home/ann"}
    assert prefixes({**home, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/data/old_"}) == ["/data/old_"]
    assert prefixes({**home, "XDG_CACHE_HOME": "/cache"}) == [
        "/cache/torch/comm_lib_trace_rank_",
        "/home/ann/.cache/torch/comm_lib_trace_rank_",
        "/tmp/nccl_trace_rank_",
    ]
    assert prefixes({})[0] == "/tmp/.cache/torch/comm_lib_trace_rank_"
