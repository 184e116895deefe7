"""Find runs, and their processes that are still alive."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from collector.errors import TidegaugeError
from collector.store import Edit, annotate
from collector.store.catalogue import find_run, list_runs
from collector.store.runs.run import Run, living_processes
from training_harness import layout
from training_harness.journal import Identity

HOST = socket.gethostname()


@pytest.fixture
def three_runs(tmp_path):
    """Three runs, the oldest first; the last two of the same second in most cases."""
    return [Run(layout.create_run(tmp_path, name=name, argv=["x"])) for name in ("alpha", "beta", "gamma")]


def test_runs_are_listed_newest_first_even_within_a_second(tmp_path, three_runs):
    assert list_runs(tmp_path) == three_runs[::-1]
    assert find_run(tmp_path, "latest") == three_runs[-1]


def test_a_home_that_does_not_exist_has_no_runs(tmp_path):
    assert list_runs(tmp_path / "nowhere") == []
    with pytest.raises(TidegaugeError, match="holds no runs; start one"):
        find_run(tmp_path / "nowhere", "latest")


def test_other_files_are_not_listed_as_runs(tmp_path, three_runs):
    (tmp_path / "runs" / "20200101-000000-half-made").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    assert list_runs(tmp_path) == three_runs[::-1]


def test_a_run_is_found_by_id_prefix_and_path(tmp_path, three_runs, monkeypatch):
    wanted = three_runs[1]
    prefix = wanted.run_id[: wanted.run_id.index("beta") + 4]
    monkeypatch.chdir(tmp_path / "runs")
    for spec in (wanted.run_id, prefix, str(wanted.path), f"./{wanted.run_id}"):
        assert find_run(tmp_path, spec) == wanted


def test_exact_name_wins_over_a_longer_one(tmp_path, three_runs):
    layout.create_run(tmp_path, name="beta2", argv=["x"])
    assert find_run(tmp_path, "beta") == three_runs[1]


def test_exact_name_wins_over_a_name_that_has_it_as_a_word(tmp_path, three_runs):
    worded = layout.create_run(tmp_path, name="beta-worker", argv=["x"])
    assert find_run(tmp_path, "beta") == three_runs[1]
    assert find_run(tmp_path, "worker").path == worded
    annotate(three_runs[0], Edit(name="beta"))
    assert find_run(tmp_path, "beta") == three_runs[0]


def test_a_run_is_found_by_path_without_a_home(tmp_path, three_runs):
    assert find_run(tmp_path / "nowhere", str(three_runs[0].path)) == three_runs[0]


@pytest.mark.parametrize("spec", ["zzz", "", "/etc", "latests"])
def test_unknown_run_is_a_one_line_error(tmp_path, three_runs, spec):
    with pytest.raises(TidegaugeError, match="tidegauge runs") as caught:
        find_run(tmp_path, spec)
    assert repr(spec) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_ambiguous_prefix_names_the_runs_that_it_fits(tmp_path, three_runs):
    with pytest.raises(TidegaugeError, match="fits 3 runs") as caught:
        find_run(tmp_path, three_runs[0].run_id[:4])
    assert all(run.run_id in str(caught.value) for run in three_runs)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99}', "\x00"])
def test_damaged_manifest_is_one_line_and_its_run_is_listed(tmp_path, three_runs, text):
    (three_runs[0].path / layout.MANIFEST).write_text(text)
    assert three_runs[0] in list_runs(tmp_path)
    with pytest.raises(TidegaugeError) as caught:
        _ = three_runs[0].manifest
    assert str(three_runs[0].path) in str(caught.value)


def test_manifest_is_read_again_each_time(three_runs):
    layout.write_manifest(three_runs[0].path, three_runs[0].manifest | {"exit_status": 3})
    assert three_runs[0].manifest["exit_status"] == 3


def stat_line(pid, state, start_ticks):
    return f"{pid} (a) b) {state} " + " ".join(["0"] * 18) + f" {start_ticks} 0 0\n"


def test_living_processes_exclude_zombies_and_reused_pids(three_runs, tmp_path):
    proc = tmp_path / "proc"
    for pid, state, start_ticks in ((10, "S", 100), (11, "Z", 110), (12, "R", 999)):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "stat").write_text(stat_line(pid, state, start_ticks))
    keys = {(HOST, 10, 100), (HOST, 11, 110), (HOST, 12, 120), (HOST, 13, 130)}
    assert living_processes(three_runs[0], keys, proc) == {(HOST, 10, 100)}


def test_this_process_is_alive(three_runs):
    me = Identity.of_this_process()
    key = (me.host, me.pid, me.start_ticks)
    assert living_processes(three_runs[0], [key]) == {key}


def test_living_processes_are_unknown_on_another_host_or_boot(three_runs):
    assert living_processes(three_runs[0], [("elsewhere", 1, 1)]) is None
    for anchors in ({}, {HOST: layout.wall_anchor() | {"boot_id": "another"}}):
        layout.write_manifest(three_runs[0].path, three_runs[0].manifest | {"anchors": anchors})
        assert living_processes(three_runs[0], []) is None


@pytest.mark.parametrize("told_before", [False, True])
def test_ranks_that_start_together_with_one_run_id_are_one_run(told_before, tmp_path):
    if told_before:  # by another node, through the store
        told = Run(layout.create_run(tmp_path, name="x", argv=[]))
        layout.write_manifest(told.path, {**told.manifest, layout.MIRROR: True})
        told.path.rename(tmp_path / "runs" / "exp")
    code = "import sys; from pathlib import Path; from training_harness import layout; sys.stdin.read()\n"
    code += "print(*layout.join_or_create_run(Path(sys.argv[1]), name='x', argv=[]))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=os.environ | {"LOCAL_RANK": str(rank), "WORLD_SIZE": "6", layout.RUN_ID_VARIABLE: "exp"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(6)
    ]
    for rank in ranks:
        rank.stdin.close()  # now
    said = [rank.stdout.read().split() for rank in ranks]
    for rank in ranks:
        rank.stdout.close()
        assert rank.wait() == 0
    assert {where for where, _ in said} == {str(tmp_path / "runs" / "exp")}
    assert sorted(made for _, made in said) == ["False"] * 5 + ["True"]
    assert not Run(tmp_path / "runs" / "exp").is_mirror
