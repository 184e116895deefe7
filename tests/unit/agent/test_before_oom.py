"""The action before a limit: the moment at which it is due, and its effect."""

import json
import os
import signal
import subprocess
import sys

import pytest

from collector.agent.live.before_oom import BeforeOom, parse_action
from collector.agent.live.limits import Headroom
from collector.agent.samplers.procfs import LocalProcess
from collector.findings import Eta, Finding, Limit, Locus, measurements
from collector.store.runs.run import Run
from training_harness.journal import start_ticks

GIB = 2**30


def host(used_bytes, limit_bytes=8 * GIB):
    return {
        "host": [
            {
                "memory_available_bytes": 60 * GIB,
                "memory_total_bytes": 64 * GIB,
                "cgroup_limit_bytes": limit_bytes,
                "cgroup_anon_bytes": used_bytes,
            }
        ]
    }


def headroom_of(*used_bytes):
    headroom = Headroom()
    for second, used in enumerate(used_bytes):
        headroom.note(float(second), host(used))
    return headroom


def forecast(low_seconds, **more):
    return Finding(
        kind="host-oom-risk",
        severity="warning",
        confidence=0.9,
        summary="Memory runs out.",
        evidence=measurements(9, "0-30 s", headroom_bytes=GIB, demand_bytes=GIB),
        limit=Limit(name="cgroup", value=8.0 * GIB, unit="bytes"),
        eta=Eta(low_seconds=low_seconds, mid_seconds=2 * low_seconds, high_seconds=3 * low_seconds),
        **more,
    )


def risks(headroom):
    return [level.risk for level, _ in headroom.nearly_full()]


@pytest.fixture
def requests(tmp_path):
    """A run that listens, and the requests that were put there."""
    before_oom = BeforeOom()
    before_oom.note_event({"kind": "risk-listener", "lead_seconds": 60.0})
    before_oom.begin(Run(tmp_path), "train")

    def put():
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/*.json"))]

    return before_oom, put


@pytest.mark.parametrize(
    ("used_gib", "is_due"),
    [
        ((7.5, 7.55, 7.6, 7.65), True),  # 95 % of 8 GiB, and growing
        ((7.7, 7.7, 7.7, 7.7), False),  # full, at rest
        ((4.0, 5.0, 6.0, 6.5), True),  # the next three seconds would fill the rest
        ((2.0, 3.0, 4.0, 5.0), False),  # as fast, but far from the limit: the start of a training
        ((7.9, 7.8, 7.7, 7.65), False),  # falling
        ((3.5, 6.5, 4.0, 7.0), False),  # up and down, as with batches of varying sizes
    ],
)
def test_limit_is_nearly_full_only_while_its_use_grows(used_gib, is_due):
    assert risks(headroom_of(*(used * GIB for used in used_gib))) == ["host-oom-risk"] * is_due


def test_full_gpu_is_no_risk_by_itself():
    headroom = Headroom()
    for second in range(5):
        headroom.note(float(second), {"device": [{"device": 0, "total_bytes": 100, "used_bytes": 95 + second}]})
    assert not risks(headroom)


def test_another_limit_that_binds_is_no_growth():
    headroom = headroom_of(0.1 * GIB, 0.1 * GIB, 0.1 * GIB)
    for second in range(3, 20):
        headroom.note(float(second), host(0.1 * GIB, limit_bytes=0.2 * GIB))
    assert headroom.nearest_seconds == float("inf")


def test_forecast_is_due_when_its_lower_end_is_within_the_lead_time(requests):
    before_oom, put = requests
    before_oom.note_findings([forecast(90.0)], now_seconds=1000.0)
    assert not list(before_oom.tick(1020.0, Headroom(), [])), "70 s are left"
    [event] = before_oom.tick(1031.0, Headroom(), [])
    assert (event["risk"], event["limit"], event["action"]) == ("host-oom-risk", "cgroup", "function")
    assert [request["finding"]["summary"] for request in put()] == ["Memory runs out."]
    assert not list(before_oom.tick(1080.0, Headroom(), [])), "once for each limit"

    before_oom.run_ended()
    assert put() == []


def test_forecast_that_the_next_verdict_drops_is_forgotten(requests):
    before_oom, _ = requests
    before_oom.note_findings([forecast(90.0)], now_seconds=0.0)
    before_oom.note_findings([], now_seconds=15.0)
    assert not list(before_oom.tick(80.0, Headroom(), []))


def test_only_a_process_with_a_handler_gets_the_signal(tmp_path, capfd):
    handler = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); "
    programs = [f"{start}print(flush=True); time.sleep(60)" for start in (handler, "import time; ")]
    children = [
        subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) for program in programs
    ]
    for child in children:
        child.stdout.readline()
    listening, deaf = children
    before_oom = BeforeOom(signal.SIGUSR1, lead_seconds=30.0)
    before_oom.begin(Run(tmp_path), "train")
    before_oom.note_findings([forecast(10.0)], now_seconds=0.0)
    processes = [LocalProcess(child.pid, start_ticks(child.pid)) for child in children]
    [event] = before_oom.tick(1.0, Headroom(), processes)
    assert not list(before_oom.tick(2.0, Headroom(), processes)), "once for each process"
    assert (event["action"], event["pids"]) == ("SIGUSR1", [listening.pid])
    assert listening.wait(10) == 7
    assert deaf.poll() is None
    deaf.kill()
    for child in children:
        child.communicate()
    lines = capfd.readouterr().err
    assert f"SIGUSR1 would end process {deaf.pid}" in lines
    assert "SIGUSR1 sent. Memory runs out." in lines


def test_forecast_of_another_host_is_left_to_its_collector(requests):
    before_oom, put = requests
    before_oom.note_findings([forecast(1.0, locus=Locus(host="elsewhere"))], now_seconds=0.0)
    assert not list(before_oom.tick(1.0, Headroom(), []))
    assert put() == []


def test_nothing_is_done_unless_somebody_asked_for_it(tmp_path):
    before_oom = BeforeOom()
    before_oom.begin(Run(tmp_path), "train")
    before_oom.note_findings([forecast(1.0)], now_seconds=0.0)
    assert not before_oom.is_wanted
    assert not list(before_oom.tick(1.0, headroom_of(7.6 * GIB, 7.7 * GIB, 7.8 * GIB), []))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["USR1", "SIGUSR1", "usr1"])
def test_signal_has_any_of_its_names(text):
    assert parse_action(text) is signal.SIGUSR1


@pytest.mark.parametrize("text", ["KILL", "SIGSTOP", "SIGUSR9", "usr3", "TREM", "10", "", "  "])
def test_unusable_action_is_refused(text):
    with pytest.raises(ValueError, match="give"):
        parse_action(text)


def test_other_text_is_a_command():
    assert parse_action("true") == "true"
    assert parse_action("scancel --signal=USR1 $SLURM_JOB_ID").startswith("scancel")
