"""Pauses of the training thread, on simulated runs whose truth is known, each with a healthy twin."""

import numpy as np
import pandas as pd
import pytest
from loading_runs import STEADY, loading_findings
from simulated_runs import MAIN, MIB, START_SECONDS, jittered, ns, sample_process, simulate, start_training

from collector.diagnosis.stalls.main_thread_pause import find_pauses
from training_harness.records import ROLE_MAIN, ROLE_OTHER


@pytest.mark.parametrize(
    ("pause", "distance", "kinds"),
    [(0.05, 25, [("main-thread-pause", "warning")]), (0.05, 100, [("main-thread-pause", "info")]), (0.0, 25, [])],
)
def test_regular_pauses_are_found(pause, distance, kinds):
    def consumer(generator, k):
        return jittered(0.012, 0.1)(generator) + (pause if k % distance == 0 else 0.0)

    run = STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 800}
    seen, found = loading_findings(simulate(**run))
    assert seen == kinds
    if kinds:
        assert found["main-thread-pause"].value_of("pause_distance_count") == distance
        assert found["main-thread-pause"].locus.stage == "other"


@pytest.mark.parametrize("longest", [0.0, 40.0])
def test_regular_pauses_stand_out_from_many_steps_that_other_programs_lengthen(longest):
    """A sixth of the steps takes two to four times as long, in the second half; or one takes 40 s."""

    def consumer(generator, k):
        is_late = k > 400 and generator.random() < 1 / 3
        pause = 1.0 if k % 50 == 0 else longest if k == 420 else 0.0
        return jittered(0.012, 0.02)(generator) * (generator.uniform(2, 4) if is_late else 1.0) + pause

    run = STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 800}
    pause = loading_findings(simulate(**run))[1]["main-thread-pause"]
    assert pause.summary.startswith("Every 50 steps training pauses for 1 s")


def test_regular_pauses_stand_out_from_longer_steps_that_other_programs_make_at_random():
    """One step in 30 takes as much longer as a pause, in the backward pass."""
    late = set(np.random.default_rng(0).choice(800, 27, replace=False))

    def consumer(generator, k):
        return jittered(0.012, 0.1)(generator) + 0.05 * (k % 40 == 0) + 0.06 * (k in late)

    script = simulate(**STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 800})
    for part in script.parts["step"]:
        moved = np.where(np.isin(part["step"], [*late]), 60e6, 0.0)
        part["other_ns"] = part["other_ns"] - moved
        part["backward_ns"] = part.get("backward_ns", 0.0) + moved
    pause = loading_findings(script)[1]["main-thread-pause"]
    assert pause.summary.startswith("Every 40 steps training pauses for 50")
    assert pause.locus.stage == "other"


def test_time_that_some_steps_record_in_another_phase_is_no_pause():
    """All steps are equally long; each sixth computes outside forward and backward."""
    run = STEADY | {"service": jittered(0.005), "consumer": jittered(0.04, 0.02), "batches": 800}
    script = simulate(**run)
    for part in script.parts["step"]:
        moved = np.where(part["step"] % 6 == 0, 0.0, 30e6)
        part["other_ns"], part["forward_ns"] = part["other_ns"] - moved, moved
    assert "main-thread-pause" not in loading_findings(script)[1]


def test_pauses_that_fall_on_the_start_of_some_epochs_are_regular():
    """Epochs of 100 steps, and a pause every 25 steps: each fourth is in the step in which an epoch starts."""

    def consumer(generator, k):
        return jittered(0.012, 0.1)(generator) + (0.05 if k % 25 == 0 else 0.0)

    run = STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 100, "epochs": 8}
    pause = loading_findings(simulate(**run))[1]["main-thread-pause"]
    assert pause.summary.startswith("Every 25 steps")


@pytest.mark.parametrize(("usual_phase", "found"), [("backward_ns", True), ("other_ns", False)])
def test_regular_pauses_in_a_phase_of_their_own_are_no_waits_for_a_core(usual_phase, found):
    """The process waits for a core longer than the pauses last; such waits fall on all phases alike."""

    def consumer(generator, k):
        return jittered(0.012, 0.1)(generator) + (0.05 if k % 25 == 0 else 0.0)

    script = simulate(**STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 800})
    for part in script.parts["step"]:
        usual = np.minimum(part["other_ns"], 12e6)
        part["other_ns"] -= usual
        part[usual_phase] = part.get(usual_phase, 0.0) + usual
    seconds = 1001.0 + np.arange(0.0, 12.0)
    held = np.full(len(seconds), 300 * MIB)
    used = {"cpu_ns": 0.4e9 * seconds, "run_queue_ns": 0.3e9 * seconds}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, **used)
    assert ("main-thread-pause" in loading_findings(script)[1]) == found


@pytest.mark.parametrize(
    ("cpu_ratio", "child_cores", "advice"),
    [
        (0.9, 0.0, "Look at what the loop does every 25 steps"),
        (0.02, 0.0, "such as a file, the network, a thread, or a sleep"),
        (0.02, 0.5, "such as its child processes, which compute"),
    ],
)
def test_pauses_in_which_the_thread_waits_are_no_work_of_the_loop(cpu_ratio, child_cores, advice):
    def consumer(generator, k):
        return jittered(0.012, 0.1)(generator) + (0.05 if k % 25 == 0 else 0.0)

    script = simulate(**STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 800})
    for part in script.parts["step"]:
        part["outside_cpu_ns"] = np.round(cpu_ratio * part["other_ns"])
    seconds = 1001.0 + np.arange(0.0, 12.0)
    held = np.full(len(seconds), 300 * MIB)
    child = (MAIN[0], 7, 7)
    used = {"cpu_ns": child_cores * 1e9 * seconds, "parent_pid": np.full(len(seconds), MAIN[1])}
    sample_process(script, seconds, child, ROLE_MAIN, private=held, rss=held, **used)
    pause = loading_findings(script)[1]["main-thread-pause"]
    assert advice in pause.advice[0].text
    assert ("Its thread waits then: it computes for 2.0% of a pause" in pause.summary) == (cpu_ratio < 0.1)


@pytest.mark.parametrize(("channel", "advice"), [("hrtimer_nanosleep", "or a sleep"), (None, "garbage collection")])
def test_samples_of_the_thread_show_whether_it_waits_in_its_pauses(channel, advice):
    def consumer(generator, k):
        return jittered(0.012, 0.1)(generator) + (0.3 if k % 25 == 0 else 0.0)

    script = simulate(**STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 800})
    seconds = 1001.0 + np.arange(0.0, 18.0)
    held = np.full(len(seconds), 300 * MIB)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, wait_channel=[channel] * len(seconds))
    pause = loading_findings(script)[1]["main-thread-pause"]
    assert advice in pause.advice[0].text
    assert ("Its thread waits then" in pause.summary) == (channel is not None)


def training_with_saves(saves, *, in_background=False, upload=0.0, cpu_ratio=None, files_count=1):
    """A training of 800 steps that saves a checkpoint at some steps, each for some seconds, and uploads it.

    It computes for `cpu_ratio` of the time outside its phases, and waits while it saves. Of a checkpoint of several
    files, the first one has an event.
    """

    def consumer(generator, k):
        saved = saves[k] + upload if k in saves and not in_background else 0.0
        return jittered(0.012, 0.1)(generator) + saved

    script = simulate(**STEADY | {"service": jittered(0.005), "consumer": consumer, "batches": 800})
    steps = (step for rows in script.parts["step"] for _, step in rows.iterrows())
    for part in script.parts["step"] if cpu_ratio is not None else ():
        part["outside_cpu_ns"] = cpu_ratio * (
            part["other_ns"] - [1e9 * saves.get(k, 0.0) for k in range(len(part))]
        )
    for k, step in enumerate(steps):
        if k in saves:
            end = step["time_ns"] / 1e9 - 0.001 - saves[k] * (1 - 1 / files_count)
            sums = {"saves_count": files_count, "saves_ns": round(saves[k] * 1e9)} if files_count > 1 else {}
            script.event(end, "checkpoint", begun_ns=round((end - saves[k] / files_count) * 1e9), **sums)
    return loading_findings(script)


@pytest.mark.parametrize(
    "saves",
    [dict.fromkeys(range(25, 800, 25), 0.3), {60: 0.2, 90: 2.0, 300: 0.05, 310: 0.6, 620: 1.4}],
    ids=["regular", "irregular and uneven"],
)
def test_pauses_for_checkpoints_are_named(saves):
    pause = training_with_saves(saves)[1]["main-thread-pause"]
    assert f"pauses {len(saves)} times while it saves a checkpoint" in pause.summary
    assert pause.value_of("lost_seconds") == pytest.approx(sum(saves.values()), rel=0.05)
    assert pause.advice[0].text.startswith("Save checkpoints less often")


def test_saves_that_follow_each_other_within_a_second_are_named_with_all_their_time():
    script = simulate(**STEADY | {"service": jittered(0.005), "consumer": jittered(0.03, 0.1), "batches": 800})
    steps = pd.concat(script.parts["step"])
    for k in range(0, 800, 40):  # each step ends with a save of 10 ms; one in 40 has an event
        end_ns = int(steps["time_ns"].iloc[k]) - 10**6
        sums = {"saves_count": 40 if k else 1, "saves_ns": 4e8 if k else 1e7}
        script.event(end_ns / 1e9, "checkpoint", begun_ns=end_ns - 10**7, **sums)
    pause = loading_findings(script)[1]["main-thread-pause"]
    assert "saves 720 files with torch.save, 10 ms each on average" in pause.summary
    assert pause.value_of("lost_seconds") == pytest.approx(7.2)
    assert pause.severity == "warning"
    assert pause.advice[0].text.startswith("Save checkpoints less often")


def test_checkpoints_of_two_files_are_counted_each_with_all_of_its_time():
    """The second file follows within a second, so the next event has its time."""
    saves = dict.fromkeys(range(25, 800, 25), 1.0)
    script, found = training_with_saves(saves, upload=0.45, files_count=2)
    assert sorted(severity for _, severity in script) == ["warning", "warning"]
    rest = found["main-thread-pause"]  # the last of the two
    assert rest.value_of("lost_seconds") == pytest.approx(0.45 * len(saves), rel=0.15)
    assert "every 25 steps" in rest.summary.lower()


def test_what_follows_each_checkpoint_is_a_pause_of_its_own():
    saves = dict.fromkeys(range(25, 800, 25), 1.0)
    script = training_with_saves(saves, upload=0.1, cpu_ratio=0.9)
    assert sorted(severity for _, severity in script[0]) == ["info", "warning"]
    rest = script[1]["main-thread-pause"]  # the last of the two
    assert "The time that it saves a checkpoint is not part of that." in rest.summary
    assert rest.value_of("lost_seconds") == pytest.approx(0.1 * len(saves), rel=0.1)
    assert "waits" not in rest.summary
    assert rest.value_of("pause_cpu_ratio") is None
    assert rest.advice[0].text.startswith("Look at what the loop does every 25 steps")


def test_checkpoints_that_another_thread_saves_are_no_pauses():
    assert training_with_saves({60: 0.2, 90: 2.0, 300: 0.05, 310: 0.6, 620: 1.4}, in_background=True)[0] == []


def test_random_long_steps_and_epoch_ends_are_no_regular_pauses():
    def noisy(generator, _):
        return jittered(0.012, 0.1)(generator) + (0.05 if generator.random() < 0.05 else 0.0)

    run = STEADY | {"service": jittered(0.005), "batches": 800}
    assert loading_findings(simulate(**run | {"consumer": noisy}))[0] == []
    assert loading_findings(simulate(**run | {"batches": 40, "epochs": 20, "gap": 0.02}))[0] == []


@pytest.mark.parametrize(
    ("workers", "cpu_ratio", "child_cores", "told"),
    [
        (2, 0.02, 0.0, "3 times. Its process waits then. That takes 36 s"),
        (2, 0.02, 0.9, "3 times. Its process waits then, while its child processes compute. That takes 36 s"),
        (2, 1.0, 0.0, "3 times. That takes 36 s"),
        (0, 1.0, 0.0, "3 times. That takes 36 s"),
    ],
)
def test_time_between_epochs_in_which_the_script_does_something_else_is_information(
    workers, cpu_ratio, child_cores, told
):
    run = STEADY | {"workers": workers, "service": jittered(0.005), "batches": 500, "epochs": 4, "gap": 12.0}
    script = simulate(**run)
    if not workers:
        script.events = [event for event in script.events if event["kind"] != "epoch-start"]
    seconds = np.arange(START_SECONDS, script.now_seconds)
    held, evaluation = np.full(len(seconds), 300 * MIB), (MAIN[0], 7, 7)
    sample_process(
        script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, cpu_ns=cpu_ratio * 1e9 * (seconds - seconds[0])
    )
    used = {"cpu_ns": child_cores * 1e9 * seconds, "parent_pid": np.full(len(seconds), MAIN[1])}
    sample_process(script, seconds, evaluation, ROLE_OTHER, private=held, rss=held, **used)
    pause = loading_findings(script)[1]["main-thread-pause"]
    assert pause.severity == "info"
    assert f"takes no batch for 12 s, {told}" in pause.summary


def test_an_evaluation_with_a_loader_of_its_own_is_no_time_between_epochs():
    begin, script = START_SECONDS, None
    for _ in range(3):
        for loader, batches in ((0, 300), (1, 200)):
            run = STEADY | {"service": jittered(0.005), "batches": batches, "loader": loader}
            script = simulate(**run, script=script, begin=begin)
            begin = script.now_seconds - 1.0  # the first epoch begins a second after the loader
    assert "main-thread-pause" not in loading_findings(script)[1]


def test_work_on_the_last_batch_is_no_time_between_epochs():
    """Batches end the steps: the last one of an epoch ends when the next epoch has begun."""
    run = STEADY | {"service": jittered(0.005), "consumer": jittered(0.5), "batches": 3, "epochs": 20, "gap": 0.0}
    script = simulate(**run)
    for part in script.parts["step"]:
        part["time_ns"] += 1000
    assert "main-thread-pause" not in loading_findings(script)[1]


def script_with_gaps(seconds, *, epochs=4, **more):
    """A training with epochs of 500 batches, and some seconds between them."""
    run = STEADY | {"service": jittered(0.005), "batches": 500, "epochs": epochs, "gap": seconds}
    return simulate(**run | more)


def between_epochs(script):
    return [pause for pause in find_pauses(script.tables()) if pause.summary.startswith("Between")]


def test_checkpoints_of_two_files_between_epochs_are_part_of_that_time_alone():
    script = script_with_gaps(5.0, epochs=8)
    steps = pd.concat(script.parts["step"])["time_ns"].to_numpy()
    for end in steps[499:-1:500]:
        saved_ns = end + 2 * 10**9
        script.event(
            saved_ns / 1e9, "checkpoint", begun_ns=int(saved_ns - 10**9), saves_count=2, saves_ns=2 * 10**9
        )
    (pause,) = find_pauses(script.tables())
    assert (pause.severity, pause.summary.startswith("Between its epochs")) == ("info", True)


def test_loaders_that_are_iterated_together_have_one_time_between_epochs():
    script = script_with_gaps(12.0, script=script_with_gaps(12.0), loader=1)
    (pause,) = between_epochs(script)
    assert pause.value_of("lost_seconds") == pytest.approx(36.0, rel=0.05)


def test_ranks_that_wait_for_each_other_between_epochs_are_one_finding():
    script, other = script_with_gaps(12.0, rank=0), (MAIN[0], 200, 5200)
    script_with_gaps(12.0, script=start_training(script, key=other, rank=1), rank=1, key=other)
    seconds = np.arange(START_SECONDS, script.now_seconds)
    held = np.full(len(seconds), 300 * MIB)
    for rank, (key, cores) in enumerate(((MAIN, 0.0), (other, 1.0))):
        used = cores * 1e9 * (seconds - seconds[0])
        sample_process(script, seconds, key, ROLE_MAIN, private=held, rss=held, cpu_ns=used, rank=rank)
    (pause,) = between_epochs(script)
    assert pause.locus.rank == 1


@pytest.mark.parametrize(("trains", "is_named"), [(False, True), (True, False)])
def test_a_rank_that_waits_while_another_one_evaluates_names_its_loader(trains, is_named):
    """Rank 1 waits between its epochs; meanwhile rank 0 evaluates, or has more batches to train on."""
    script, other = script_with_gaps(12.0, rank=1), (MAIN[0], 200, 5200)
    seconds = np.arange(START_SECONDS, script.now_seconds)
    held = np.full(len(seconds), 300 * MIB)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, cpu_ns=0.0 * seconds, rank=1)
    evaluation = {"workers": 0, "prefetch": 0, "service": jittered(0.01), "consumer": jittered(0.05)}
    start_training(script, key=other, rank=0)
    end, steps = script.now_seconds, len(script.parts["step"])
    simulate(**evaluation, batches=int((end - START_SECONDS) / 0.06), script=script, key=other, rank=0, loader=1)
    if not trains:
        del script.parts["step"][steps:]
    (pause,) = between_epochs(script)
    assert ("and meanwhile rank 0 (pid 200) got" in pause.summary) == is_named
    assert ("Let all ranks share" in pause.advice[0].text) == is_named


@pytest.mark.parametrize(
    ("ahead", "evaluates"), [(0.001, True), (-0.001, True), (0.0, False), (0.005, False), (0.03, False)]
)
def test_a_rank_that_is_a_little_ahead_in_its_training_does_not_evaluate(ahead, evaluates):
    """Ranks that wait for each other in each step end it, and begin the next epoch, some milliseconds apart."""
    script, other = script_with_gaps(12.0, rank=1), (MAIN[0], 200, 5200)
    count = len(script.parts["step"])
    start_training(script, key=other, rank=0)
    script_with_gaps(12.0, rank=0, key=other, script=script, begin=START_SECONDS - ahead)
    for epoch, steps in enumerate(script.parts["step"][count:-1] if evaluates else ()):
        times = steps["time_ns"].max() / 1e9 + 0.1 * np.arange(5, 105)
        rows = [{"time_ns": ns(at), "loader": 1, "epoch": epoch, "index": i} for i, at in enumerate(times)]
        script.add("batch", [row | {"worker": -1, "wait_ns": 0, "blocked_ns": 0} for row in rows], other, 0)
    seconds = np.arange(START_SECONDS, script.now_seconds)
    held = np.full(len(seconds), 300 * MIB)
    for rank, key, cores in ((1, MAIN, 0.05), (0, other, 0.01)):
        used = cores * 1e9 * (seconds - seconds[0])
        sample_process(script, seconds, key, ROLE_MAIN, private=held, rss=held, cpu_ns=used, rank=rank)
    (pause,) = between_epochs(script)
    assert "Its process waits then" in pause.summary
    assert ("meanwhile rank 0 (pid 200) got 300 batches of loader 1." in pause.summary) == evaluates
    assert ("Let all ranks share" in pause.advice[0].text) == evaluates


def test_the_end_of_workers_is_no_time_between_epochs():
    script = script_with_gaps(12.0)
    for event in [event for event in script.events if event["kind"] == "epoch-start" and event["epoch"]]:
        begun = event["begun_ns"] / 1e9
        script.event(begun - 0.1, "workers-ended", loader=0, begun_ns=ns(begun - 11.9))
    assert between_epochs(script) == []


def test_saves_between_epochs_leave_the_rest_of_that_time():
    script = script_with_gaps(12.0, epochs=6)
    for epoch in script.parts["step"][1:]:
        epoch.loc[epoch.index[0], "duration_ns"] += 12e9
    starts = [event for event in script.events if event["kind"] == "epoch-start" and event["epoch"]]
    for start in starts:
        seconds = start["begun_ns"] / 1e9
        script.event(seconds - 7.0, "checkpoint", begun_ns=ns(seconds - 11.0))
    (pause,), saves = between_epochs(script), find_pauses(script.tables())[0]
    assert saves.value_of("lost_seconds") == pytest.approx(5 * 4.0, rel=0.05)
    assert pause.value_of("lost_seconds") == pytest.approx(5 * 8.0, rel=0.05)
