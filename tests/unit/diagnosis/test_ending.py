"""The exit record of a run that died, and the list of what happened in its last minute."""

import io
import json
import re

import pandas as pd
import pytest
from rich.console import Console
from simulated_runs import MAIN, MIB, START_SECONDS, jittered, ns, sample_host, sample_process, simulate

from collector.diagnosis.verdict import diagnose
from collector.report import card, exit_record
from training_harness.records import ROLE_MAIN, ROLE_WORKER

WORKER = ("node", 1000, 7000)
LIMIT_BYTES = 400 * MIB
SECONDS = [START_SECONDS + second for second in range(120)]
END_SECONDS = SECONDS[-1]


def training():
    """A training of 120 s with one worker, which is still there at the last sample."""
    script = simulate(workers=1, prefetch=2, service=jittered(0.1), consumer=jittered(0.5), batches=235)
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=[200 * MIB] * 120, rss=[300 * MIB] * 120, rank=0)
    return script


def killed_for_memory(**counts):
    """Its worker's memory reaches the cgroup's limit within the last minute, and the kernel kills it."""
    script = training()
    held = [(80 + second) * MIB for second in range(120)]
    sample_process(script, SECONDS, WORKER, ROLE_WORKER, private=held, rss=held, worker=0, loader=0, rank=0)
    sample_host(
        script,
        SECONDS,
        demand=[value + 200 * MIB for value in held],
        limit=LIMIT_BYTES,
        cgroup_oom_kill_count=[0] * 119 + [1],
        **counts,
    )
    died = {"loader": 0, "epoch": 0, "worker": 0, "worker_pid": WORKER[1], "exit_code": -9, "last_index": 230}
    script.event(END_SECONDS - 0.5, "worker-died", **died)
    script.event(END_SECONDS, "command-exit", exit_status=1, command_pid=MAIN[1])
    return script


def texts(verdict):
    return [happening.text for happening in verdict.ending.happenings]


def test_card_of_a_run_that_died_says_each_thing_once():
    verdict = diagnose(killed_for_memory().tables())
    stream = io.StringIO()
    Console(file=stream, width=300).print(
        card.card(verdict, run_id="run", name="run", command=lambda *words: " ".join(words))
    )
    text = stream.getvalue()
    assert not re.search(r"^(Reason|Victim|Signal|Last memory|When) ", text, re.MULTILINE)
    assert text.count("400 MiB, cgroup") == 1
    assert text.count("Limit ") == 1


def test_record_of_a_worker_killed_for_memory_names_victim_limit_signal_and_memory():
    verdict = diagnose(killed_for_memory().tables())
    record = dict(exit_record(verdict.ending.record))
    assert record["Reason"] == "out of host memory"
    assert record["Victim"].startswith("worker 0 of loader 0")
    assert record["Last memory"] == "199 MiB"
    assert record["Limit"] == "400 MiB, cgroup"
    assert record["Signal"] == "SIGKILL"
    assert record["Exit status"] == "1, of the command"


def test_last_minute_lists_the_full_memory_the_kill_the_death_and_the_end_in_this_order():
    verdict = diagnose(killed_for_memory().tables())
    told = texts(verdict)
    places = [
        next(place for place, text in enumerate(told) if words in text)
        for words in (
            "Memory in use reached 95% of the cgroup's limit of 400 MiB",
            "The kernel killed a process of this cgroup",
            "Worker 0 of loader 0 died: SIGKILL",
            "The command ended: exit status 1",
        )
    ]
    assert places == sorted(places)
    assert all(-60 <= happening.seconds <= 0 for happening in verdict.ending.happenings)


def test_kill_on_the_host_is_listed_only_if_memory_was_short():
    def kill_lines(available_bytes):
        script = training()
        demand = [24 * 2**30 - available_bytes] * 120
        sample_host(script, SECONDS, demand=demand, host_oom_kill_count=[7] * 119 + [8])
        script.event(END_SECONDS, "command-exit", exit_status=-11, command_pid=MAIN[1])
        return [text for text in texts(diagnose(script.tables())) if "The kernel killed" in text]

    assert kill_lines(200 * MIB) == ["The kernel killed a process of this host: out of memory."]
    assert kill_lines(18 * 2**30) == []  # in the cgroup of another job


def test_a_kill_that_the_cgroup_did_not_count_is_none_of_the_run():
    verdict = diagnose(killed_for_memory(host_oom_kill_count=[0] * 112 + [1] * 7 + [2]).tables())
    assert [text for text in texts(verdict) if "The kernel killed" in text] == [
        "The kernel killed a process of this cgroup: out of memory."
    ]
    assert verdict.findings[0].value_of("host_oom_kill_count") == 1


def test_checkpoints_of_the_last_minute_alone_are_listed():
    script = killed_for_memory()
    for seconds in (END_SECONDS - 90, END_SECONDS - 10):
        script.event(seconds + 1, "checkpoint", begun_ns=ns(seconds))
    verdict = diagnose(script.tables())
    checkpoints = [h for h in verdict.ending.happenings if h.text == "A checkpoint began."]
    assert [round(h.seconds) for h in checkpoints] == [-10]


def test_epochs_of_the_last_minute_are_named_as_on_the_axis():
    script = simulate(
        workers=1, prefetch=2, service=jittered(0.1), consumer=jittered(0.5), batches=20, epochs=5, loader=2
    )
    script.events = [
        {**event, "variable": "train_loader"} if event["kind"] == "loader" else event for event in script.events
    ]
    end = script.now_seconds
    script.event(end, "exception", type="KeyError", message="'label'", site="train.py:37, in main")
    script.event(end, "command-exit", exit_status=1, command_pid=MAIN[1])
    told = texts(diagnose(script.tables()))
    assert [text for text in told if "poch" in text] == [
        f"Epoch {epoch} of loader 2 (train_loader) began."
        for epoch in (2, 3, 4)  # the last three
    ]
    assert any(text == "The last of 100 steps ended." for text in told)


def test_epoch_that_ended_in_its_first_batch_is_no_evaluation():
    script = simulate(workers=1, prefetch=2, service=jittered(0.1), consumer=jittered(0.5), batches=20, epochs=3)
    for name, last in (("batch", 41), ("step", 40)):  # records of 2 epochs of 20 batches each, and a batch
        script.parts[name] = [pd.concat(script.parts[name], ignore_index=True).iloc[:last]]
    script.event(script.now_seconds, "exception", type="KeyError", message="'label'", site="train.py:37, in main")
    script.event(script.now_seconds, "command-exit", exit_status=1, command_pid=MAIN[1])
    told = texts(diagnose(script.tables()))
    assert "Epoch 2 of loader 0 began." in told
    assert not any("evaluation" in text for text in told)


def test_uncaught_exception_is_the_reason_and_its_time_is_the_end_of_the_victim():
    script = training()
    script.event(SECONDS[100], "exception", type="KeyError", message="'label'", site="train.py:37, in main")
    script.event(END_SECONDS, "command-exit", exit_status=1, command_pid=MAIN[1])
    verdict = diagnose(script.tables())
    record = dict(exit_record(verdict.ending.record))
    assert record["Reason"] == "uncaught exception"
    assert "Signal" not in record
    assert record["When"].startswith("1 min 40 s after the start")
    assert any("raised KeyError: 'label'" in text for text in texts(verdict))


@pytest.mark.parametrize(("exits_after", "followers_count"), [(50, 0), (110, 1), (None, 1)])
def test_a_training_that_had_ended_before_does_not_follow(exits_after, followers_count):
    script, other = training(), ("node", 500, 3000)
    script.event(SECONDS[1], "process-start", other)
    if exits_after is not None:
        script.event(SECONDS[exits_after], "process-exit", other)
    script.event(SECONDS[100], "exception", type="KeyError", message="'label'", site="train.py:37, in main")
    script.event(END_SECONDS, "command-exit", exit_status=1, command_pid=MAIN[1])
    assert diagnose(script.tables()).ending.record.followers_count == followers_count


def test_a_trial_that_had_failed_before_does_not_follow_the_death_of_a_later_worker():
    script, trial = killed_for_memory(), ("node", 50, 3000)
    script.event(START_SECONDS - 9, "process-start", trial)
    script.event(
        START_SECONDS - 5, "exception", trial, type="KeyError", message="'label'", site="train.py:37, in main"
    )
    script.event(START_SECONDS, "process-start", MAIN)
    record = diagnose(script.tables()).ending.record
    assert (record.victim.role, record.followers_count) == ("worker", 0)


def test_record_says_how_much_was_trained_after_the_last_checkpoint():
    script = killed_for_memory()
    script.event(SECONDS[30], "checkpoint", begun_ns=ns(SECONDS[29]))
    script.event(SECONDS[60], "checkpoint", begun_ns=ns(SECONDS[60] - 0.2))
    tables = script.tables()
    steps_count = int((tables.stream("step")["time_ns"] <= ns(SECONDS[60])).sum())
    record = diagnose(tables).ending.record
    assert record.saved_steps == steps_count
    assert dict(exit_record(record))["Last torch.save"] == f"59 s before the end, after {steps_count} steps"
    assert "Last torch.save" not in dict(exit_record(diagnose(killed_for_memory().tables()).ending.record))


def test_a_worker_that_raised_is_named_by_its_number():
    script = killed_for_memory()
    script.event(END_SECONDS - 1, "exception", WORKER, type="EOFError", message="closed")
    assert "Worker 0 of loader 0 raised EOFError: closed" in texts(diagnose(script.tables()))


def test_run_that_ended_normally_has_no_exit_record():
    script = simulate(workers=1, prefetch=2, service=jittered(0.1), consumer=jittered(0.5), batches=20)
    script.event(START_SECONDS + 20, "process-exit", lost_count=0, detached=False)
    verdict = diagnose(script.tables())
    assert verdict.ending is None
    body = card.report(verdict, run_id="r", name="n")
    assert json.loads(json.dumps(body))["ending"] is None
