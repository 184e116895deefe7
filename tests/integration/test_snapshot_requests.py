"""`tidegauge snapshot` against real trainings: every rank answers, and the training never notices."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from collector.agent.live.outlets import Investigator
from collector.agent.live.snapshot_request import take
from collector.diagnosis.memory.allocation_sites import add_allocation_sites
from collector.diagnosis.run.tables import load_tables
from collector.errors import TidegaugeError
from collector.findings import Evidence, Finding, Locus, as_json, from_json
from collector.store.runs.run import Run
from tests.conftest import wait_for
from training_harness import layout

SCRIPT = Path(__file__).parents[1] / "scripts" / "asked.py"
SHIM = Path(layout.__file__).parent / "bootstrap"
TAKEN = re.compile(r"rank (\d) \(pid \d+\), step \d+, the training waited .*: (.*)")


def read_gzip_json(path: str):
    with gzip.open(path) as stream:
        return json.load(stream)


def evidence(name: str) -> Evidence:
    return Evidence(name=name, value=2**30, unit="bytes", n=100, window="0-100 s")


def answers(run: Run, request: str) -> list[dict]:
    lines = [line for path in run.events_dir.iterdir() for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event.get("request") == request]


def losses_of(count: int) -> list[str]:
    """Return the script's losses without Tidegauge."""
    spec = importlib.util.spec_from_file_location("asked", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return [f"{loss:.17g}" for loss in itertools.islice(script.steps(), count)]


def test_every_rank_answers_and_its_training_does_not_change(home, tmp_path):
    run = Run(layout.create_run(home, name="asked", argv=["asked.py"]))
    stop = tmp_path / "stop"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGAUGE")}
    environ |= {layout.RUN_DIR_VARIABLE: str(run.path), "PYTHONPATH": str(SHIM), "PYTHONUNBUFFERED": "1"}
    outputs = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = []
    for rank, output in enumerate(outputs):
        with output.open("w") as stdout:
            ranks.append(
                subprocess.Popen([sys.executable, SCRIPT, stop], env=environ | {"RANK": str(rank)}, stdout=stdout)
            )

    def all_have_begun():
        assert [rank.poll() for rank in ranks] == [None, None]
        return all(output.stat().st_size for output in outputs)

    def ask(what, *, steps=3, timeout_seconds=60.0):
        taken, refused = take(run, what, steps=steps, timeout_seconds=timeout_seconds, show=lambda text: None)
        places = [TAKEN.fullmatch(line) for line in taken]
        return {int(place[1]): place[2].split("  ") for place in places}, refused

    try:
        wait_for(all_have_begun, "a step of each rank")

        taken, refused = ask("census")
        assert (sorted(taken), refused) == ([0, 1], [])
        counted = read_gzip_json(taken[1][0])
        kept = next(row for row in counted["rows"] if row["shape"] == [1000, 50])
        assert (kept["dtype"], kept["device"], kept["storage_bytes"]) == ("torch.float32", "cpu", 200_000)
        views = next(row for row in counted["rows"] if row["shape"] == [990, 50])
        assert views["storage_bytes"] == 0, "a view's storage is counted with its largest tensor"
        assert counted["rank"] == 1

        (run.path / layout.REQUESTS / "census-damaged.json").write_text("{")
        taken, refused = ask("profile")
        assert (sorted(taken), refused) == ([0, 1], [])
        summary, trace = map(read_gzip_json, taken[0])
        assert summary["steps_count"] == 3
        assert {"aten::empty", "aten::addmm"} <= {operator["operator"] for operator in summary["operators"]}
        assert trace["traceEvents"]

        lines, refused = take(run, "growth", steps=30, timeout_seconds=60.0, show=lambda text: None, worker=0)
        assert (len([line for line in lines if re.match(r"worker 0 of loader 0, rank \d", line)]), refused) == (
            2,
            [],
        )
        assert sum("asked.py:19 __iter__: " in line for line in lines) == 2, lines

        leak = Finding(
            kind="main-heap-leak",
            severity="warning",
            confidence=0.9,
            summary="It leaks.",
            locus=Locus(host=socket.gethostname(), rank=1, role="main", pid=ranks[1].pid),
            evidence=(evidence("resident_rise_bytes"), evidence("private_dirty_rise_bytes")),
        )
        asked = run.path / layout.REQUESTS / f"growth-of-main-{leak.locus.host}-{leak.locus.pid}.json"
        investigator = Investigator(run)
        investigator.investigate([leak])
        assert asked.exists()
        answer = wait_for(lambda: answers(run, asked.stem), "the lines that one rank keeps")
        assert [event["rank"] for event in answer] == [1], "the other one was not asked"
        investigator.note_event(answer[0])
        assert not asked.exists()
        investigator.investigate([leak])
        resumed = Investigator(run)
        resumed.note_event(answer[0])
        resumed.investigate([leak])
        assert not asked.exists(), "once per run and process"
        held_leak = add_allocation_sites(leak, load_tables(run), running=True)
        assert held_leak.held_by[0].site.endswith("asked.py:41"), "in no function"
        assert held_leak.held_by[0].grown_count == 50
        assert held_leak.held_by[0].grown_bytes > 50 * 80_000
        assert from_json(json.loads(json.dumps(as_json(held_leak)))) == held_leak

        taken, refused = ask("allocator")
        assert taken == {}
        assert len(refused) == 2
        assert all(": this process does not use CUDA" in line for line in refused)

        ranks[1].send_signal(signal.SIGSTOP)
        shutil.rmtree(run.path / layout.SNAPSHOTS)
        taken, (late, failed) = ask("census", timeout_seconds=3.0)
        assert taken == {}
        assert re.fullmatch(r"rank 1 \(pid \d+\): it finished no step in 3 s; raise --timeout", late)
        assert "No such file or directory" in failed
    finally:
        ranks[1].send_signal(signal.SIGCONT)
        stop.touch()
        ends = [rank.wait(timeout=60) for rank in ranks]

    assert ends == [0, 0]
    for output in outputs:
        lines = output.read_text().splitlines()
        assert lines == losses_of(len(lines))
    assert list((run.path / layout.REQUESTS).glob("*")) == [run.path / layout.REQUESTS / "census-damaged.json"]
    kinds = [json.loads(line) for path in run.events_dir.iterdir() for line in path.read_text().splitlines()]
    assert not [event for event in kinds if event["kind"] == "hook-disabled"]
    damaged = [event for event in kinds if event.get("request") == "census-damaged"]
    assert len({event["pid"] for event in damaged}) == len(damaged) == 4, "told once by each, and its worker"
    assert all("JSONDecodeError" in event["error"] for event in damaged)

    with pytest.raises(TidegaugeError, match="it has ended; take it while the run trains"):
        ask("census")


def test_snapshot_of_a_run_without_training_is_an_error(home):
    run = Run(layout.create_run(home, name="idle", argv=["sleep"]))
    with pytest.raises(TidegaugeError, match="no process began to train in 0"):
        take(run, "census", steps=1, timeout_seconds=0.1, show=lambda text: None)
