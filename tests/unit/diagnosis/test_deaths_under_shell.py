"""Trainings that end badly under a shell, whose own status may be another one."""

import pytest
from ended_runs import DEATHS, end_run, end_training, end_workers, training
from simulated_runs import START_SECONDS, Script

from collector.diagnosis.verdict import diagnose


@pytest.mark.parametrize(
    ("parent", "dataset_length", "is_found"),
    [
        ("bash", 4000, True),
        ("timeout", 4000, True),
        ("python3", 4000, False),
        ("bash", 480, False),
        ("bash", None, False),
    ],
)
def test_training_that_vanishes_amid_an_epoch_under_another_program(parent, dataset_length, is_found):
    """The status of a pipeline is that of its last program, also where a signal ended the training before."""
    script = end_run(end_workers(training(), reason="parent-gone"), 0)
    script.manifest["command"]["pid"] = 99
    start = next(event for event in script.events if event["kind"] == "process-start")
    start["parent_pid"] = 99
    is_python = parent == "python3"
    seen = {"argv": [f"/usr/bin/{parent}"], "is_python": is_python, "process_pid": 99, "process_start_ticks": 9}
    script.event(START_SECONDS, "process-seen", **seen)
    for event in script.events:
        if event["kind"] == "loader":
            event |= {"dataset_length": dataset_length, "batch_size": 8}
    found = [finding for finding in diagnose(script.tables()).findings if finding.kind in DEATHS]
    assert [(finding.kind, finding.severity) for finding in found] == [("killed", "warning")] * is_found
    for finding in found:
        assert "ended in the middle of an epoch without recording its end" in finding.summary
        assert finding.summary.endswith("The command went on, and ended with exit status 0.")
        assert "the log and the exit status of the program that started it" in finding.advice[0].text
        assert "Begin a shell script with `#!/bin/bash` and `set -eo pipefail`" in finding.advice[0].text


@pytest.mark.parametrize(("status", "told"), [(None, "no images in /data"), (3, "exit status 3")])
def test_training_that_exits_by_itself_under_a_shell(status, told):
    script = end_workers(training())
    script.manifest["command"]["pid"] = 99
    script.event(script.now_seconds, "exit-message", message=told, status=status, site="/my/train.py:12, in main")
    found = [one for one in diagnose(end_run(end_training(script), 0).tables()).findings if one.kind in DEATHS]
    assert [(finding.kind, finding.severity) for finding in found] == [("crashed", "warning")]
    went_on = "The command went on, and ended with exit status 0."
    assert found[0].summary.endswith(f"called sys.exit at train.py:12, in main: {told}. {went_on}")


@pytest.mark.parametrize("begins", [2, 12])
def test_of_trainings_that_follow_each_other_the_last_one_ended_the_command(begins):
    """Three fail; all begin one after another, or at once, as ranks of which the first one is the cause."""
    script = Script()
    script.manifest["command"].update(pid=99, start_ticks=4000)
    for number, line in enumerate((9, 9, 14)):
        key, begin = ("node", 200 + number, 8000 + number), START_SECONDS + begins * number
        script.event(begin, "process-start", key, parent_pid=99)
        raised = {"type": "RuntimeError", "message": "shapes differ", "site": f"/home/me/trial.py:{line}, in main"}
        script.event(begin + 10, "exception", key, **raised)
    script.now_seconds = START_SECONDS + 60
    found = [one for one in diagnose(end_run(script, 1).tables()).findings if one.kind in DEATHS]
    places = [(one.severity, one.locus.pid, one.value_of("victims_count")) for one in found]
    if begins == 2:
        assert places == [("critical", 200, None)]
    else:
        assert places == [("critical", 202, None), ("warning", 200, 2)]
        assert found[1].summary.endswith("shapes differ. The command went on.")


@pytest.mark.parametrize(("begins", "raised"), [(12, ["killed", "crashed"]), (2, ["killed"])])
def test_an_exception_counts_next_to_a_kill_if_it_was_raised_before_the_killed_training_began(begins, raised):
    """A rank that loses its peer by a kill raises too; an earlier trial raises by itself."""
    script = Script()
    script.manifest["command"].update(pid=99, start_ticks=4000)
    for number in range(2):
        script.event(START_SECONDS + begins * number, "process-start", ("node", 200 + number, 8000), parent_pid=99)
    error = {"type": "RuntimeError", "message": "shapes differ", "site": "/home/me/trial.py:9, in main"}
    script.event(START_SECONDS + 10, "exception", ("node", 200, 8000), **error)
    script.now_seconds = START_SECONDS + 60
    verdict = diagnose(end_run(script, -9).tables())
    found = [one for one in verdict.findings if one.kind in DEATHS]
    assert [(one.kind, one.locus.pid) for one in found] == list(zip(raised, (201, 200), strict=False))
    assert verdict.ending.record.followers_count == 2 - len(raised)


@pytest.mark.parametrize(
    ("kind", "later_trial", "severities"),
    [
        ("KeyError", True, ["critical", "warning"]),
        ("KeyError", False, ["critical"]),
        ("CalledProcessError", True, ["critical"]),
    ],
)
def test_the_command_s_own_error_after_a_trial_that_failed_is_its_end(kind, later_trial, severities):
    script, command = Script(), ("node", 99, 4000)
    script.manifest["command"].update(pid=99, start_ticks=4000)
    script.event(START_SECONDS, "process-attached", command, argv=["python", "sweep.py"], parent_pid=90)
    script.event(START_SECONDS + 1, "process-start", ("node", 200, 8000), parent_pid=99)
    raised = {"type": "RuntimeError", "message": "diverged", "site": "/home/me/trial.py:3, in main"}
    script.event(START_SECONDS + 9, "exception", ("node", 200, 8000), **raised)
    if later_trial:
        script.event(START_SECONDS + 10, "process-start", ("node", 201, 8001), parent_pid=99)
        script.event(START_SECONDS + 20, "process-exit", ("node", 201, 8001), lost_count=0)
    raised = {"type": kind, "message": "'best'", "site": "/home/me/sweep.py:50, in main"}
    script.event(START_SECONDS + 30, "exception", command, **raised)
    script.now_seconds = START_SECONDS + 40
    found = [one for one in diagnose(end_run(script, 1).tables()).findings if one.kind in DEATHS]
    assert [one.severity for one in found] == severities
    assert found[0].locus.pid == (99 if len(found) == 2 else 200)
    if len(found) == 2:
        assert found[1].summary.endswith("diverged. The command went on.")
    ending = "diverged. The command then ended at sweep.py:50, in main with KeyError: 'best'."
    assert found[0].summary.endswith(ending) == (kind == "KeyError" and not later_trial)


@pytest.mark.parametrize(("status", "ends"), [(2, 201), (1, 200)])
def test_a_training_that_called_sys_exit_after_another_one_raised_ended_the_command(status, ends):
    """A shell passes on the status of its last program, or has one of its own."""
    script = Script()
    script.manifest["command"].update(pid=99, start_ticks=4000)
    for number in range(2):
        script.event(START_SECONDS + 12 * number, "process-start", ("node", 200 + number, 8000), parent_pid=99)
    raised = {"type": "KeyError", "message": "'label'", "site": "/home/me/train.py:30, in main"}
    script.event(START_SECONDS + 10, "exception", ("node", 200, 8000), **raised)
    said = {"message": "exit status 2", "status": 2, "site": "/home/me/train.py:7, in main", "handled": None}
    script.event(START_SECONDS + 40, "exit-message", ("node", 201, 8000), **said)
    script.event(START_SECONDS + 40.1, "process-exit", ("node", 201, 8000), lost_count=0)
    script.now_seconds = START_SECONDS + 60
    found = [one for one in diagnose(end_run(script, status).tables()).findings if one.kind in DEATHS]
    places = [(one.locus.pid, one.severity) for one in found]
    assert places == ([(201, "critical"), (200, "warning")] if ends == 201 else [(200, "critical")])
