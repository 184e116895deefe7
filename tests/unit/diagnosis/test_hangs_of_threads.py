"""Trainings that wait for a pool, a lock or a thread of their own."""

from __future__ import annotations

import numpy as np
import pytest
from ended_runs import COLLECTOR, end_run
from hanging_trainings import only, stacks, training
from simulated_runs import MAIN, MIB, START_SECONDS, sample_process
from stack_events import (
    FOR_A_BATCH,
    FOR_AN_INDEX,
    IN_A_SAMPLE,
    IN_MAIN,
    LIBRARY,
    LOCK,
    POLL,
    WORKERS,
    process,
)

from collector.diagnosis.verdict import diagnose
from collector.stacks import AT_SHARED_LOCK, ONE_ENDLESS
from training_harness.records import ROLE_OTHER

AT_A_POOL = [
    ["Condition.wait", f"{LIBRARY}/threading.py", 327],
    ["ApplyResult.get", f"{LIBRARY}/multiprocessing/pool.py", 768],
    ["main", "/home/me/train.py", 33],
]


AT_A_QUEUE = [
    ["Connection._recv", f"{LIBRARY}/multiprocessing/connection.py", 395],
    ["Queue.get", f"{LIBRARY}/multiprocessing/queues.py", 103],
    ["main", "/home/me/train.py", 33],
]
CHILD = ("node", 3000, 9000)


def with_child_ended(script, ends_at):
    """Add a child of the training process that ends that many seconds after its start."""
    seconds = [START_SECONDS + second for second in (1.0, 2.0, ends_at)]
    held = np.full(3, MIB)
    alive, parents = np.array([1, 1, 0]), np.array([MAIN[1], MAIN[1], np.nan])
    sample_process(script, seconds, CHILD, ROLE_OTHER, private=held, rss=held, alive=alive, parent_pid=parents)
    return script


@pytest.mark.parametrize("ends_at", [None, 21.0, 4.0])
def test_pool_that_lost_a_process_is_not_taken_for_a_lock(ends_at):
    """The silence began after 21 s; a process that ended long before was replaced, and nothing was lost."""
    script = with_child_ended(stacks(training(), process(MAIN, AT_A_POOL, LOCK)), ends_at or 55.0)
    finding = only(script)
    assert finding.severity == "critical"
    assert "it is waiting for a process pool in main, train.py:33" in finding.summary
    lost = "child process (pid 3000) ended just then"
    assert (lost in finding.summary) == (ends_at == 21.0)
    text = finding.advice[0].text
    assert text.startswith("Use concurrent.futures" if ends_at == 21.0 else "Look at what the pool's processes do")


@pytest.mark.parametrize(
    ("call", "path", "words"),
    [
        ("Queue.get", "queue.py", "waiting for an item of a queue"),
        ("Queue.put", "queue.py", "waiting for room in a full queue"),
        ("Thread.join", "threading.py", "waiting for the end of a thread"),
        ("Future.result", "concurrent/futures/_base.py", "waiting for the result of a task"),
        ("Event.wait", "threading.py", "waiting for a thread to wake it"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_training_that_waits_for_its_own_thread_is_told_of_its_exception(call, path, words, ended):
    frames = [
        ["Condition.wait", f"{LIBRARY}/threading.py", 327],
        [call, f"{LIBRARY}/{path}", 171],
        ["main", "/home/me/train.py", 33],
    ]
    script = stacks(training(), process(MAIN, frames, LOCK))
    if ended:
        raised = {"type": "OSError", "message": "disk gone", "site": "/home/me/data.py:9, in produce"}
        script.event(START_SECONDS + 9, "thread-exception", MAIN, thread="Thread-1", traceback="", **raised)
    finding = only(script)
    assert finding.severity == "critical"
    assert f"it is {words} in main, train.py:33" in finding.summary
    told = "One of its threads ended 10 s before the last step with OSError at data.py:9, in produce: disk gone"
    assert (told in finding.summary) == ended
    assert finding.advice[0].text.startswith("Hand the exceptions") == ended
    assert "forkserver" not in finding.advice[0].text
    assert ("no other Python thread" in finding.summary) == (not ended and call != "Thread.join")


@pytest.mark.parametrize(
    ("ends_at", "path", "call", "severity"),
    [
        (9.0, "queue.py", "Queue.get", "critical"),
        (None, "queue.py", "Queue.get", "info"),
        (-15.0, "queue.py", "Queue.get", "info"),  # more than a budget before the last step: another thread's
        (9.0, "threading.py", "Event.wait", "info"),  # it may be a pause
    ],
)
def test_a_queue_whose_thread_has_ended_by_an_exception_hangs_whatever_pauses_there_were(
    ends_at, path, call, severity
):
    frames = [[call, f"{LIBRARY}/{path}", 171], ["main", "/home/me/train.py", 33]]
    script = stacks(training(), process(MAIN, frames, LOCK), budgets=0.7)
    if ends_at is not None:
        error = {"thread": "feeder", "type": "OSError", "message": "gone"}
        script.event(START_SECONDS + ends_at, "thread-exception", MAIN, **error)
    assert only(script).severity == severity


def test_a_debugger_at_a_queue_whose_thread_has_ended_is_no_hang():
    frames = [["Queue.get", f"{LIBRARY}/queue.py", 171], ["Pdb.interaction", f"{LIBRARY}/pdb.py", 33]]
    script = stacks(training(), process(MAIN, frames, LOCK), budgets=0.7)
    script.event(START_SECONDS + 9, "thread-exception", MAIN, thread="feeder", type="OSError", message="gone")
    assert only(script).severity == "info"


def with_thread(script, name, frames, waits=LOCK):
    for event in script.events:
        if event["kind"] == "stacks":
            event["processes"][0]["threads"].append({"thread": name, "waits": waits, "frames": frames})
    return script


def test_a_worker_whose_feeder_is_stuck_is_told_of_the_feeder_not_of_the_queue_of_indices():
    feeding = [
        ["Batch.__reduce__", "/home/me/data.py", 9],
        ["Queue._feed", f"{LIBRARY}/multiprocessing/queues.py", 1],
    ]
    workers = [process(key, FOR_AN_INDEX, POLL) for key in WORKERS]
    script = stacks(training(), *workers, process(MAIN, FOR_A_BATCH, POLL))
    finding = only(with_thread(script, "QueueFeederThread", feeding))
    assert (finding.severity, finding.locus.worker) == ("critical", 0)
    assert f"it is {LOCK} in Batch.__reduce__, data.py:9" in finding.summary


@pytest.mark.parametrize("thread", ["loader", "QueueFeederThread"])
def test_wait_for_a_condition_is_not_taken_for_a_lock(thread):
    """The helper of a queue can't end the wait, the user's own thread can."""
    waiting = [["Condition.wait", f"{LIBRARY}/threading.py", 327], ["Buffer.get", "/home/me/train.py", 10]]
    other = ["load", "/home/me/train.py", 14]
    if thread != "loader":
        other = ["Queue._feed", f"{LIBRARY}/multiprocessing/queues.py", 231]
    finding = only(with_thread(stacks(training(), process(MAIN, waiting, LOCK)), thread, [other]))
    assert finding.severity == "critical"
    assert "it is waiting for a thread to wake it in Buffer.get, train.py:10." in finding.summary
    assert ("no other Python thread" in finding.summary) == (thread != "loader")
    begin = "Find the thread that should call `notify`" if thread == "loader" else "Let the thread that should end"
    assert finding.advice[0].text.startswith(begin)


@pytest.mark.parametrize(
    ("ends_at", "others", "severity"), [(21.0, 0, "critical"), (21.0, 1, "info"), (55.0, 0, "info")]
)
def test_queue_of_a_process_that_has_ended(ends_at, others, severity):
    """Another process fills its queue at its own pace, unless all of them have ended."""
    living = [process(("node", 3001 + k, 9001), AT_A_QUEUE, "asleep", parent=MAIN[1]) for k in range(others)]
    script = with_child_ended(stacks(training(), process(MAIN, AT_A_QUEUE, "waiting for a pipe"), *living), ends_at)
    finding = only(script)
    assert finding.severity == severity
    assert "it is waiting for an item of a queue of another process in main, train.py:33" in finding.summary
    assert ("child process (pid 3000) ended just then, and a queue" in finding.summary) == (ends_at == 21.0)
    assert finding.advice[0].text.startswith("Find out what ended" if ends_at == 21.0 else "Find the thread or")


@pytest.mark.parametrize(
    ("calls", "words", "advice"),
    [
        (
            [["Queue.put", f"{LIBRARY}/multiprocessing/queues.py", 89]],
            "waiting for room in a full queue to another process",
            "Find the thread or process that should take",
        ),
        (
            [
                ["Condition.wait", f"{LIBRARY}/multiprocessing/synchronize.py", 261],
                ["Barrier.wait", f"{LIBRARY}/threading.py", 689],
            ],
            "waiting for another process to wake it",
            "Find the process that should call `notify`",
        ),
    ],
)
def test_workers_that_wait_for_another_process_are_not_taken_for_a_lock_or_a_thread(calls, words, advice):
    workers = [process(key, calls + IN_A_SAMPLE, LOCK) for key in WORKERS]
    finding = only(stacks(training(), *workers, process(MAIN, FOR_A_BATCH, POLL)))
    assert finding.severity == "critical"
    assert f"it is {words} in Files.__getitem__, dataset.py:41;" in finding.summary
    assert "no other Python thread" not in finding.summary
    assert finding.advice[0].text.startswith(advice)


@pytest.mark.parametrize(("budgets", "severity"), [(1.1, "info"), (4.1, "critical")])
def test_thread_that_waits_for_a_server_is_given_the_patience_for_servers(budgets, severity):
    waiting = [["Queue.get", f"{LIBRARY}/queue.py", 171], ["main", "/home/me/train.py", 33]]
    script = stacks(training(), process(MAIN, waiting, LOCK), budgets=budgets)
    acting = [["act", "/home/me/train.py", 14]]
    finding = only(with_thread(script, "actor", acting, "waiting for the network"))
    assert finding.severity == severity
    assert "actor, waiting for the network, stands in act, train.py:14." in finding.summary


@pytest.mark.parametrize("second_waits", [True, False])
def test_pool_whose_threads_all_wait_for_tasks_has_none_left_to_run_them(second_waits):
    result = ["Future.result", f"{LIBRARY}/concurrent/futures/_base.py", 451]
    in_pool = ["_worker", f"{LIBRARY}/concurrent/futures/thread.py", 81]
    script = stacks(training(), process(MAIN, [result, *IN_MAIN], LOCK))
    nested = [result, ["decode", "/home/me/train.py", 9], in_pool]
    script = with_thread(with_thread(script, "pool_0", nested), "pool_1", nested if second_waits else [in_pool])
    finding = only(script)
    assert "pool_0 stands in decode, train.py:9" in finding.summary
    assert ("no thread is left to run it." in finding.summary) == second_waits
    assert finding.advice[0].text.startswith("Wait in no task" if second_waits else "Look where the threads")


@pytest.mark.parametrize("ends_at", [21.0, 4.0])
def test_lock_of_multiprocessing_stays_taken_when_its_holder_ends(ends_at):
    entering = [["SemLock.__enter__", f"{LIBRARY}/multiprocessing/synchronize.py", 95], *IN_A_SAMPLE]
    workers = [process(key, entering, LOCK, parent=MAIN[1]) for key in WORKERS]
    finding = only(with_child_ended(stacks(training(), *workers, process(MAIN, FOR_A_BATCH, POLL)), ends_at))
    assert finding.severity == "critical"
    assert "it is blocked on a lock of multiprocessing in Files.__getitem__, dataset.py:41;" in finding.summary
    assert ("Process 3000 ended just then, and nothing frees the lock" in finding.summary) == (ends_at == 21.0)
    begin = "Find out what ended process 3000" if ends_at == 21.0 else "Look where the other processes stand"
    assert finding.advice[0].text.startswith(begin)


def test_lock_that_the_kernel_shows_to_be_shared_is_told_as_such_where_no_frame_of_its_library_shows():
    finding = only(with_child_ended(stacks(training(), process(MAIN, IN_MAIN, AT_SHARED_LOCK)), 21.0))
    assert "it is blocked on a lock that processes share (futex) in save, train.py:35" in finding.summary
    assert "Process 3000 ended just then, and nothing frees the lock" in finding.summary
    assert "no other Python thread" not in finding.summary


@pytest.mark.parametrize("call", ["Queue.put", "Queue.get"])
def test_worker_at_the_mutex_of_a_queue_is_not_told_of_items_or_room(call):
    """The lock within a queue was held at the fork: here no thread will ever free it."""
    at_mutex = [["Condition.__enter__", f"{LIBRARY}/threading.py", 265], [call, f"{LIBRARY}/queue.py", 133]]
    at_mutex += IN_A_SAMPLE
    finding = only(stacks(training(), process(WORKERS[0], at_mutex, LOCK), process(MAIN, FOR_A_BATCH, POLL)))
    assert "it is blocked on a lock (futex) in Files.__getitem__, dataset.py:41" in finding.summary
    assert "before the workers were forked" in finding.advice[0].text


def test_forked_worker_that_waits_for_a_thread_of_the_training_process_is_told_that_it_has_none():
    waiting = [
        ["Condition.wait", f"{LIBRARY}/threading.py", 327],
        ["Future.result", f"{LIBRARY}/concurrent/futures/_base.py", 451],
        *IN_A_SAMPLE,
    ]
    script = stacks(
        training(), process(WORKERS[0], waiting, LOCK, parent=MAIN[1]), process(MAIN, FOR_A_BATCH, POLL)
    )
    finding = only(script)
    assert finding.locus.worker == 0
    assert "no other Python thread" in finding.summary
    assert finding.advice[0].text.startswith("Start that thread in the worker")


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ("asleep", "it is asleep in filelock._api.FileLock._poll, called in Files.__getitem__, dataset.py:41;"),
        (POLL, f"it is {POLL} in Files.__getitem__, dataset.py:41;"),
    ],
)
def test_library_that_sleeps_and_tries_again_is_named(waits, told):
    waiting = [["FileLock._poll", f"{LIBRARY}/site-packages/filelock/_api.py", 434], *IN_A_SAMPLE]
    finding = only(
        stacks(
            training(),
            process(WORKERS[0], waiting, waits, parent=MAIN[1]),
            process(MAIN, FOR_A_BATCH, POLL),
            budgets=4.1,
        )
    )
    assert told in finding.summary


def test_a_hook_is_not_named_as_a_library_that_sleeps():
    hook = ["ForwardHook.call", "/srv/env/lib/training_harness/hooks/training/forward_passes.py", 219]
    finding = only(stacks(training(), process(MAIN, [hook, *IN_MAIN], "asleep"), budgets=4.1))
    assert "it is asleep in save, train.py:35" in finding.summary


LOOP_IS_IDLE = f"{POLL} ({ONE_ENDLESS})"


@pytest.mark.parametrize("waits", [LOOP_IS_IDLE, POLL])
@pytest.mark.parametrize("has_thread", [True, False])
def test_event_loop_that_nothing_can_wake_is_a_hang(waits, has_thread):
    """It may wait for a server or for a thread of an executor, unless it has neither."""
    waiting = [
        ["EpollSelector.select", f"{LIBRARY}/selectors.py", 468],
        ["BaseEventLoop._run_once", f"{LIBRARY}/asyncio/base_events.py", 1898],
        ["main", "/home/me/train.py", 33],
    ]
    script = stacks(training(), process(MAIN, waiting, waits))
    if has_thread:
        script = with_thread(script, "asyncio_0", [["_worker", f"{LIBRARY}/concurrent/futures/thread.py", 81]])
    finding, nothing_wakes_it = only(script), waits == LOOP_IS_IDLE and not has_thread
    assert "it is waiting for an event of its asyncio loop in main, train.py:33" in finding.summary
    assert finding.severity == ("critical" if nothing_wakes_it else "info")
    assert ("no other Python thread could wake it" in finding.summary) == nothing_wakes_it
    assert finding.advice[0].text.startswith("Await every task")


def test_training_that_ended_but_not_its_thread_is_told_which():
    shutdown = [["_shutdown", f"{LIBRARY}/threading.py", 1590]]
    sending = [["Queue.get", f"{LIBRARY}/queue.py", 171], ["upload", "/home/me/train.py", 7]]
    finding = only(with_thread(stacks(training(), process(MAIN, shutdown, LOCK)), "uploader", sending))
    assert "it is waiting to end until its other threads end" in finding.summary
    assert "uploader stands in upload, train.py:7." in finding.summary
    assert finding.advice[0].text.startswith("Tell those threads to end")


def test_training_at_a_lock_is_told_where_its_other_threads_stand():
    saving = [["saver", "/home/me/train.py", 9], ["Thread.run", f"{LIBRARY}/threading.py", 1]]
    finding = only(with_thread(stacks(training(), process(MAIN, IN_MAIN, LOCK)), "Thread-1 (saver)", saving))
    assert "Thread-1 (saver) stands in saver, train.py:9." in finding.summary
    assert finding.advice[0].text.startswith("Find the thread that holds the lock")


def test_a_handler_at_a_lock_that_its_own_thread_holds():
    """Its timer runs out again and again: ever more calls of it lie above each other."""
    script = stacks(training(), process(MAIN, IN_MAIN, LOCK))
    dumps = [event["processes"][0]["threads"][0] for event in script.events if event["kind"] == "stacks"]
    for number, thread in enumerate(dumps):
        thread["frames"] = [["report", "/home/me/train.py", 6]] * (number + 2) + thread["frames"]
    finding = only(script)
    assert finding.severity == "critical"
    assert "in report, train.py:6. The process has no other Python thread: this thread holds" in finding.summary
    assert "a signal handler or a `__del__`" in finding.advice[0].text


@pytest.mark.parametrize(
    ("waits", "advice"),
    [
        ("waiting for input at the terminal", "Answer what asks at that line"),
        ("waiting for a pipe (standard input)", "check that the program before the `|` is alive"),
    ],
)
def test_a_training_that_waits_for_input_is_told_so(waits, advice):
    found = only(stacks(training(), process(MAIN, IN_MAIN, waits), budgets=4.1))
    assert waits in found.summary
    assert advice in found.advice[0].text


@pytest.mark.parametrize("hangs", [True, False])
def test_a_training_that_hung_until_it_was_ended_needs_no_more_time(hangs):
    script = training()
    script = stacks(script, process(MAIN, AT_A_POOL, LOCK)) if hangs else script
    script.event(START_SECONDS, "collector-start", COLLECTOR, resumed=False, command_pid=MAIN[1])
    script.now_seconds = START_SECONDS + 60
    killed = next(one for one in diagnose(end_run(script, -15).tables()).findings if one.kind == "killed")
    assert (killed.consequence_of == "hang") == killed.advice[0].text.startswith("Fix the hang first") == hangs
