"""Snapshots of a training on the GPU, asked for while it runs."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import sys

from tests.cuda_sim.conftest import PROGRAMS

HISTORY = 200
SNAPSHOT = f"{sys.executable} -P -m collector snapshot {{run}}"
COMMANDS = (SNAPSHOT, f"{SNAPSHOT} --kind census", f"{SNAPSHOT} --kind growth --steps 40")


def test_a_running_training_tells_what_it_holds(watched, tmp_path):
    run = watched(
        "asking.py", str(tmp_path / "said"), *COMMANDS, options=("--memory-history", str(HISTORY)), memory="1G"
    )
    assert run.done.returncode == 0, run.done.stderr
    said = json.loads((tmp_path / "said").read_text())
    answers = {}
    for path in run.run.path.glob("events/*.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["kind"] == "snapshot":
                answers[event["what"]] = event
    assert answers.keys() == {"allocator", "census", "growth"}, said["outputs"]

    def document(what):
        return json.loads(gzip.decompress((run.run.path / answers[what]["path"]).read_bytes()))

    def at(what):
        """Return what the training wrote when the step ended in which it answered."""
        return said["steps"][answers[what]["step"]]

    allocated, reserved, _ = at("allocator")
    allocator = document("allocator")
    blocks = [block for segment in allocator["segments"] for block in segment["blocks"]]
    assert sum(segment["total_size"] for segment in allocator["segments"]) == reserved
    assert sum(block["size"] for block in blocks if block["state"] == "active_allocated") == allocated
    assert 0 < sum(map(len, allocator["device_traces"])) <= HISTORY
    assert any(file.endswith("asking.py") for file, _, _ in allocator["frames"]), "the lines that allocated"
    whole = pickle.loads((run.run.path / answers["allocator"]["pickle"]).read_bytes())
    assert sum(segment["total_size"] for segment in whole["segments"]) == reserved

    _, _, kept = at("census")
    (row,) = [row for row in document("census")["rows"] if row["shape"] == [16 << 10]]
    assert (row["device"], row["tensors_count"], row["storage_bytes"]) == ("cuda:0", kept, kept * (16 << 10))

    lines = (PROGRAMS / "asking.py").read_text().splitlines()
    keeps = next(number for number, line in enumerate(lines, 1) if "# KEPT" in line)
    told = re.search(rf"\+([\d.]+) KiB .*asking\.py:{keeps}: (\d+) more tensors", said["outputs"][2])
    assert told, said["outputs"][2]
    assert float(told[1]) == 16 * int(told[2])
    assert document("growth")["held_grown_bytes"]["cuda:0"] == int(told[2]) * (16 << 10)
