"""Judge the time after the last step, such as an evaluation without a DataLoader, like one without iterations."""

import numpy as np
import pytest
from ended_runs import COLLECTOR, end_run
from simulated_runs import (
    MAIN,
    MIB,
    START_SECONDS,
    Script,
    jittered,
    ns,
    sample_host,
    sample_process,
    simulate,
    start_training,
)

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN

#: Seconds of the simulated training, and of what follows it.
TRAINED, FOLLOWED = 20, 180
RAMP = 10.0 * np.arange(FOLLOWED)


def ended(followed, exit_status, *, total=10**13, trained=None):
    """Return a run that trains, with `trained` MiB more, goes on without batches with `followed` more, and ends."""
    script = simulate(workers=2, prefetch=2, service=jittered(0.1), consumer=jittered(0.2), batches=100)
    seconds = START_SECONDS + 1 + np.arange(TRAINED + len(followed))
    trained = np.zeros(TRAINED) if trained is None else trained
    held = (300 + np.concatenate([trained, trained[-1] + followed])) * MIB
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held)
    sample_host(script, seconds, demand=held + 2000 * MIB, total=total)
    script.event(START_SECONDS, "collector-start", COLLECTOR, resumed=False, command_pid=MAIN[1])
    if exit_status == 0:
        script.event(seconds[-1], "process-exit", lost_count=0)
    script.now_seconds = float(seconds[-1]) + 1
    return end_run(script, exit_status)


def found(script, kind):
    return [finding for finding in diagnose(script.tables()).findings if finding.kind == kind]


def check(script, name):
    return next(one for one in diagnose(script.tables()).checks if one.name == name)


def test_growth_after_the_last_step_of_a_killed_run_is_a_leak():
    (leak,) = found(ended(RAMP, -9), "main-heap-leak")
    assert leak.severity == "warning"
    assert leak.summary.endswith("It did so after the training's last step or batch.")
    assert "per step" not in leak.summary


def test_growth_that_ended_with_a_finished_run_is_information_and_not_called_fine():
    script = ended(RAMP, 0)
    (leak,) = found(script, "main-heap-leak")
    assert leak.severity == "info"
    assert check(script, "training process's memory").status == "not judged"


def test_steady_memory_after_the_last_step_is_fine():
    script = ended(np.zeros(FOLLOWED), -9)
    assert found(script, "main-heap-leak") == []
    assert check(script, "training process's memory").status == "fine"


def test_a_limit_that_the_run_nears_after_its_last_step_is_a_risk_unless_the_run_finished():
    near = (2000 + 300 + 2300) * MIB
    (risk,) = found(ended(RAMP, -9, total=near), "host-oom-risk")
    assert (risk.severity, risk.rate.value > 9 * MIB) == ("critical", True)
    assert found(ended(RAMP, 0, total=near), "host-oom-risk") == []


def test_a_run_that_saves_before_a_limit_is_not_advised_to_do_so():
    near = (2000 + 300 + 2300) * MIB
    (risk,) = found(ended(RAMP, -9, total=near), "host-oom-risk")
    assert "--before-oom SIGUSR1" in risk.advice[0].text
    for kind, process, fields in (
        ("risk-listener", MAIN, {"lead_seconds": 60.0}),
        ("collector-start", COLLECTOR, {"acts_before_oom": True}),
    ):
        saving = ended(RAMP, -9, total=near)
        saving.event(START_SECONDS, kind, process, **fields)
        (risk,) = found(saving, "host-oom-risk")
        assert risk.advice[0].text == "Fix the growth (see the leak findings)"


def test_growth_in_a_time_no_longer_than_three_pauses_before_it_may_be_that_of_a_step():
    followed = np.concatenate([np.zeros(14), 10.0 * np.arange(20)])
    assert len(found(ended(followed, -9), "main-heap-leak")) == 1
    script = ended(followed, -9)
    script.add("step", [{"time_ns": ns(START_SECONDS + TRAINED + 14), "step": 100, "ended_by": 1}], MAIN)
    assert found(script, "main-heap-leak") == []


def test_memory_that_rests_since_the_last_step_is_not_about_to_run_out():
    """The training leaked until it hung, and someone ended it."""
    near = (2000 + 300 + 2600) * MIB
    rising = 100.0 * np.arange(TRAINED)
    at_rest = ended(np.zeros(FOLLOWED), -15, total=near, trained=rising)
    (risk,) = found(at_rest, "host-oom-risk")
    assert risk.severity == "warning"
    assert risk.summary.endswith("Since the last step or batch it has hardly grown.")
    (risk,) = found(ended(np.zeros(2), -15, total=near, trained=rising), "host-oom-risk")
    assert risk.severity == "critical"


@pytest.mark.parametrize("since_step", [4, 10, 25])
def test_memory_that_rests_within_a_long_step_is_about_to_run_out(since_step):
    """Each step of 30 s takes 100 MiB at its end."""
    script = start_training(Script())
    ends = START_SECONDS + 30.0 * np.arange(1, 13)
    script.add("step", [{"time_ns": ns(end), "step": step} for step, end in enumerate(ends)], MAIN)
    seconds = np.arange(START_SECONDS + 1, ends[-1] + since_step + 1)
    held = (300 + 100.0 * np.searchsorted(ends, seconds, side="right")) * MIB
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held)
    sample_host(script, seconds, demand=held + 2000 * MIB, total=(2000 + 300 + 1500) * MIB)
    script.living, script.now_seconds = frozenset({MAIN}), float(seconds[-1])
    (risk,) = found(script, "host-oom-risk")
    assert risk.severity == "critical"
    assert "hardly grown" not in risk.summary
