"""Definition of a step, the share of the run that is lost, and values that are unknown without a DataLoader."""

import dataclasses

import numpy as np
import pytest
from growing_memory import RAMP, findings_of, memory, training
from simulated_runs import (
    MAIN,
    MIB,
    START_SECONDS,
    Script,
    finish,
    jittered,
    ns,
    sample_host,
    sample_process,
    simulate,
    start_training,
)

from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.summary import step_unit
from collector.diagnosis.verdict import diagnose
from collector.store.runs.run import Run
from training_harness import layout
from training_harness.journal import Identity, JournalWriter
from training_harness.records import MISSING, ROLE_MAIN, STEP, UNIT_BATCH, UNIT_OPTIMIZER, UNIT_PASS, UNIT_SCRIPT

PARENT, CHILDREN = ("node", 50, 4000), [("node", 100 + child, 5000 + child) for child in range(2)]


def step_rows(count, unit, begin=START_SECONDS + 2, every=0.2, **more):
    return [
        {"time_ns": ns(begin + every * k), "step": k, "duration_ns": ns(every), "unit": unit, **more}
        for k in range(count)
    ]


@pytest.fixture
def load_steps(tmp_path):
    """Writes steps into the journals of a run, each a unit and the time in the optimizer, and loads its tables."""

    def load(*steps):
        run = Run(layout.create_run(tmp_path, name="units", argv=["train.py"]))
        writer = JournalWriter(run.journal_dir, STEP, Identity(host="node", pid=1, start_ticks=2))
        missing = {column.name: MISSING[column.code] for column in STEP.columns}
        for number, (unit, optimizer_ns) in enumerate(steps):
            known = {"time_ns": number + 1, "step": number, "unit": unit, "optimizer_ns": optimizer_ns}
            writer.append(*(missing | {name: value for name, value in known.items() if value is not None}).values())
        writer.close()
        return load_tables(run)

    return load


@pytest.mark.parametrize(
    ("steps", "count", "unit"),
    [
        ([(UNIT_PASS, None)] * 5 + [(UNIT_BATCH, None)] * 20 + [(UNIT_OPTIMIZER, 9)] * 3, 3, "optimizer step"),
        ([(UNIT_PASS, None)] * 5 + [(UNIT_BATCH, None)] * 20, 20, "batch"),
        ([(UNIT_OPTIMIZER, 9)] * 3 + [(UNIT_SCRIPT, None)] * 4, 4, "step"),
        ([(None, 9)] * 3 + [(None, None)] * 20, 3, "optimizer step"),
        ([(None, None)] * 20, 20, "batch"),
    ],
    ids=["optimizer", "batches", "own", "older run", "older evaluation"],
)
def test_only_steps_of_the_highest_unit_count(load_steps, steps, count, unit):
    tables = load_steps(*steps)
    assert (len(tables.stream("step")), tables.rows_count("step")) == (count, count)
    assert step_unit(tables) == unit


@pytest.mark.parametrize("passes", [True, False])
def test_an_actor_that_grows_is_judged_by_its_own_forward_passes(passes):
    """One process steps an optimizer, another one only makes forward passes, as in reinforcement learning."""
    learner, actor = CHILDREN
    script = start_training(start_training(key=learner), key=actor)
    script.add("step", step_rows(40, UNIT_OPTIMIZER, optimizer_ns=1000.0), learner)  # the actor goes on after it
    seconds = START_SECONDS + 1 + np.arange(50)
    held = (300 + 5 * np.arange(50)) * MIB
    sample_process(script, seconds, actor, ROLE_MAIN, private=held, rss=held)
    sample_host(script, seconds, demand=held, total=10**14)
    other = Script().add("step", step_rows(480, UNIT_PASS, every=0.1), actor).tables().stream("step")
    found = diagnose(dataclasses.replace(script.tables(), other_steps=other if passes else None)).findings
    (leak,) = [finding for finding in found if finding.kind == "main-heap-leak"]
    assert leak.severity == ("warning" if passes else "info")
    assert (" per step" in leak.summary, "No batch" in leak.summary) == (passes, not passes)
    assert leak.evidence[0].value > 180 * MIB


def test_steps_of_lower_units_are_read_apart(load_steps):
    assert load_steps(*[(UNIT_PASS, None)] * 5).other_steps is None
    tables = load_steps(*[(UNIT_PASS, None)] * 5 + [(UNIT_OPTIMIZER, 9)] * 3)
    assert tables.other_steps["step"].tolist() == [0, 1, 2, 3, 4]


def trainings(*, rank=None):
    """Two processes of 100 optimizer steps each; without ranks they are independent."""
    script = Script()
    for number, key in enumerate(CHILDREN):
        of_rank = None if rank is None else rank + number
        start_training(script, key=key, rank=of_rank)
        script.add("step", step_rows(100, UNIT_OPTIMIZER, optimizer_ns=1000.0), key, of_rank)
    return script


def test_independent_trainings_add_up_and_ranks_do_not():
    independent, ranks = (diagnose(trainings(rank=rank).tables()) for rank in (None, 0))
    assert (independent.steps, ranks.steps) == (200, 100)
    of_ranks = ranks.summary["throughput"]["steps_per_second"]
    assert independent.summary["throughput"]["steps_per_second"] == pytest.approx(2 * of_ranks)


def test_trainings_that_follow_each_other_are_no_faster_than_one():
    one, script = Script(), Script()
    for number, key in enumerate(CHILDREN):
        rows = step_rows(100, UNIT_OPTIMIZER, begin=START_SECONDS + 1000 * number, optimizer_ns=1000.0)
        start_training(script, key=key).add("step", rows, key)
        start_training(one, key=key).add("step", rows if number == 0 else [], key)
    rates = [diagnose(each.tables()).summary["throughput"]["steps_per_second"] for each in (script, one)]
    assert rates[0] == pytest.approx(rates[1])


def test_wait_of_a_short_process_is_no_warning():
    script = trainings()
    late = START_SECONDS + 60
    simulate(
        workers=0,
        prefetch=0,
        service=jittered(0.03),
        consumer=jittered(0.0005),
        batches=20,
        script=start_training(script, key=PARENT, begin=late),
        key=PARENT,
        begin=late,
    )
    script.now_seconds = late + 3
    found = diagnose(finish(script).tables())
    assert {finding.severity for finding in found.findings} == {"info"}
    (loading,) = [finding for finding in found.findings if finding.kind == "inline-loading"]
    assert loading.value_of("lost_wall_ratio") < 0.02


def test_data_wait_is_unknown_without_a_dataloader():
    script = start_training().add("step", step_rows(50, UNIT_OPTIMIZER, optimizer_ns=1000.0, data_wait_ns=0.0))
    verdict = diagnose(script.tables())
    assert verdict.summary["data_wait_ratio"] is None
    assert verdict.step_unit == "optimizer step"


def test_time_outside_the_step_has_its_share_on_the_cpu():
    phases = {"forward_ns": 40e6, "backward_ns": 30e6, "optimizer_ns": 10e6, "other_ns": 120e6}
    rows = step_rows(40, UNIT_OPTIMIZER, batches_count=0, **phases)
    for row in rows[::2]:
        row["outside_cpu_ns"] = 90e6  # read in every other stretch
    outside = diagnose(start_training().add("step", rows).tables()).summary["outside_step"]
    assert outside["ratio"] == pytest.approx(0.6)
    assert outside["cpu_ratio"] == pytest.approx(0.75)
    assert outside["seconds"] == pytest.approx(0.12)


def test_a_loop_with_a_dataloader_has_no_time_outside_the_step():
    tables = simulate(workers=2, prefetch=2, service=jittered(0.02), consumer=jittered(0.02), batches=50).tables()
    assert diagnose(tables).summary["outside_step"] is None


def training_with_validation(*, every=10, validation=20):
    """A training that validates by another loader after each `every` of 50 steps; batches of 8 samples."""
    script, now, rows, steps = start_training(), START_SECONDS + 2, [], []
    index = {0: 0, 1: 0}

    def batch(loader, seconds):
        nonlocal now
        now += seconds
        made = {"time_ns": ns(now), "loader": loader, "epoch": 0, "index": index[loader], "worker": -1}
        rows.append({**made, "wait_ns": ns(0.001), "samples_count": 8})
        index[loader] += 1

    for step in range(50):
        batch(0, 0.1)
        now += 0.01
        steps.append({"time_ns": ns(now), "step": step, "duration_ns": ns(0.11), "unit": UNIT_OPTIMIZER})
        if step % every == every - 1:
            for _ in range(validation):
                batch(1, 0.01)
    return script.add("batch", rows).add("step", steps)


def test_samples_per_second_exclude_validation():
    with_validation = diagnose(training_with_validation().tables()).summary["throughput"]["samples_per_second"]
    seconds = 49 * 0.11 + 4 * 20 * 0.01
    assert with_validation == pytest.approx(49 * 8 / seconds, rel=0.01)


def test_validation_alone_is_no_training_loader():
    """The training makes its batches by hand, and validates by a DataLoader."""
    script = training_with_validation(every=25)
    script.parts["batch"] = [rows[rows["loader"] == 1] for rows in script.parts["batch"]]
    assert diagnose(script.tables()).summary["throughput"]["samples_per_second"] is None


def test_samples_that_only_the_workers_counted_are_those_of_their_batches():
    """The loop does not know how many samples of an iterable dataset a batch has, its workers do."""
    script = simulate(
        workers=2,
        prefetch=2,
        service=jittered(0.02),
        consumer=jittered(0.05),
        batches=60,
        persistent=False,
        epochs=2,
    )
    script.parts["batch"] = [rows.assign(samples_count=np.nan) for rows in script.parts["batch"]]
    throughput = diagnose(script.tables()).summary["throughput"]
    assert throughput["samples_per_second"] == pytest.approx(8 * throughput["batches_per_second"])
    script.parts["fetch"] = script.parts["fetch"][1:]  # one worker records nothing
    assert diagnose(script.tables()).summary["throughput"]["samples_per_second"] is None


def test_findings_name_loaders_by_their_variable_line_and_dataset():
    settings = {"file": "/home/ann/main.py", "line": 37, "variable": "train_loader", "dataset": "ImageFolder"}
    script = simulate(
        workers=2,
        prefetch=2,
        service=jittered(0.2),
        consumer=jittered(0.01),
        batches=60,
        batch_size=64,
        **settings,
    )
    (found,) = [each for each in diagnose(script.tables()).findings if each.kind == "workers-too-slow"]
    assert found.locus.loader_name == "train_loader, main.py:37, ImageFolder, batch 64"


def test_findings_of_forked_trainers_have_their_pids():
    script = Script()
    for loader, key in enumerate(CHILDREN):
        run = {"loader": loader, "service": jittered(0.2), "consumer": jittered(0.01), "batches": 60}
        simulate(workers=2, prefetch=2, script=start_training(script, key=key), key=key, **run)
    found = [each for each in diagnose(script.tables()).findings if each.kind == "workers-too-slow"]
    assert sorted(finding.locus.main_pid for finding in found) == [100, 101]


def test_findings_of_a_single_training_have_no_pid():
    run = {"service": jittered(0.2), "consumer": jittered(0.01), "batches": 60}
    found = diagnose(simulate(workers=2, prefetch=2, **run).tables()).findings
    assert [finding.locus.main_pid for finding in found if finding.kind == "workers-too-slow"] == [None]


@pytest.mark.parametrize(("epochs", "words"), [(1, "once in an epoch"), (2, "pays it in each epoch")])
def test_slow_startup_in_a_short_run_is_information(epochs, words):
    script = simulate(
        workers=2,
        prefetch=2,
        service=jittered(0.01),
        consumer=jittered(0.05),
        batches=60,
        epochs=epochs,
        persistent=False,
        startup=5.0,
        start_method="spawn",
    )
    script.now_seconds = START_SECONDS + 1 + epochs * 9
    found = diagnose(script.tables()).findings
    (start,) = [finding for finding in found if finding.kind == "worker-startup"]
    assert start.severity == "info"
    assert words in start.summary


def test_crash_finding_has_its_line_and_no_escape_codes():
    script = start_training().event(
        START_SECONDS + 5,
        "exception",
        type="ValueError",
        message="\x1b[31mbad\x1b[0m label \x1b]8;;http://x\x07link\x1b]8;;\x07",
        site="/home/ann/data.py:12, in __getitem__",
        traceback="",
    )
    script.event(START_SECONDS + 6, "command-exit", ("node", 90, 4900), command_pid=MAIN[1], exit_status=1)
    (crash,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "crashed"]
    assert "at data.py:12, in __getitem__: bad label link" in crash.summary
    assert "events/node.100.jsonl" in crash.advice[0].text


def test_detached_notebook_is_finished_while_it_lives():
    script = simulate(workers=2, prefetch=2, service=jittered(0.02), consumer=jittered(0.02), batches=50)
    script.living = frozenset({MAIN})
    assert diagnose(script.tables()).status == "running"
    script.event(START_SECONDS + 50, "process-exit", lost_count=0, detached=True)
    assert diagnose(script.tables()).status == "finished"


@pytest.mark.parametrize(("last", "keeps"), [(10, "outputs of each batch"), (60, "reference per step")])
def test_growth_of_an_evaluation_that_is_under_way_is_that_of_its_outputs(last, keeps):
    script = memory(training(), main=600 * RAMP, host=600 * RAMP)
    (steps,) = script.parts["step"]
    steps = steps[steps["time_ns"] < ns(START_SECONDS + last)]
    script.parts["step"] = [steps.assign(unit=UNIT_OPTIMIZER)]
    (leak, *_) = [finding for finding in findings_of(script) if finding.kind == "main-heap-leak"]
    assert keeps in leak.advice[0].text
    assert ("per step" in leak.summary) == (last == 60)
