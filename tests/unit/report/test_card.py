"""The card and the JSON, from verdicts made by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from made_verdicts import CHECKS, HEALTHY, HOST_RISK, MIB, SLOW_WORKER, card, verdict
from rich.console import Console

from collector.diagnosis.checks import Check
from collector.findings import Advice, Evidence, Finding, Locus, WaitingLine
from collector.report import card as report, signpost, wording
from collector.report.html import verdict_card


def test_card_has_the_run_its_findings_and_the_next_command():
    text = card(verdict(SLOW_WORKER))
    assert "20261121-101500-demo-1a2b" in text
    assert "finished, exit status 0 · 61 s · 1,200 steps · 4 of 4 workers" in text
    assert "19.6 steps/s" in text
    assert "31%" in text
    assert "1.9 GiB" in text
    assert "worker 1 of loader 0, rank 0 · after 14 steps · confidence 97%" in text
    assert "fetch time / that of the others" in text
    assert "2.94×" in text
    assert "n = 300, steps 20-1200" in text
    assert "38 ms" in text
    assert "Checked and fine: open files." in text
    assert "Not judged: GPU memory (no GPU in use)." in text
    assert "Look at what worker 1 reads." in text
    assert text.rstrip().endswith("tidegauge dashboard")


def test_card_of_a_forecast_has_its_limit_and_the_time_to_it():
    text = card(verdict(HOST_RISK))
    assert "training process, rank 0, pid 4711" in text
    assert "4 GiB, cgroup" in text
    assert "host-oom-risk: 12 min to the limit" in text
    assert "To limit   12 min (10 min to never), about 8,000 steps" in text


def test_card_of_many_warnings_is_whole_on_the_gravest_one_alone():
    do = [Advice(text=f"Do number {n}.", expected=f"effect {n}") for n in range(4)]
    kinds = ("slow-worker", "collate-bound", "epoch-refill", "shard-skew")
    many = [
        dataclasses.replace(SLOW_WORKER, kind=kind, summary=f"{kind} is so.", advice=(first, do[3]))
        for kind, first in zip(kinds, do, strict=True)
    ]
    text, whole = card(verdict(HOST_RISK, *many)), card(verdict(HOST_RISK, *many), verbose=True)
    assert "4 GiB, cgroup" in text
    assert [f"{kind} is so." in text for kind in kinds] == [True, True, False, False]
    assert all(f"WARNING  {kind}" in text for kind in kinds)
    assert ("effect 1" in text, "effect 3" in text, "1 more: see --verbose" in text) == (True, False, True)
    assert "worker 1 of loader 0" not in text
    assert whole.count("worker 1 of loader 0") == len(kinds)
    assert "effect 3" in whole
    assert len(text.splitlines()) < 40


def test_card_has_what_the_loop_waited_for_unless_a_finding_says_so():
    stall = (
        "19 s (decode 80%, transfer to main process 19%), hardly any if decode took 14 ms per batch instead of 35"
    )
    assert stall in " ".join(card(verdict(HOST_RISK)).split())
    assert "decode 80%" not in card(verdict(SLOW_WORKER))


def test_information_that_several_processes_share_is_one_line():
    texts = ("It waits 7.3% of its time, 191 µs per batch.", "It waits 12% of its time, 1.2 ms per batch.")
    alike = [
        dataclasses.replace(HEALTHY, kind="inline-loading", summary=text, locus=Locus(role="main", pid=pid))
        for pid, text in enumerate((*texts, "It reads."))
    ]
    text = " ".join(card(verdict(*alike)).split())
    assert f"{texts[0]} The same holds for 1 other process." in text
    loaders = [dataclasses.replace(one, locus=Locus(role="main", loader=n)) for n, one in enumerate(alike)]
    assert f"{texts[0]} The same holds for 1 other loader." in " ".join(card(verdict(*loaders)).split())
    assert "12%" not in text
    assert "It reads." in text


def test_card_has_the_deciding_figures_and_all_of_them_on_request():
    shared = tuple(
        Evidence(name=name, value=0.01, unit="ratio", n=9, window="run")
        for name in ("starved_ratio", "lost_wall_ratio", "data_wait_ratio", "one", "two")
    )
    slow = dataclasses.replace(SLOW_WORKER, evidence=(*shared, *SLOW_WORKER.evidence))
    short, long = card(verdict(slow, HOST_RISK)), card(verdict(slow, HOST_RISK), verbose=True)
    assert "fetch time / that of the others" in short
    assert "time until the batch was made" not in short
    assert "time until the batch was made" in long
    assert "5 MiB/s (4 MiB/s to 6 MiB/s)" in long
    assert "tidegauge report 20261121-101500-demo-1a2b --verbose" in short
    assert "--verbose" not in long


def test_advice_that_a_finding_above_gave_is_not_repeated():
    risk = dataclasses.replace(HOST_RISK, advice=SLOW_WORKER.advice)
    text = card(verdict(risk, SLOW_WORKER))
    assert text.count("Look at what worker 1 reads.") == 1
    assert "As for host-oom-risk above." in text


def test_commands_stay_in_one_line():
    assert "All figures  tidegauge report 20261121-101500-demo-1a2b --verbose\n" in card(
        verdict(HEALTHY), width=30, crop=False
    )


def test_checks_with_the_same_obstacle_name_it_once():
    checks = [Check(name=name, status="not judged", reason="7 of the 12 samples needed") for name in ("a", "b")]
    assert wording.check_words([*CHECKS, *checks])[1] == (
        "Not judged: GPU memory (no GPU in use); a, b (7 of the 12 samples needed)."
    )


def test_card_has_the_cost_of_tidegauge_itself_where_it_was_measured():
    overhead = {"collector_cpu_ratio": 0.012, "collector_private_dirty_bytes": 79 * MIB}
    measured = card(verdict(summary=verdict().summary | {"overhead": overhead}))
    assert "tidegauge  79 MiB private memory, 1.2% of a core" in measured
    assert "private memory" not in card(verdict())


def test_card_of_a_healthy_run_has_an_all_clear_with_evidence():
    text = card(verdict(HEALTHY, summary=verdict().summary | {"exposed_stall": []}))
    assert "Nothing needs attention" in text
    assert "The training waits for data 1 % of the time." in text
    assert "data wait share" in card(verdict(HEALTHY), verbose=True)
    assert "WARNING" not in text


def test_card_with_a_stall_has_no_all_clear():
    text = card(verdict(HEALTHY))
    assert "19 s (decode 80%" in text
    assert "Nothing needs attention" not in text


def test_short_card_names_no_line_that_it_lacks():
    console = Console(width=80, file=io.StringIO())
    short = signpost.short_card(verdict(HEALTHY), run_id="r", name="healthy", address="http://localhost:8501")
    console.print(short)
    text = console.file.getvalue()
    assert "  No warnings.\n" in text
    assert "stall" not in text


def test_short_stall_of_a_long_run_is_not_shown():
    text = card(verdict(HEALTHY, duration_seconds=3600.0))
    assert "decode 80%" not in text
    assert "Nothing needs attention" in text


def test_card_without_a_dataloader_shows_time_outside_the_step():
    outside = {"ratio": 0.62, "cpu_ratio": 0.96, "seconds": 0.045, "steps": 1200.0}
    known = verdict().summary | {"data_wait_ratio": None, "exposed_stall": [], "outside_step": outside}
    text = " ".join(card(verdict(batches=0, workers_reporting=(0, 0), summary=known)).split())
    assert "data wait — no DataLoader seen" in text
    assert "workers — no DataLoader seen" in text
    assert "62% of step time outside forward, backward and optimizer: 45 ms per step, 96% of it computing" in text
    assert "Nothing needs attention" not in text
    assert "Most of the time passes outside the step" in text


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (
            {"seconds": 20.0, "cores_used": 0.35},
            "start 20 s until the first step, 33% of the run, with 0.35 cores in use",
        ),
        (
            {"seconds": 20.0, "cores_used": 1.002},
            "start 20 s until the first step, 33% of the run, with 1 core in use",
        ),
        ({"seconds": 20.0, "cores_used": None}, "start 20 s until the first step, 33% of the run "),
        ({"seconds": 9.0, "cores_used": 1.0}, ""),
        (None, ""),
    ],
)
def test_card_shows_a_long_time_until_the_first_step(start, words):
    text = " ".join(card(verdict(summary=verdict().summary | {"start": start})).split())
    assert words in text
    assert ("until the first step" in text) == bool(words)


def test_card_of_steps_that_became_slower_says_so_and_has_no_all_clear():
    slowdown = {"first_seconds": 0.03, "last_seconds": 0.09, "phase": "backward", "phase_growth_seconds": 0.05}
    summary = verdict().summary
    known = summary | {"exposed_stall": [], "throughput": summary["throughput"] | {"slowdown": slowdown}}
    text = " ".join(card(verdict(HEALTHY, summary=known)).split())
    assert "slower a step takes 90 ms, at first 30 ms; backward grew most, by 50 ms" in text
    assert "Nothing needs attention" not in text


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ("forward pass", "1,200 forward passes"),
        ("batch", "1,200 batches, no optimizer"),
        ("optimizer step", "1,200 steps"),
    ],
)
def test_card_names_the_unit_of_other_steps(unit, words):
    assert words in card(verdict(step_unit=unit))


def test_card_of_an_evaluation_whose_optimizer_rests_counts_its_batches():
    summary = verdict().summary
    start = {"seconds": 20.0, "cores_used": None}
    throughput = {"steps_per_second": None, "samples_per_second": 160.0, "slowdown": None}
    made = verdict(steps=0, step_unit=None, summary={**summary, "start": start, "throughput": throughput})
    text = " ".join(card(made).split())
    assert "1,200 batches, no optimizer step" in text
    assert "until the first batch" in text
    assert "speed 160 samples/s" in text


def test_card_has_one_step_in_the_singular():
    assert " · 1 step · " in card(verdict(steps=1))


def test_card_without_training_claims_neither_health_nor_speed():
    untrained = verdict(steps=0, step_unit=None, batches=0, workers_reporting=(0, 0))
    text = card(untrained)
    assert "No steps or batches were seen" in text
    peak = {"run_pss_bytes": None, "device_reserved_bytes": None}
    unread = dataclasses.replace(untrained, summary={**untrained.summary, "peak": peak})
    assert "host memory" not in verdict_card(unread, run_id="r", name="early")
    assert "Nothing needs attention" not in text
    assert "steps/s" not in text


def test_unknown_values_are_a_dash_not_zero():
    unknown = {
        "peak": {"run_pss_bytes": None, "device_reserved_bytes": None},
        "start": None,
        "throughput": {"steps_per_second": None, "samples_per_second": None, "slowdown": None},
        "data_wait_ratio": None,
        "exposed_stall": [],
        "outside_step": None,
        "overhead": {"collector_cpu_ratio": None, "collector_private_dirty_bytes": None},
        "last_minute": [],
        "earlier_workers_count": 0,
    }
    text = card(verdict(summary=unknown, duration_seconds=None))
    assert "finished, exit status 0 · — · 1,200 steps" in text
    assert "speed      —" in text
    assert "data wait  — not recorded" in text
    assert "— host memory" in text
    assert "0 B" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    lines = card(verdict(HOST_RISK, SLOW_WORKER, HEALTHY), width=width).splitlines()
    assert max(map(len, lines)) <= width


def test_card_names_the_lines_that_a_training_waits_for():
    lines = tuple(
        WaitingLine(
            site=f"project/data/dataset.py:{57 + place}, in Photos.load_from_the_archive",
            source="return self.archive.read(self.names[index], password=self.password, timeout=30)",
            calls="zipfile.ZipFile.read",
            callers=("project/data/dataset.py:40, in Photos.__getitem__", "project/train.py:3, in main"),
            ratio=ratio,
            n=61,
            window="30-33 s",
        )
        for place, ratio in enumerate((0.71, 0.2))
    )
    text = card(verdict(dataclasses.replace(SLOW_WORKER, waits_in=lines)))
    assert "Waits in   71%  project/data/dataset.py:57, in Photos.load_from_the_archive" in text
    assert "return self.archive.read(self.names[index]" in text
    assert "calls zipfile.ZipFile.read; from project/data/dataset.py:40," in text
    assert "train.py" not in text
    assert text.count("shares of 61 samples of stacks, 30-33 s") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_long_text_evidence_is_shown_whole():
    message = "RuntimeError: " + "mat1 and mat2 shapes cannot be multiplied " * 3
    crash = Finding(
        kind="crashed",
        severity="critical",
        confidence=1.0,
        summary="It crashed.",
        evidence=(
            Evidence(name="exception", value=message.strip(), unit="text", n=1, window="run"),
            Evidence(name="exit_status", value=1, unit="status", n=1, window="run"),
        ),
    )
    assert message.strip() in " ".join(card(verdict(crash)).split())


def test_exception_whose_message_is_cut_in_the_sentence_is_not_repeated():
    message = " ".join(f"word{number}" for number in range(60))
    crash = Finding(
        kind="crashed",
        severity="critical",
        confidence=1.0,
        summary=f"It ended with RuntimeError at train.py:3: {message[:240]} …",
        evidence=(
            Evidence(name="exception", value=f"RuntimeError: {message[:290]} …", unit="text", n=1, window="run"),
            Evidence(name="exit_status", value=1, unit="status", n=1, window="run"),
        ),
    )
    assert card(verdict(crash)).count("word5 ") == 1


def test_risk_that_is_only_information_states_no_time_to_the_limit():
    text = card(verdict(dataclasses.replace(HOST_RISK, severity="info")))
    assert "to the limit" not in text[text.index("INFO") :].partition("\n")[0]


def test_severity_does_not_depend_on_colour():
    plain, coloured = card(verdict(SLOW_WORKER)), card(verdict(SLOW_WORKER), color=True)
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    assert "▲ WARNING" in plain


def test_json_report_has_the_documented_form():
    made = report.report(verdict(HOST_RISK, SLOW_WORKER), run_id="r", name="demo")
    body = json.loads(json.dumps(made, allow_nan=False))
    assert body["schema"] == 1
    assert body["run"] == {
        "run_id": "r",
        "name": "demo",
        "status": "finished",
        "exit_status": 0,
        "attempts": 1,
        "steps": 1200,
        "step_unit": "optimizer step",
        "batches": 1200,
        "duration_seconds": 61.2,
        "workers_reporting": [4, 4],
    }
    assert body["checks"][2] == {"name": "GPU memory", "status": "not judged", "reason": "no GPU in use"}
    risk, slow = body["findings"]
    assert risk["evidence"][0]["value"] is None
    assert risk["eta"]["high_seconds"] is None
    assert slow["locus"] == {"rank": 0, "loader": 0, "worker": 1}
    assert (slow["severity"], slow["since_step"], slow["rate"], slow["eta"]) == ("warning", 14, None, None)
    assert slow["advice"] == [
        {"text": "Look at what worker 1 reads.", "expected": "about 61 steps/s instead of 40", "effect": "safe"}
    ]
    assert body["summary"]["overhead"] == {"collector_cpu_ratio": None, "collector_private_dirty_bytes": 79 * MIB}


def test_dashboard_command_names_the_home_of_the_run(monkeypatch):
    beside = Path(sys.executable).with_name("tidegauge")
    monkeypatch.setenv("PATH", "/nothing/here")
    assert report.command_for(Path("/a"), Path("/a"), "dashboard") == shlex.join([str(beside), "dashboard"])
    monkeypatch.setenv("PATH", str(beside.parent))
    assert report.command_for(Path("/a"), Path("/a"), "dashboard") == "tidegauge dashboard"
    assert report.command_for(Path("/b c"), Path("/a"), "dashboard") == "tidegauge dashboard --home '/b c'"


def test_card_with_an_unhealthy_finding_has_no_all_clear():
    calm = verdict(HEALTHY, summary=verdict().summary | {"exposed_stall": []})
    slow = dataclasses.replace(HEALTHY, kind="workers-too-slow")
    assert "Nothing needs attention" in card(calm)
    assert "Nothing needs attention" not in card(dataclasses.replace(calm, findings=(HEALTHY, slow)))
