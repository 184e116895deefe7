"""Deaths that follow from another finding of the run, and those that only look so."""

from dataclasses import replace

import pytest

from collector.diagnosis.consequences import without_consequences
from collector.diagnosis.deaths import catalogue
from collector.diagnosis.memory.resources import OPEN_FILES
from collector.findings import Finding, Locus, Rate, fact

#: Measurements that any finding has.
FACTS = (fact("farewell_count", 0, "run"), fact("alive", 0, "now"))
NO_EXCEPTION = fact("uncaught_exception_count", 0, "events of the training processes")
RANKS = [Locus(host="node", rank=rank, role="main", pid=100 + rank) for rank in range(2)]
WORKER = Locus(host="node", rank=1, role="worker", pid=1000, worker=0, loader=0)
COMMAND = Locus(host="node", role="other", pid=99)


def killed(locus, death=catalogue.KILLED, *evidence):
    return death.finding(
        locus=locus,
        evidence=(*FACTS, *evidence),
        what="The process",
        by="by SIGKILL",
        status=124,
        attempt=0,
        steps=9,
        how="",
        silent="",
    )


def hang(locus, severity="critical"):
    return Finding(kind="hang", severity=severity, confidence=0.9, summary="It hangs.", locus=locus, evidence=FACTS)


def leak(kind, unit, *evidence):
    rate = Rate(value=9.0, low=8.0, high=10.0, unit=unit)
    return Finding(
        kind=kind,
        severity="warning",
        confidence=0.9,
        summary="It grows.",
        locus=RANKS[0],
        rate=rate,
        evidence=(*FACTS, *evidence),
    )


@pytest.mark.parametrize(
    ("end", "hanging", "follows"),
    [
        (killed(RANKS[1]), hang(RANKS[1]), True),
        (killed(RANKS[1]), hang(WORKER), True),
        (killed(COMMAND), hang(RANKS[1]), True),
        (killed(RANKS[0], catalogue.TIMED_OUT), hang(RANKS[1]), True),
        (killed(RANKS[0], catalogue.KILLED, NO_EXCEPTION), hang(RANKS[1]), True),
        (killed(RANKS[1]), hang(RANKS[0]), False),  # it waits for the rank that was killed
        (killed(RANKS[0]), hang(WORKER), False),
        (killed(RANKS[1]), hang(RANKS[1], "info"), False),  # it is slow
        (killed(Locus(host="node", role="main"), catalogue.ATTEMPT_KILLED), hang(RANKS[0]), False),
    ],
)
def test_a_kill_follows_from_a_hang_of_the_process_that_was_killed(end, hanging, follows):
    found = next(one for one in without_consequences([end, hanging]) if one.kind == "killed")
    assert (found.consequence_of == "hang") == found.advice[0].text.startswith("Fix the hang first") == follows


def test_more_time_is_not_the_first_advice_where_a_training_may_hang():
    end = killed(RANKS[0], catalogue.TIMED_OUT)
    found = next(one for one in without_consequences([end, hang(WORKER, "info")]) if one.kind == "killed")
    assert [advice.text.split()[0] for advice in found.advice] == ["Look", "Give"]
    assert found.consequence_of is None  # it may be slow


SHARED = fact("process_shm_rise_bytes", 9e8, "same window")
NO_ROOM = killed(RANKS[0], catalogue.FAILED_EXIT, fact("shm_used_peak_bytes", 6e7, "run"))
NO_FILE = replace(killed(RANKS[0], catalogue.FAILED_EXIT), advice=OPEN_FILES.leak_advice)


@pytest.mark.parametrize(
    ("crash", "leaks", "first"),
    [
        (NO_ROOM, [leak("fd-leak", "count/s", SHARED), leak("shm-leak", "bytes/s", SHARED)], "fd-leak"),
        (NO_ROOM, [leak("shm-leak", "bytes/s")], "shm-leak"),
        (NO_ROOM, [leak("fd-leak", "count/s")], None),
        (NO_FILE, [leak("fd-leak", "count/s")], "fd-leak"),
        (NO_FILE, [leak("main-heap-leak", "bytes/s")], None),
    ],
)
def test_a_crash_for_lack_of_shared_memory_or_files_says_which_leak_to_fix_first(crash, leaks, first):
    found = next(one for one in without_consequences([crash, *leaks]) if one.kind == "crashed")
    text = found.advice[0].text
    assert text.startswith(f"Fix {first} first: the ") if first else text == crash.advice[0].text
    assert found.fault == ("your code" if first == "fd-leak" else None)


def test_a_crash_for_lack_of_shared_memory_has_the_fault_of_its_leak():
    """Files of another program may fill /dev/shm."""
    crash = replace(NO_ROOM, fault="your settings")
    unknown = leak("shm-leak", "bytes/s")
    for leaks, fault in (([unknown], None), ([replace(unknown, fault="your code")], "your code")):
        found = next(one for one in without_consequences([crash, *leaks]) if one.kind == "crashed")
        assert found.fault == fault


FILES_RISK, ROOM_RISK = (leak(f"{of}-exhaustion-risk", "bytes/s") for of in ("fd", "shm"))
OF_HOST = Locus(host="node")


@pytest.mark.parametrize(
    ("crash", "risk", "stays"),
    [
        (NO_FILE, FILES_RISK, False),
        (NO_FILE, replace(FILES_RISK, locus=replace(WORKER, rank=0)), False),  # it raised, perhaps
        (NO_FILE, replace(FILES_RISK, locus=RANKS[1]), True),
        (NO_FILE, replace(ROOM_RISK, locus=OF_HOST), True),
        (NO_ROOM, FILES_RISK, True),
        (NO_ROOM, replace(ROOM_RISK, locus=OF_HOST), False),
        (NO_ROOM, replace(ROOM_RISK, locus=OF_HOST, rate=None), True),  # it says that /dev/shm is full
        (NO_ROOM, replace(ROOM_RISK, locus=Locus(host="other")), True),
    ],
)
def test_a_forecast_ends_with_the_crash_that_met_its_limit(crash, risk, stays):
    assert (risk in without_consequences([crash, risk])) == stays


def test_a_forecast_for_shared_memory_ends_with_a_bus_error():
    crash = replace(hang(WORKER), kind="shm-bus-error")
    assert [one.kind for one in without_consequences([crash, ROOM_RISK])] == ["shm-bus-error"]


@pytest.mark.parametrize(
    ("grows", "explains"),
    [
        (leak("main-heap-leak", "bytes/s"), True),
        (leak("fd-leak", "count/s", fact("process_shm_rise_bytes", 9e8, "same window")), True),
        (leak("fd-leak", "count/s"), False),
    ],
)
def test_a_kill_by_an_unknown_sender_is_explained_by_a_leak_of_memory_alone(grows, explains):
    found = next(one for one in without_consequences([killed(RANKS[0]), grows]) if one.kind == "killed")
    assert found.advice[0].text.startswith(f"Fix {grows.kind} first") == explains
