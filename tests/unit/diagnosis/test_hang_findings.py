"""Hangs from recorded stacks: the culprit at the end of the chain, and no alarm for a long phase."""

from __future__ import annotations

import pytest
from hanging_trainings import OTHER_RANK, only, stacks, training, two_ranks
from recorded_dumps import data, fields
from simulated_runs import MAIN, START_SECONDS, ns, sample_process, start_training
from stack_events import (
    AGENT,
    FOR_A_BATCH,
    FOR_AN_INDEX,
    IDLE,
    IN_A_SAMPLE,
    IN_BACKWARD,
    IN_MAIN,
    LIBRARY,
    LOCK,
    POLL,
    TORCH,
    WAITING,
    WORKERS,
    process,
)

from collector.diagnosis.consequences import without_consequences
from collector.diagnosis.hangs.hang import find_hangs
from collector.diagnosis.verdict import diagnose
from collector.findings import Finding, Locus, measurements
from collector.stacks import FULL_PIPE
from training_harness.records import ROLE_MAIN


@pytest.mark.parametrize(
    ("waits", "advice"),
    [
        (LOCK, "lock"),
        ("waiting for a child process", "stdin"),
        ("waiting for a child process (cat, pid 7, which is waiting for a full pipe)", "communicate()"),
        ("suspended (SIGSTOP or a debugger)", "-CONT 1001"),
    ],
)
def test_the_worker_that_all_wait_for_is_named_with_its_line_and_advice_for_its_wait(waits, advice):
    finding = only(stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, waits)))
    assert (finding.kind, finding.severity) == ("hang", "critical")
    assert (finding.locus.worker, finding.locus.loader, finding.locus.pid) == (1, 0, 1001)
    assert waits in finding.summary
    assert "Files.__getitem__, dataset.py:41" in finding.summary
    assert finding.since_step == 9
    assert advice in finding.advice[0].text


def test_a_hang_lasts_until_the_newest_sample_of_its_training():
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    sampled, size = [START_SECONDS + 52 + 60 * minute for minute in range(11)], [2**30] * 11
    sample_process(script, sampled, MAIN, ROLE_MAIN, private=size, rss=size, alive=[1] * 10 + [0])
    found = only(script)
    assert "has had no batch for 9 min 33 s" in found.summary
    assert found.evidence[0].value == 33 + 9 * 60


def test_a_batch_that_was_made_and_never_arrived_names_its_worker():
    """Its queue could not pickle the batch, and printed that; all workers wait for an index."""
    script = training(batches=4)
    for number, key in enumerate(WORKERS):
        indices = (number, number + 4)
        rows = [{"time_ns": ns(START_SECONDS + 3 + n), "loader": 0, "epoch": 0, "index": n} for n in indices]
        script.add("fetch", [{**row, "worker": number} for row in rows], key)
    found = only(stacks(script, WAITING, IDLE, process(WORKERS[1], FOR_AN_INDEX, POLL)))
    assert (found.kind, found.severity, found.locus.worker) == ("hang", "critical", 0)
    assert "made batch 4, and it never arrived" in found.summary
    assert "pickle" in found.advice[0].text


def test_data_loading_is_not_called_fine_where_a_worker_hangs():
    script = stacks(training(batches=100), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    statuses = {check.name: check.status for check in diagnose(script.tables()).checks}
    assert statuses["data loading"] == statuses["how the run ended"] == "finding"


@pytest.mark.parametrize(("loader", "stays"), [(0, False), (1, True)])
def test_a_loader_is_not_called_healthy_where_its_worker_hangs(loader, stays):
    hang = only(stacks(training(batches=100), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK)))
    locus = Locus(host="node", role="main", loader=loader)
    healthy = Finding(
        kind="compute-bound",
        severity="info",
        confidence=1.0,
        summary="It keeps up.",
        locus=locus,
        evidence=measurements(9, "run", wait_ratio=0.01, idle_ratio=0.4),
    )
    assert healthy.is_healthy
    assert (healthy in without_consequences([hang, healthy])) == stays


def test_a_dump_that_failed_does_not_hide_the_culprit():
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    last = next(event for event in script.events if event.get("is_last"))
    last["processes"][2] |= {"threads": [], "error": "it changed while it was read"}
    finding = only(script)
    assert (finding.locus.worker, finding.severity) == (1, "critical")


def test_a_training_that_went_on_after_the_stacks_has_no_hang():
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    script.add("batch", [{"time_ns": ns(START_SECONDS + 60), "loader": 0, "epoch": 0, "index": 10}])
    assert find_hangs(script.tables()) == []


@pytest.mark.parametrize(("exit_status", "hangs_count"), [(0, 0), (130, 1)])
def test_a_training_that_catches_the_ctrl_c_which_ends_its_hang_did_not_go_on(exit_status, hangs_count):
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    script.event(START_SECONDS + 70, "process-exit", lost_count=0)
    script.event(START_SECONDS + 71, "command-exit", AGENT, command_pid=MAIN[1], exit_status=exit_status)
    assert len(find_hangs(script.tables())) == hangs_count


def test_stacks_that_are_taken_after_a_ctrl_c_do_not_hide_the_hang():
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    last = next(event for event in script.events if event.get("is_last"))
    last["processes"] = []
    script.event(last["time_ns"] / 1e9 - 0.5, "exception", type="KeyboardInterrupt", message="", traceback="")
    finding = only(script)
    assert (finding.locus.worker, finding.severity) == (1, "critical")


@pytest.mark.parametrize(("lines", "hangs_count"), [((20,), 1), ((44,), 0), ((20, 5), 1)])
def test_a_training_that_raises_at_another_line_than_it_stood_in_did_not_hang(lines, hangs_count):
    """The handler of a signal at line 5 interrupts line 20, where it stood."""
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    trace = "".join(f'  File "/home/me/train.py", line {line}, in main\n' for line in lines)
    raised = {"type": "RuntimeError", "message": "odd", "site": f"/home/me/train.py:{lines[-1]}, in main"}
    script.event(START_SECONDS + 60, "exception", traceback=trace, **raised)
    assert len(find_hangs(script.tables())) == hangs_count


def test_a_series_of_dumps_that_was_broken_off_hides_no_hang():
    """A kill may come between the dumps of the last series; the one before belongs to the same silence."""
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    last = next(event for event in script.events if event.get("is_last"))
    later = [{**one, "silent_seconds": one["silent_seconds"] + 30} for one in last["silent"]]
    script.events.append({**last, "time_ns": last["time_ns"] + ns(30), "silent": later, "is_last": False})
    finding = only(script)
    assert (finding.locus.worker, finding.severity) == (1, "critical")
    assert "no batch for 63 s" in finding.summary


NETWORK = "waiting for the network (10.0.0.7:443)"


@pytest.mark.parametrize("waits", [NETWORK, POLL, LOCK, "asleep", "waiting for a child process (wget, pid 9)"])
def test_a_worker_that_still_receives_data_is_slow_and_not_stuck(waits):
    loading = process(WORKERS[1], IN_A_SAMPLE, waits, moved_seconds_ago=0.0, received_seconds_ago=0.0)
    finding = only(stacks(training(), WAITING, IDLE, loading, budgets=9.0))
    assert (finding.severity, finding.locus.worker) == ("info", 1)
    assert "Worker 1 of loader 0 is slow" in finding.summary
    assert "It received or sent data within the last 1" in finding.summary
    assert not any("timeout" in item.text for item in finding.advice)


def test_a_worker_that_reads_files_is_slow_unless_it_sleeps_in_between():
    """A program that awaits the lock of a database tries again and again, and reads a little each time."""
    reading, polling = (
        process(WORKERS[1], IN_A_SAMPLE, waits, moved_seconds_ago=0.0) for waits in (POLL, "asleep")
    )
    slow = only(stacks(training(), WAITING, IDLE, reading, budgets=9.0))
    assert (slow.severity, "It read or wrote data within the last 1" in slow.summary) == ("info", True)
    stuck = only(stacks(training(), WAITING, IDLE, polling, budgets=9.0))
    assert (stuck.severity, "Worker 1 of loader 0 hangs: it is asleep in" in stuck.summary) == ("critical", True)


@pytest.mark.parametrize(
    ("waits", "seconds_ago"),
    [(NETWORK, None), (NETWORK, 31.0), ("suspended (SIGSTOP or a debugger)", 0.0)],
    ids=["a server that never answered", "a server that stopped", "a stopped worker whose socket fills"],
)
def test_a_worker_that_receives_nothing_any_more_hangs(waits, seconds_ago):
    stuck = process(WORKERS[1], IN_A_SAMPLE, waits, moved_seconds_ago=seconds_ago)
    assert only(stacks(training(), WAITING, IDLE, stuck, budgets=4.1)).severity == "critical"


@pytest.mark.parametrize(("waits", "severity"), [(NETWORK, "info"), (LOCK, "critical")])
def test_a_training_process_is_slow_only_if_it_waits_for_data_itself(waits, severity):
    """Its threads hear from other services, as from a tracker of experiments, whatever the main thread does."""
    stuck = process(MAIN, IN_MAIN, waits, moved_seconds_ago=0.0)
    assert only(stacks(training(), stuck, IDLE, budgets=4.1)).severity == severity


def test_a_worker_blocked_for_half_of_the_budget_is_information_and_may_hang():
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK), budgets=0.5)
    finding = only(script)
    assert finding.severity == "info"
    assert "may hang" in finding.summary


@pytest.mark.parametrize(("budgets", "severity"), [(2.0, "info"), (4.5, "critical")])
def test_a_worker_that_computes_gets_four_budgets(budgets, severity):
    busy = process(WORKERS[1], IN_A_SAMPLE, "computing", used_seconds=2.0)
    finding = only(stacks(training(), WAITING, IDLE, busy, budgets=budgets))
    assert finding.severity == severity
    assert "computing" in finding.summary


LONG_PHASES = {
    "an evaluation that computes": {"waits": "computing", "used_seconds": 2.0, "moves": True},
    "a checkpoint on a slow disk": {"waits": "waiting for a disk (folio_wait_bit_common)"},
    "a download": {"waits": "waiting for the network"},
}


@pytest.mark.parametrize("phase", LONG_PHASES)
def test_a_long_phase_of_the_training_process_is_information(phase):
    finding = only(stacks(training(), process(MAIN, IN_MAIN, **LONG_PHASES[phase]), IDLE, budgets=2.0))
    assert finding.severity == "info"


@pytest.mark.parametrize("change", [{}, {"moves": False}, {"used_seconds": 0.1, "waits": LOCK}])
def test_an_evaluation_by_hand_is_no_hang(change):
    """It shows by the passes of the model in which the process computes and moves."""
    frames = [["Module._call_impl", f"{LIBRARY}/site-packages/torch/nn/modules/module.py", 1801], *IN_MAIN]
    evaluates = process(MAIN, frames, **({"waits": "computing", "used_seconds": 2.0, "moves": True} | change))
    assert len(find_hangs(stacks(training(), evaluates, budgets=2.0).tables())) == bool(change)


def test_waiting_for_a_program_that_computes_is_information():
    evaluates = process(MAIN, IN_MAIN, "waiting for a child process")
    assert only(stacks(training(), evaluates, IDLE, budgets=2.0, helpers_seconds=1.9)).severity == "info"
    assert only(stacks(training(), evaluates, IDLE, budgets=2.0, helpers_runnable=1)).severity == "info"
    assert only(stacks(training(), evaluates, IDLE, budgets=2.0)).severity == "critical"


def test_sleep_after_the_last_batch_is_information_and_before_it_a_hang():
    asleep = process(MAIN, IN_MAIN, "asleep")
    assert only(stacks(training(dataset_length=80), asleep, IDLE, budgets=9.0)).severity == "info"
    assert only(stacks(training(dataset_length=400), asleep, IDLE, budgets=2.0)).severity == "info"
    assert only(stacks(training(dataset_length=400), asleep, IDLE, budgets=4.1)).severity == "critical"


def test_what_a_script_does_after_it_has_left_its_loop_early_is_information():
    serves = process(MAIN, IN_MAIN, "waiting for a connection")
    assert only(stacks(training(), serves, budgets=50)).severity == "info"


@pytest.mark.parametrize(
    "frames",
    [
        [["select", f"{LIBRARY}/selectors.py", 1], ["start", f"{LIBRARY}/site-packages/ipykernel/kernelapp.py", 1]],
        [["interaction", f"{LIBRARY}/pdb.py", 1], *IN_MAIN],
    ],
    ids=["a notebook between two cells", "a debugger"],
)
def test_waiting_for_the_user_is_information(frames):
    finding = only(stacks(training(), process(MAIN, frames, POLL), IDLE, budgets=50))
    assert finding.severity == "info"


def test_a_training_whose_hooks_were_disabled_is_silent_without_a_hang():
    script = stacks(training(), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    script.event(START_SECONDS + 6, "hook-disabled", hook="batch", error="ValueError: x")
    assert find_hangs(script.tables()) == []


def test_of_workers_at_work_the_one_that_may_hold_the_lock_is_the_culprit():
    at_lock = process(WORKERS[0], IN_A_SAMPLE, LOCK)
    slow = process(WORKERS[1], [["open", "/home/me/files.py", 7], *IN_A_SAMPLE], "waiting for the network")
    finding = only(stacks(training(), WAITING, at_lock, slow))
    assert finding.locus.worker == 1
    assert finding.severity == "info"
    assert only(stacks(training(), WAITING, at_lock, slow, budgets=4.1)).severity == "critical"


def test_training_that_writes_to_a_full_pipe_is_told_to_read_it():
    finding = only(stacks(training(), process(MAIN, IN_MAIN, FULL_PIPE), budgets=4.1))
    assert "it is waiting for a full pipe in save, train.py:35." in finding.summary
    assert finding.advice[0].text.startswith("Let something read what that line writes")


def test_compilation_never_counts_as_a_hang():
    compiling = [["wait", f"{LIBRARY}/threading.py", 1], ["compile_fx", f"{TORCH}/_inductor/compile_fx.py", 1]]
    assert only(stacks(training(), process(MAIN, compiling, LOCK), budgets=20)).severity == "info"


def test_of_two_ranks_the_one_outside_the_collective_is_the_culprit():
    script = stacks(
        two_ranks(),
        process(MAIN, IN_BACKWARD, LOCK),
        process(OTHER_RANK, IN_MAIN, "asleep"),
        silent=(MAIN, OTHER_RANK),
    )
    finding = only(script)
    assert (finding.locus.rank, finding.locus.pid) == (1, 200)
    assert "save, train.py:35" in finding.summary
    assert "1 other rank waits for it" in finding.summary
    assert "join()" in finding.advice[-1].text


IN_BARRIER = [["barrier", f"{TORCH}/distributed/distributed_c10d.py", 1], ["main", "/home/me/train.py", 35]]


@pytest.mark.parametrize(
    ("frames", "size", "told", "begin"),
    [
        (
            IN_BARRIER,
            2,
            "but not at one line: rank 0 in main, train.py:30, rank 1 in main, train.py:35.",
            "Call each",
        ),
        (
            IN_BACKWARD,
            2,
            "Both ranks stand in a collective, at this line.",
            "Run with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ),
        (IN_BARRIER, 4, "Rank 1 waits in a collective, too.", "Find the rank that has not entered it"),
    ],
)
def test_ranks_that_wait_in_collectives_are_one_finding(frames, size, told, begin):
    script = stacks(
        two_ranks(),
        process(MAIN, IN_BACKWARD, LOCK),
        process(OTHER_RANK, frames, LOCK),
        silent=(MAIN, OTHER_RANK),
    )
    for event in script.events:
        if event["kind"] == "process-start":
            event["world_size"] = size
    findings = find_hangs(script.tables())
    assert [finding.locus.rank for finding in findings] == [0]
    assert findings[0].advice[0].text.startswith(begin)
    assert told in findings[0].summary


def test_a_worker_of_the_rank_that_the_others_wait_for_is_the_culprit():
    script = stacks(
        two_ranks(),
        process(MAIN, IN_BACKWARD, LOCK),
        process(OTHER_RANK, FOR_A_BATCH, POLL),
        process(("node", 1100, 8000), IN_A_SAMPLE, LOCK),
        silent=(MAIN, OTHER_RANK),
    )
    finding = only(script)
    assert (finding.locus.rank, finding.locus.worker) == (1, 0)
    assert "rank 1 (pid 200) has had no batch for 33 s; 1 other rank waits for it" in finding.summary


IN_ALL_REDUCE = [["all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 1], ["step", "/home/me/train.py", 20]]
MISSING = "ank 1 has not entered all_reduce number 3 of default_pg, in which rank 0 waits (train.py:20)"


def dumps(script, *ranks, way="missing", seconds=60, waited_seconds=30.0, **changes):
    """Add dumps of the Flight Recorder that these ranks have written."""
    for rank in ranks:
        event = {**fields(data(way, rank), rank=rank, waited_seconds=waited_seconds), **changes}
        script.event(seconds, "flight-recorder", AGENT, **event)
    return script


def stuck_ranks(*, waiting="asleep", frames=IN_MAIN, **options):
    """Return a training whose rank 0 is in an all_reduce, and whose rank 1 stands elsewhere."""
    both = process(MAIN, IN_ALL_REDUCE, LOCK), process(OTHER_RANK, frames, waiting)
    return stacks(two_ranks(), *both, silent=(MAIN, OTHER_RANK), **options)


def evidence(finding):
    return {one.name: one.value for one in finding.evidence}


DUMPED = START_SECONDS + 60


def test_dumps_confirm_the_rank_that_the_stacks_name():
    plain = only(stuck_ranks())
    finding = only(dumps(stuck_ranks(), 0, 1, seconds=DUMPED))
    assert finding.summary == f"{plain.summary} PyTorch's Flight Recorder: r{MISSING}."
    assert (finding.locus, finding.severity, finding.confidence) == (plain.locus, plain.severity, plain.confidence)
    assert evidence(finding)["collective"] == "all_reduce number 3 of default_pg"
    assert evidence(finding)["called_in"] == "train.py:20"
    assert evidence(finding)["last_collective"] == "broadcast number 2 (train.py:24)"


@pytest.mark.parametrize(("kind", "severity"), [("moved", "critical"), ("received", "info")])
def test_files_that_a_missing_rank_writes_are_no_progress(kind, severity):
    """Another thread of it reports that it lives, say; what it receives may be what it waits for."""
    late = process(OTHER_RANK, IN_MAIN, "waiting for the network", **{f"{kind}_seconds_ago": 1.0})
    both = process(MAIN, IN_ALL_REDUCE, LOCK), late
    script = stacks(two_ranks(), *both, silent=(MAIN, OTHER_RANK), budgets=4.1)
    assert only(script).severity == "info"
    finding = only(dumps(script, 0, 1, seconds=DUMPED))
    assert (finding.severity, finding.locus.rank) == (severity, 1)


def test_dumps_name_a_rank_of_another_node():
    script = training(rank=0)
    start_training(script, key=("other", 300, 6000), rank=1)
    finding = only(dumps(stacks(script, process(MAIN, IN_ALL_REDUCE, LOCK)), 0, 1, seconds=DUMPED))
    assert finding.summary == f"R{MISSING}; no step or batch for 33 s."
    assert (finding.locus.host, finding.locus.rank, finding.locus.pid) == ("other", 1, 300)
    assert finding.severity == only(stacks(training(rank=0), process(MAIN, IN_ALL_REDUCE, LOCK))).severity
    assert "rank 1 does after broadcast number 2" in finding.advice[0].text


def test_a_rank_that_the_run_does_not_know_is_named_by_its_number():
    script = stacks(training(rank=0), process(MAIN, IN_ALL_REDUCE, LOCK))
    finding = only(dumps(script, 0, 1, seconds=DUMPED))
    assert (finding.locus.host, finding.locus.rank, finding.locus.pid) == (None, 1, None)


@pytest.mark.parametrize(("budgets", "severity"), [(1.1, "info"), (4.1, "critical")])
def test_dumps_name_the_rank_where_stacks_cannot_be_read(budgets, severity):
    script = stuck_ranks(budgets=budgets)
    for event in script.events:
        for one in event.get("processes", ()):
            one |= {"threads": [], "error": "not allowed"}
    assert find_hangs(script.tables()) == []
    finding = only(dumps(script, 0, 1, seconds=DUMPED))
    assert (finding.locus.rank, finding.locus.pid, finding.severity) == (1, 200, severity)


def test_a_rank_that_waits_on_the_device_is_no_culprit():
    """With NCCL a rank enters a collective, and then waits for the device on another line of its own."""
    script = stacks(
        two_ranks(),
        process(MAIN, [["train", "/home/me/train.py", 22]], "computing", used_seconds=2.0),
        process(OTHER_RANK, IN_MAIN, "asleep"),
        silent=(MAIN, OTHER_RANK),
    )
    assert {finding.locus.rank for finding in find_hangs(script.tables())} == {0, 1}
    assert only(dumps(script, 0, 1, seconds=DUMPED)).locus.rank == 1


def test_dumps_that_name_another_rank_than_the_stacks_bring_doubt():
    script = stacks(training(rank=0), WAITING, IDLE, process(WORKERS[1], IN_A_SAMPLE, LOCK))
    plain, finding = only(script), only(dumps(script, 0, 1, seconds=DUMPED))
    assert (finding.locus, finding.severity) == (plain.locus, plain.severity)
    assert finding.summary == f"{plain.summary} But PyTorch's Flight Recorder: r{MISSING}."
    assert finding.confidence == 0.5


def test_a_rank_without_a_dump_may_be_the_one_that_the_stacks_name():
    event = fields(data("missing", 0))
    event["groups"][0]["ranks"] = [0, 1]
    plain, script = only(stuck_ranks()), stuck_ranks()
    finding = only(script.event(DUMPED, "flight-recorder", AGENT, **event))
    waits = "rank 0 waits in all_reduce number 3 of default_pg (train.py:20); no dump tells of rank 1"
    assert finding.summary == f"{plain.summary} PyTorch's Flight Recorder: {waits}."
    assert finding.confidence == plain.confidence


def test_a_mismatch_is_said_of_the_ranks_that_wait():
    script = stacks(
        two_ranks(), *(process(key, IN_ALL_REDUCE, LOCK) for key in (MAIN, OTHER_RANK)), silent=(MAIN, OTHER_RANK)
    )
    finding = only(dumps(script, 0, 1, way="mismatch", seconds=DUMPED))
    assert finding.locus.rank == 0
    assert "is all_reduce in rank 0 (train.py:20) and barrier in rank 1 (train.py:35)." in finding.summary


def test_dumps_from_before_the_silence_are_of_no_account():
    script = stuck_ranks()
    plain = only(script)
    assert only(dumps(script, 0, 1, seconds=START_SECONDS + 3)) == plain
    assert only(dumps(script, 0, 1, seconds=DUMPED, age_seconds=58.0)) == plain
    assert only(dumps(script, 0, 1, seconds=DUMPED, error="it has no end", groups=[])) == plain


def test_a_training_that_a_timeout_has_ended_names_the_missing_rank():
    script = two_ranks().event(DUMPED, "command-exit", AGENT, command_pid=MAIN[1], exit_status=1)
    assert find_hangs(script.tables()) == []
    finding = only(dumps(script, 0, 1, seconds=DUMPED, waited_seconds=1801.0))
    assert finding.summary == f"R{MISSING}; it timed out after 30 min."
    assert (finding.severity, finding.locus.rank, finding.since_step) == ("critical", 1, 9)
    assert evidence(finding)["timeout_seconds"] == 1800.0


def test_a_training_that_failed_before_a_timeout_has_no_hang():
    script = two_ranks().event(DUMPED, "command-exit", AGENT, command_pid=MAIN[1], exit_status=1)
    assert find_hangs(dumps(script, 0, 1, seconds=DUMPED).tables()) == []


def test_dumps_of_a_training_that_goes_on_or_has_succeeded_are_no_hang():
    running = dumps(two_ranks(), 0, 1, seconds=DUMPED, waited_seconds=1801.0)
    running.living = frozenset({MAIN, OTHER_RANK})
    assert find_hangs(running.tables()) == []
    running.event(DUMPED, "command-exit", AGENT, command_pid=MAIN[1], exit_status=0).living = frozenset()
    assert find_hangs(running.tables()) == []
