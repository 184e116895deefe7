"""The history of a command: changes of level that stand out of the noise, and findings over runs."""

import random

import pytest

from collector.findings import Finding, Locus, identity, measurements
from collector.report.history import (
    change_sentences,
    commands_of,
    finding_histories,
    history_of,
    level_changes,
)
from collector.report.known import Command, command_of
from collector.report.listing import ListEntry
from collector.report.results import Result, ResultFinding

TRAIN = Command("python train.py", "/project")
COPIES = ResultFinding(kind="copy-on-read-growth", place="workers of train_loader", severity="critical")
SLOW = ResultFinding(kind="workers-too-slow", place="train_loader", severity="warning")


def entry(number, *, commit="a", wait=None, throughput=None, findings=(), **changes):
    result = Result(
        status="finished",
        **{
            "steps": 100,
            "throughput": throughput,
            "throughput_unit": "samples/second",
            "data_wait_ratio": wait,
            "machine": "8 cores",
            "findings": findings,
            **changes.pop("result", {}),
        },
    )
    fields = {"command": TRAIN, "commit": commit * 40 or None, "is_dirty": False, "result": result, **changes}
    return ListEntry(run_id=f"run-{number}", status="finished", started_seconds=float(number), **fields)


def sentences(runs):
    return change_sentences(history_of(TRAIN, runs))


def noisy(mean, count, seed=1):
    noise = random.Random(seed)
    return [mean * (1 + noise.gauss(0, 0.03)) for _ in range(count)]


def test_a_slower_commit_is_named_with_the_runs_on_both_sides():
    waits = [0.12, 0.13, 0.11, 0.12, 0.43, 0.44, 0.42]
    runs = [entry(n, wait=wait, commit="a" if n < 4 else "b") for n, wait in enumerate(waits)]
    assert sentences(reversed(runs)) == [
        "Since commit bbbbbbb: data wait 43%, before 12% (+31 points; 4 runs before, 3 after)."
    ]


def test_a_change_at_the_same_commit_blames_no_commit():
    waits = [0.12, 0.13, 0.11, 0.12, 0.43, 0.44, 0.42]
    (said,) = sentences([entry(n, wait=wait) for n, wait in enumerate(waits)])
    assert said.startswith("Since run-4, at the same commit aaaaaaa: data wait 43%")
    (said,) = sentences([entry(n, wait=wait, commit="") for n, wait in enumerate(waits)])
    assert said.startswith("Since run-4: data wait 43%")
    dirty = [entry(n, wait=wait, is_dirty=n > 3) for n, wait in enumerate(waits)]
    assert sentences(dirty)[0].startswith("Since commit aaaaaaa (with uncommitted changes): data wait 43%")


def test_commits_are_not_named_where_the_runs_leave_several_places():
    runs = [
        entry(n, throughput=value, commit="abcdefghi"[n])
        for n, value in enumerate((100, 101, 99, 100, 90, 80, 81, 79, 80))
    ]
    (said,) = sentences(runs)
    assert said.startswith("Between commit eeeeeee and commit fffffff: throughput 80 samples/s, before 97.9")


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_change(seed):
    assert not level_changes(noisy(100.0, 12, seed), is_share=False)


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0, 2.0, 2.0], [100.0, 100.0, 101.0, 101.0], [0.0, 0.0, 1.0, 1.0], [1.0] * 8]
)
def test_few_runs_and_small_changes_are_not_reported(values):
    assert not level_changes(values, is_share=False)


def test_each_of_several_changes_is_found():
    values = [*noisy(100.0, 5), *noisy(70.0, 5), *noisy(50.0, 5)]
    assert [change.place for change in level_changes(values, is_share=False)] == [5, 10]


def test_runs_that_cannot_be_compared_are_left_out_and_counted():
    runs = [entry(n, throughput=100) for n in range(4)]
    other = entry(5, throughput=200, result={"machine": "64 cores"})
    short = entry(6, throughput=50, result={"steps": 3})
    unjudged = ListEntry(run_id="run-7", status="running", command=TRAIN, started_seconds=7.0)
    trial = entry(8, throughput=70, is_trial=True)
    history = history_of(TRAIN, [trial, unjudged, short, other, *runs])
    assert [each.run_id for each in history.runs] == ["run-0", "run-1", "run-2", "run-3"]
    assert history.machine == "8 cores"
    assert history.left_out == (
        "1 run of `tidegauge tune`",
        "1 run without a verdict",
        "1 run with less than half the usual steps",
        "1 run on machines of another size",
    )


def test_findings_have_a_history_over_runs():
    having = {1: (COPIES, SLOW), 2: (COPIES,), 3: (COPIES,), 6: (SLOW,)}
    runs = [entry(n, commit="abcdefg"[n], findings=having.get(n, ())) for n in range(7)]
    slow, copies = finding_histories(history_of(TRAIN, runs), runs)
    assert str(copies.identity) == "copy-on-read-growth in workers of train_loader"
    assert (copies.count, copies.runs_count, copies.first, copies.gone) == (3, 7, runs[1], runs[4])
    assert (slow.count, slow.runs_count, slow.first, slow.gone) == (2, 7, runs[1], None)


def test_a_finding_of_a_helper_has_a_place_in_words():
    crashed = identity(found("crashed", role="other", pid=7))
    assert str(crashed) == "crashed in another process"


def test_a_run_that_ended_early_does_not_show_that_a_finding_is_gone():
    runs = [entry(n, findings=(COPIES,)) for n in range(3)] + [entry(3, result={"steps": 2})]
    (copies,) = finding_histories(history_of(TRAIN, runs), runs)
    assert (copies.count, copies.runs_count, copies.first, copies.gone) == (3, 3, None, None)


def found(kind="slow-worker", **locus):
    evidence = measurements(1, "run", first_count=1, second_count=1)
    return Finding(
        kind=kind, severity="warning", confidence=1.0, summary="", evidence=evidence, locus=Locus(**locus)
    )


def test_the_identity_of_a_finding_survives_pids_lines_and_batch_sizes():
    one = found(
        host="a", pid=7, rank=0, worker=1, loader=0, loader_name="train_loader, main.py:37, Faces, batch 64"
    )
    two = found(
        host="b", pid=9, rank=3, worker=2, loader=0, loader_name="train_loader, main.py:41, Faces, batch 32"
    )
    assert identity(one) == identity(two)
    assert str(identity(one)) == "slow-worker in workers of train_loader"
    assert identity(one) != identity(found(worker=1, loader=1, loader_name="test_loader, main.py:50"))


@pytest.mark.parametrize(
    ("locus", "place"),
    [
        ({"role": "main", "pid": 4}, "training process"),
        ({"loader": 1, "loader_name": "main.py:5, ImageFolder, batch 4"}, "ImageFolder"),
        ({"loader": 1, "loader_name": "main.py:5"}, "loader 1"),
        ({"role": "worker", "loader": 0}, "workers of loader 0"),
        ({"role": "main", "device": 1}, "training process, GPU 1"),
        ({"loader": 0, "stage": "decode"}, "loader 0, stage decode"),
        ({}, ""),
    ],
)
def test_the_place_of_a_finding_is_in_words_that_no_run_changes(locus, place):
    assert identity(found(**locus)).place == place


def test_a_command_is_the_same_wherever_python_and_the_project_are_spelled_differently():
    spelled = [
        ["/usr/bin/python3.11", "/project/train.py", "--lr", "0.1"],
        ["python", "train.py", "--lr", "0.1"],
        ["python3", "./train.py", "--lr", "0.1"],
    ]
    assert len({command_of({"argv": argv, "cwd": "/project"}) for argv in spelled}) == 1
    assert command_of({"argv": ["python", "train.py"], "cwd": "/a"}) != command_of(
        {"argv": ["python", "train.py"], "cwd": "/b"}
    )
    assert command_of({"argv": None}).text == ""
    assert list(commands_of([entry(1), entry(2, command=Command())])) == [TRAIN]
