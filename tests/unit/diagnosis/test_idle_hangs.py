"""Hangs without hooks: the stacks must show pending work, and a process that idles by design has none."""

from __future__ import annotations

import pytest
from recorded_dumps import data, fields
from simulated_runs import MAIN, START_SECONDS, Script, ns
from stack_events import (
    AGENT,
    FOR_A_BATCH,
    FOR_AN_INDEX,
    IN_A_SAMPLE,
    IN_MAIN,
    LIBRARY,
    LOCK,
    POLL,
    TORCH,
    WORKERS,
    add_stacks,
    process,
)

from collector.diagnosis.hangs.idle_hang import find_idle_hangs
from collector.stacks import SUSPENDED

RANKS = (("node", 300, 6000), ("node", 301, 6001))
IN_BARRIER = [["barrier", f"{TORCH}/distributed/distributed_c10d.py", 1], ["main", "/home/me/train.py", 30]]
AT_LOCK = [["load", "/home/me/train.py", 12]]
IN_EVENT = [["Event.wait", f"{LIBRARY}/threading.py", 1], ["main", "/home/me/serve.py", 9]]
IN_LAUNCHER = [["sleep", f"{TORCH}/distributed/elastic/agent/server/api.py", 1]]
IN_RUN = [["Popen._try_wait", f"{LIBRARY}/subprocess.py", 1], ["main", "/home/me/launch.py", 9]]


def entry(key, frames, waits, parent=1, **more):
    return process(key, frames, waits, parent=parent, **more)


def idle(*processes, seconds=500.0, cpu_seconds_after=0.0):
    """Return a watched run with a series of three dumps, and its process's CPU time after it."""
    script = Script()
    script.manifest["watched"] = True
    add_stacks(script, *processes, idle_seconds=seconds)
    rows = [
        {
            "time_ns": ns(START_SECONDS + 52 + second),
            "process_pid": MAIN[1],
            "process_start_ticks": MAIN[2],
            "role": 2,
            "cpu_ns": ns(5 + cpu_seconds_after * second / 10),
            "alive": 1,
        }
        for second in range(11)
    ]
    return script.add("process", rows, AGENT)


def found(script):
    return find_idle_hangs(script.tables())


WAITING = entry(MAIN, FOR_A_BATCH, POLL)
IDLE = entry(WORKERS[0], FOR_AN_INDEX, POLL, MAIN[1])


@pytest.mark.parametrize(("seconds", "severity"), [(125.0, "info"), (485.0, "warning")])
def test_the_worker_behind_a_process_that_waits_for_a_batch_is_named(seconds, severity):
    stuck = entry(WORKERS[1], IN_A_SAMPLE, "waiting for the network", MAIN[1])
    (finding,) = found(idle(WAITING, IDLE, stuck, seconds=seconds))
    assert (finding.kind, finding.severity) == ("hang", severity)
    assert (finding.locus.role, finding.locus.pid) == ("worker", WORKERS[1][1])
    assert "Files.__getitem__, dataset.py:41" in finding.summary
    assert "the watched process (pid 100) waits for its batch" in finding.summary


def test_a_worker_that_still_receives_data_is_slow_and_no_warning():
    loading = entry(WORKERS[1], IN_A_SAMPLE, POLL, MAIN[1], moved_seconds_ago=3.0)
    (finding,) = found(idle(WAITING, IDLE, loading))
    assert finding.severity == "info"
    assert "is slow" in finding.summary


def test_a_run_that_computes_again_has_no_hang():
    stuck = entry(WORKERS[1], IN_A_SAMPLE, LOCK, MAIN[1])
    assert found(idle(WAITING, IDLE, stuck, cpu_seconds_after=3.0)) == []


def test_the_rank_that_has_not_entered_the_collective_is_named():
    script = idle(
        entry(RANKS[0], IN_BARRIER, POLL, MAIN[1]),
        entry(RANKS[1], AT_LOCK, LOCK, MAIN[1]),
        entry(MAIN, IN_LAUNCHER, "asleep"),
    )
    (finding,) = found(script)
    assert (finding.locus.pid, finding.severity) == (301, "warning")
    assert "1 other rank waits for it" in finding.summary


@pytest.mark.parametrize("launcher", [(IN_LAUNCHER, "asleep"), (IN_RUN, "waiting for a child process")])
def test_ranks_that_all_wait_are_information(launcher):
    ranks = [entry(rank, IN_BARRIER, POLL, MAIN[1]) for rank in RANKS]
    (finding,) = found(idle(entry(MAIN, *launcher), *ranks))
    assert (finding.locus.pid, finding.severity) == (300, "info")


def test_ranks_of_a_server_that_wait_for_the_rank_with_the_requests_are_information():
    serving = entry(RANKS[0], [["select", f"{LIBRARY}/selectors.py", 1], ["serve", "/srv/serve.py", 3]], POLL)
    (finding,) = found(idle(serving, entry(RANKS[1], IN_BARRIER, POLL)))
    assert finding.severity == "info"


@pytest.mark.parametrize(
    ("name", "begin", "advice"),
    [
        ("train.py", "_bootstrap", "get_context('spawn')"),
        ("other.py", "_bootstrap", "same order"),
        ("train.py", "<module>", "same order"),  # a launcher that starts the script again
    ],
)
def test_a_lock_in_a_process_that_was_forked_is_one_that_it_inherited(name, begin, advice):
    child = ("node", 301, 6001)
    frames = [*AT_LOCK, [begin, f"{LIBRARY}/multiprocessing/process.py", 314]]
    script = idle(entry(MAIN, IN_RUN, "waiting for a child process"), entry(child, frames, LOCK, MAIN[1]))
    for key, program in ((MAIN, "train.py"), (child, name)):
        seen = {"process_pid": key[1], "process_start_ticks": key[2], "is_python": True, "has_torch": True}
        script.event(START_SECONDS, "process-seen", AGENT, argv=["python", program], obstacle=None, **seen)
    (finding,) = found(script)
    assert finding.locus.pid == child[1]
    assert advice in finding.advice[0].text


def test_a_lock_is_a_hang_in_an_epoch_and_information_elsewhere():
    at_lock = entry(MAIN, AT_LOCK, LOCK)
    assert [finding.severity for finding in found(idle(at_lock, IDLE))] == ["warning"]
    assert [finding.severity for finding in found(idle(at_lock))] == ["info"]


def test_a_process_that_a_signal_has_suspended_is_named_with_or_without_its_stacks():
    stopped = entry(MAIN, IN_MAIN, SUSPENDED)
    for seen in (stopped, {**stopped, "unread": SUSPENDED}):
        (finding,) = found(idle(seen))
        assert finding.severity == "warning"
        assert "it is suspended (SIGSTOP or a debugger)" in finding.summary
        assert finding.advice[0].text.startswith(f"Resume it with `kill -CONT {MAIN[1]}`")


@pytest.mark.parametrize(
    ("frames", "waits"),
    [(IN_EVENT, LOCK), (IN_MAIN, "asleep"), (IN_MAIN, "waiting for a connection")],
    ids=["a server", "a script that polls", "a socket server"],
)
def test_a_process_that_idles_by_design_is_silent(frames, waits):
    assert found(idle(entry(MAIN, frames, waits))) == []


def test_dumps_of_the_flight_recorder_name_the_missing_rank_where_all_that_are_here_wait():
    script = idle(entry(RANKS[0], IN_BARRIER, LOCK))
    for rank in (0, 1):
        script.event(START_SECONDS + 53, "flight-recorder", AGENT, **fields(data("missing", rank), rank=rank))
    (finding,) = found(script)
    assert "rank 1 has not entered all_reduce number 3 of default_pg" in finding.summary
    assert {fact.name: fact.value for fact in finding.evidence}["missing_ranks"] == "1"
