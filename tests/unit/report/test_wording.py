"""Findings as people read them, the same in the terminal and in the dashboard."""

import math

import pytest

from collector.diagnosis.ending import ExitRecord
from collector.findings import Eta, Finding, Locus, Rate, measurements
from collector.report import wording
from collector.report.comparison import Measure, words


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (Locus(), ""),
        (Locus(worker=1, loader=0, rank=0), "worker 1 of loader 0, rank 0"),
        (Locus(worker=-1, role="main", loader=0), "training process, loader 0"),
        (Locus(role="worker", loader=2), "workers, loader 2"),
        (Locus(device=3, rank=1, host="n7"), "device 3, rank 1, host n7"),
    ],
)
def test_locus_is_described_in_words(where, words):
    assert wording.locus(where) == words


@pytest.mark.parametrize(
    ("kind", "since_step", "words"),
    [
        ("main-heap-leak", 160, "after 160 steps"),
        ("main-heap-leak", 1, "after 1 step"),
        ("main-heap-leak", 0, "from the first step on"),
        ("main-heap-leak", None, ""),
        ("killed", 1199, "after 1,200 steps"),  # its last step that ended; the report counts 1,200 steps
        ("killed", 0, "after 1 step"),
        ("cuda-oom", 305, "after 305 steps"),  # the step that raised it did not end
        ("cuda-oom", 0, "in the first step"),
    ],
)
def test_steps_are_counted_from_one_in_sentences(kind, since_step, words):
    evidence = measurements(1, "run", one=1, other=2)
    finding = Finding(
        kind=kind, severity="warning", confidence=1.0, summary="", since_step=since_step, evidence=evidence
    )
    assert wording.since(finding) == words


def test_forecast_shows_its_range():
    when = Eta(low_seconds=600, mid_seconds=720, high_seconds=840, low_steps=700, mid_steps=800, high_steps=900)
    assert wording.eta(when) == "12 min (10 min to 14 min), about 800 steps"
    late = Eta(low_seconds=600, mid_seconds=720, high_seconds=math.inf)
    assert wording.eta(late) == "12 min (10 min to never)"


def test_growth_that_ends_is_titled_with_its_end_and_other_growth_with_its_rate():
    rate = Rate(value=2**20, low=2**19, high=2**21, unit="bytes/s")
    evidence = measurements(9, "at the end", level_at_end_low_bytes=2**30, level_at_end_high_bytes=2**31)
    growth = {"severity": "info", "confidence": 0.7, "summary": "", "rate": rate}

    assert wording.stake(Finding(kind="bounded-growth", evidence=evidence, **growth)) == "at most 2 GiB at its end"
    assert wording.stake(Finding(kind="cannot-tell", **growth)) == "grows by 1 MiB/s"


def test_stall_sentence_names_the_rest_of_the_dataset():
    stage = {
        "stage": "other",
        "seconds": 4.0,
        "free_wait_ratio": 0.1,
        "enough_seconds": None,
        "batch_seconds": 0.03,
    }
    stall = {"wait_seconds": 5.0, "stages": [stage]}
    assert wording.stall(stall).endswith("; without the dataset code, training would still wait 10% of its time")
    enough = {**stage, "enough_seconds": 0.01}
    assert "hardly any if the dataset code took 10 ms" in wording.stall({**stall, "stages": [enough]})
    nothing = {**stage, "enough_seconds": 0.0}
    assert wording.stall({**stall, "stages": [nothing]}).endswith("hardly any without the dataset code")
    decode = {**stage, "stage": "decode"}
    assert wording.stall({**stall, "stages": [decode]}).endswith(
        "; without decode, training would still wait 10% of its time"
    )


def test_no_change_is_never_a_negative_zero():
    def share(value):
        return Measure(label="Data wait", value=value, unit="ratio")

    assert words(share(0.3101), share(0.3103)) == "31% (+0.0 points)"
    assert words(share(0.28), share(0.31)) == "28% (-3.0 points)"
    steps = [Measure(label="Steps", value=value, unit="count") for value in (99_999, 100_000)]
    assert words(*steps) == "99,999 (+0.0%)"


@pytest.mark.parametrize(("count", "words"), [(1, "1 other training process"), (3, "3 other training processes")])
def test_followers_are_counted(count, words):
    assert ("Followed", words) in wording.exit_record(ExitRecord(reason="killed", followers_count=count))


def test_the_exit_record_has_the_signal_of_the_command_if_the_victim_got_none():
    cancelled = ExitRecord(reason="cancelled while it hung", exit_status=-15)
    assert ("Signal", "signal 15 (SIGTERM), of the command") in wording.exit_record(cancelled)
    assert ("Signal", "SIGKILL") in wording.exit_record(
        ExitRecord(reason="killed", signal="SIGKILL", exit_status=-15)
    )
