"""Snapshots of a training on the GPU, requested while it runs."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from collector.store.allocator_snapshots import newest_allocator_snapshot
from tests.cuda_sim.conftest import PROGRAMS, Watched

HISTORY = 200
SNAPSHOT = f"{sys.executable} -P -m collector snapshot {{run}}"
STEPS_OF_PROFILE = 5
#: Requests, made one after the other; each has its name in the answer.
COMMANDS = {
    "allocator": SNAPSHOT,
    "census": f"{SNAPSHOT} --kind census",
    "profile": f"{SNAPSHOT} --kind profile --steps {STEPS_OF_PROFILE}",
    "growth": f"{SNAPSHOT} --kind growth --steps 40",
}
#: Bytes that the program keeps of each step.
PIECE = 16 << 10
#: Bytes of its parameters.
MODEL = (256 * 256 * 4, 256 * 4)


@dataclass(frozen=True)
class SnapshotTraining:
    """A training that was asked for snapshots.

    Attributes:
        said: what it wrote: `outputs` of the commands, and for each step the bytes that PyTorch reports as
            allocated and reserved when it ends, and how many tensors it keeps.
        answers: what -> the event of the snapshot.
    """

    run: Watched
    said: dict[str, Any]
    answers: dict[str, dict[str, Any]]

    def document(self, what: str) -> dict[str, Any]:
        return json.loads(gzip.decompress((self.run.run.path / self.answers[what]["path"]).read_bytes()))

    def at(self, what: str) -> tuple[int, int, int]:
        """Return what the training wrote when the step ended in which it answered."""
        return tuple(self.said["steps"][self.answers[what]["step"]])

    def output(self, what: str) -> str:
        return self.said["outputs"][list(COMMANDS).index(what)]


@pytest.fixture(scope="module")
def train():
    """Runs the program once for each set of options."""
    found = {}

    def start(watched, tmp_path, *options) -> SnapshotTraining:
        if options not in found:
            run = watched("asking.py", str(tmp_path / "said"), *COMMANDS.values(), options=options, memory="1G")
            assert run.done.returncode == 0, run.done.stderr
            said, answers = json.loads((tmp_path / "said").read_text()), {}
            for path in run.run.path.glob("events/*.jsonl"):
                for event in map(json.loads, path.read_text().splitlines()):
                    if event["kind"] == "snapshot":
                        answers[event["what"]] = event
            assert answers.keys() == COMMANDS.keys(), said["outputs"]
            found[options] = SnapshotTraining(run, said, answers)
        return found[options]

    return start


@pytest.fixture
def training(train, watched, tmp_path) -> SnapshotTraining:
    return train(watched, tmp_path, "--memory-history", str(HISTORY))


def line_of(text: str) -> int:
    lines = (PROGRAMS / "asking.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def in_use(document: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = (block for segment in document["segments"] for block in segment["blocks"])
    return [block for block in blocks if block["state"] == "active_allocated"]


def test_snapshot_bytes_equal_pytorchs_statistics(training):
    allocated, reserved, _ = training.at("allocator")
    allocator = training.document("allocator")
    assert sum(segment["total_size"] for segment in allocator["segments"]) == reserved
    assert sum(block["size"] for block in in_use(allocator)) == allocated
    assert 0 < sum(map(len, allocator["device_traces"])) <= HISTORY
    whole = pickle.loads((training.run.run.path / training.answers["allocator"]["pickle"]).read_bytes())
    assert sum(segment["total_size"] for segment in whole["segments"]) == reserved


def test_snapshot_names_the_allocation_site_of_each_block(training):
    """Autograd's own thread has no line: it makes the two gradients and a workspace of cuBLAS."""
    allocated, _, kept = training.at("allocator")
    nameless = [block["size"] for block in in_use(training.document("allocator")) if "stack" not in block]
    sites = newest_allocator_snapshot(training.run.run).sites.set_index("site")
    assert sites["allocated_bytes"].sum() == allocated - sum(nameless)
    assert sorted(nameless)[:-1] == sorted(MODEL)
    assert len(nameless) == 3
    [site] = [each for each in sites.index if f"asking.py:{line_of('# KEPT')} " in each]
    assert sites.loc[site, ["blocks_count", "allocated_bytes"]].tolist() == [kept, kept * PIECE]
    [site] = [each for each in sites.index if f"asking.py:{line_of('# MODEL')} " in each]
    assert sites.loc[site, "allocated_bytes"] == sum(MODEL)


def test_snapshot_without_history_has_bytes_but_no_sites(train, watched, tmp_path):
    training = train(watched, tmp_path)
    allocated, reserved, _ = training.at("allocator")
    snapshot = newest_allocator_snapshot(training.run.run)
    assert snapshot.segments["total_bytes"].sum() == reserved
    assert snapshot.segments["allocated_bytes"].sum() == allocated
    assert snapshot.sites.empty
    assert "pickle" not in training.answers["allocator"]


def test_snapshots_do_not_change_the_training(training):
    """Each step keeps one tensor more, and nothing else: before, between and after the answers."""
    steps = training.said["steps"]
    last = max(answer["step"] for answer in training.answers.values())
    assert len(steps) - last > 50
    assert [kept for _, _, kept in steps] == list(range(1, len(steps) + 1))
    assert {after[0] - before[0] for before, after in itertools.pairwise(steps[1:])} == {PIECE}
    assert len(training.run.table("step")) == len(steps)
    assert training.run.failed_hooks == []


def test_census_counts_the_tensors_of_the_gpu(training):
    _, _, kept = training.at("census")
    (row,) = [row for row in training.document("census")["rows"] if row["shape"] == [PIECE]]
    assert (row["device"], row["tensors_count"], row["storage_bytes"]) == ("cuda:0", kept, kept * PIECE)


def test_profile_has_the_gpu_bytes_of_each_operator(training):
    profile = training.document("profile")
    assert profile["steps_count"] == STEPS_OF_PROFILE
    empty = next(each for each in profile["operators"] if each["operator"] == "aten::empty")
    assert empty["calls_count"] >= STEPS_OF_PROFILE
    assert empty["device_bytes"] >= STEPS_OF_PROFILE * PIECE
    assert gzip.decompress((training.run.run.path / training.answers["profile"]["trace"]).read_bytes())


def test_growth_names_the_line_that_keeps_gpu_tensors(training):
    output = training.output("growth")
    line = re.search(rf"\+([\d.]+) KiB .*asking\.py:{line_of('# KEPT')}: (\d+) more tensors", output)
    assert line, output
    assert float(line[1]) * 1024 == PIECE * int(line[2])
    assert training.document("growth")["held_grown_bytes"]["cuda:0"] == int(line[2]) * PIECE
