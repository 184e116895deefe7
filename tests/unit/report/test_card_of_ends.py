"""The card of a run that died, or that was stopped."""

from __future__ import annotations

import dataclasses

import pytest
from made_verdicts import MIB, SLOW_WORKER, card, verdict

from collector.diagnosis.ending import Ending, ExitRecord, Happening
from collector.findings import Finding, measurements


def test_card_of_a_death_says_which_memory_is_only_an_upper_bound():
    worker = {
        **dict.fromkeys(("rank", "step", "batch", "phase", "pss_bytes", "seconds")),
        "role": "worker",
        "loader": 0,
        "worker": 1,
        "pid": 41,
        "held_bytes": 810 * MIB,
        "held_rise_bytes": 0,
    }
    main = {**worker, "role": "main", "loader": None, "worker": None, "held_bytes": 529 * MIB, "pss_bytes": 1}
    died = verdict(status="killed", exit_status=-9)
    text = card(dataclasses.replace(died, summary={**died.summary, "last_minute": [worker, main]}))
    assert "≤ 810 MiB" in text
    assert "529 MiB" in text
    assert "≤ 529" not in text


def test_card_names_the_signal_of_a_killed_run():
    assert "signal 9 (SIGKILL)" in card(verdict(status="killed", exit_status=-9))


@pytest.mark.parametrize(("kind", "severity"), [("cannot-tell", "info"), ("crashed", "critical")])
def test_a_command_that_fails_at_once_has_a_short_card(kind, severity):
    early = Finding(
        kind=kind,
        severity=severity,
        confidence=1.0,
        summary="The command failed. No training was seen.",
        evidence=measurements(1, "run", exit_status=2, last_rss_bytes=1),
    )
    ended = Ending(
        record=ExitRecord(reason="not known", exit_status=2, seconds=0.1),
        happenings=(Happening(seconds=0.0, text="The command ended: exit status 2."),),
    )
    early_end = verdict(early, status="failed", exit_status=2, steps=0, batches=0, ending=ended)
    text = card(early_end)
    assert "No training was seen" in text
    assert not any(words in text for words in ("No warnings", "Reason", "last 60 s", "Not judged", "Checked"))
    assert "The command ended: exit status 2." in card(early_end, verbose=True)


def test_a_run_that_was_stopped_has_no_last_minute():
    stopped = Finding(
        kind="killed",
        severity="info",
        confidence=1.0,
        summary="The training process ended by SIGINT.",
        evidence=measurements(1, "run", exit_status=-2, farewell_count=1),
    )
    ended = Ending(
        record=ExitRecord(reason="killed", exit_status=-2, seconds=0.1),
        happenings=(Happening(seconds=-1.0, text="The last of 1,200 steps ended."),),
    )
    by_user = verdict(SLOW_WORKER, stopped, status="killed", exit_status=-2, ending=ended)
    text = card(by_user)
    assert "SIGINT" in text
    assert "last 60 s" not in text
    assert "Not judged" in text
    assert "last 60 s" in card(by_user, verbose=True)
