"""Errors whose message names the cause: what the verdict adds from the run's own figures, and what it advises."""

import pytest
from ended_runs import DEATHS, WORKERS, end_run, end_training, end_workers, exception, training
from growing_memory import RAMP, memory, training as growing_training
from simulated_runs import MAIN, MIB, START_SECONDS, ns, sample_host, sample_process

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_WORKER

GIB = 1024 * MIB
COLLATE = "torch/utils/data/_utils/collate.py"
TORCH_REFUSED = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate {} bytes. Error code 12 (Cannot allocate memory)"
)


def crash(kind, message, *, trace="…", demand=4 * GIB, start_method="fork"):
    """Return the finding on a training that ends with an exception, on a host of 24 GiB."""
    script = training()
    for event in script.events:
        if event["kind"] == "loader":
            event["start_method"] = start_method
    seconds = [START_SECONDS + second for second in range(3)]
    sample_host(script, seconds, demand=[demand] * 3, memory_available_bytes=[24 * GIB - demand] * 3)
    sample_process(
        script, seconds, MAIN, ROLE_MAIN, private=[MIB] * 3, rss=[MIB] * 3, fd_count=[99] * 3, thread_count=[40] * 3
    )
    script.event(script.now_seconds - 0.5, "exception", type=kind, message=message, traceback=trace)
    verdict = diagnose(end_run(end_training(end_workers(script)), 1).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert found.kind == "crashed"
    return found


def test_request_beyond_all_memory_points_to_the_shape():
    found = crash("RuntimeError", TORCH_REFUSED.format(400 * GIB))
    assert "It asked for 400 GiB at once; the limit is 24 GiB (host memory)." in found.summary
    assert found.advice[0].text.startswith("Check shape and dtype")
    assert found.fault == "your code"


def test_request_that_the_host_could_meet_points_to_a_limit_of_the_process():
    found = crash("_ArrayMemoryError", "Unable to allocate 7.5 GiB for an array with shape (1000000000,)")
    assert "The host had 20 GiB available, so a limit of the process refused 7.5 GiB." in found.summary
    assert "`ulimit -v`, `ulimit -d`" in found.advice[0].text
    assert found.value_of("requested_bytes") == 7.5 * GIB


def test_leak_of_a_process_whose_own_limit_is_met_comes_first():
    script = memory(growing_training(), main=900 * RAMP, host=900 * RAMP, limit=5500 * MIB)
    raised, script.now_seconds = script.now_seconds + 3, script.now_seconds + 6
    script.event(raised, "exception", type="RuntimeError", message=TORCH_REFUSED.format(MIB), traceback="…")
    sample_process(script, [raised + 1], MAIN, ROLE_MAIN, private=[MIB], rss=[MIB])  # it frees its memory
    found, *others = diagnose(end_run(end_training(end_workers(script)), 1).tables()).findings
    assert "a limit of the process refused 1 MiB" in found.summary
    assert "host-oom-risk" not in {other.kind for other in others}, "the host's limit was not met"
    assert found.advice[0].text.startswith("Fix main-heap-leak first")
    assert found.fault == "your code"
    assert found.value_of("last_rss_bytes") > 700 * MIB


@pytest.mark.parametrize(
    ("message", "check", "files"),
    [
        ("[Errno 24] Too many open files: 'a.jpg'", "open files", ("fd_count", "fd_limit_count")),
        ("[Errno 24] Too many open files: 'a.jpg'", "open files", ()),  # the limit is read seldom
        ("DataLoader timed out after 5 seconds", "data loading", ()),
    ],
)
def test_a_crash_leaves_no_check_of_its_cause_that_is_fine(message, check, files):
    script = exception(training(), "RuntimeError", message)
    seconds, counts = [START_SECONDS + second / 2 for second in range(13)], {name: [99] * 13 for name in files}
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=[MIB] * 13, rss=[MIB] * 13, **counts)
    verdict = diagnose(end_run(end_training(end_workers(script)), 1).tables())
    assert {one.name: one.status for one in verdict.checks}[check] == "finding"


def test_leak_of_the_worker_whose_own_limit_is_met_comes_first():
    script = memory(growing_training(), workers=300 * RAMP)
    raised, script.now_seconds = script.now_seconds + 3, script.now_seconds + 6
    error = {"loader": 0, "type": "MemoryError", "in_worker": True, "error_time_ns": ns(raised)}
    script.event(raised, "loader-error", **error)
    refused = "Caught MemoryError in DataLoader worker process 1.\nMemoryError: Unable to allocate 16.0 KiB"
    script.event(raised, "exception", type="RuntimeError", message=refused, traceback="…")
    found = diagnose(end_run(end_training(end_workers(script)), 1).tables()).findings[0]
    assert found.advice[0].text == "Fix worker-heap-leak first: the worker grew until its end"
    assert found.fault == "your code"


def test_memory_of_the_worker_that_raised_is_told():
    script, seconds = training(), [START_SECONDS + second for second in range(3)]
    for key, role, held in ((MAIN, ROLE_MAIN, MIB), (WORKERS[0], ROLE_WORKER, MIB), (WORKERS[1], ROLE_WORKER, GIB)):
        sample_process(script, seconds, key, role, private=[held] * 3, rss=[held] * 3)
    error = {"loader": 0, "type": "MemoryError", "in_worker": True, "error_time_ns": ns(script.now_seconds - 0.6)}
    script.event(script.now_seconds - 0.6, "loader-error", **error)
    exception(script, "MemoryError", "Caught MemoryError in DataLoader worker process 1.\nMemoryError")
    found = diagnose(end_run(end_training(end_workers(script)), 1).tables()).findings[0]
    (held,) = (evidence for evidence in found.evidence if evidence.name == "last_rss_bytes")
    assert (held.value, held.window) == (GIB, "last sample of the worker")


def test_file_that_finds_no_room_while_dev_shm_fills_names_dev_shm():
    script, seconds = training(), [START_SECONDS + second / 2 for second in range(4)]
    used = [each * MIB for each in (10, 30, 60, 90)]
    sample_host(script, seconds, demand=[4 * GIB] * 4, shm_total_bytes=[96 * MIB] * 4, shm_used_bytes=used)
    exception(script, "OSError", "[Errno 28] No space left on device")
    found = diagnose(end_run(end_training(end_workers(script)), 1).tables()).findings[0]
    assert "/dev/shm was filling: 6 MiB of 96 MiB were left." in found.summary
    assert found.advice[0].text.startswith("List the segments")


def test_request_on_a_full_host_points_to_what_holds_the_memory():
    found = crash("MemoryError", "", demand=23.5 * GIB)
    assert found.summary.endswith("ended with MemoryError.")
    assert found.advice[0].text == "Hold less memory in the training process"


@pytest.mark.parametrize(
    ("kind", "message", "trace", "advice"),
    [
        ("OSError", "[Errno 24] Too many open files: 'a.jpg'", "", "List the open files"),
        (
            "RuntimeError",
            "received 0 items of ancdata",
            "torch/multiprocessing/reductions.py",
            "Do not keep batches",
        ),
        (
            "RuntimeError",
            "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
            "",
            "Give /dev/shm more room",
        ),
        ("OSError", "[Errno 28] No space left on device", "", "Check the room and the quota"),
        ("OSError", "[Errno 27] File too large", "", "Check `ulimit -f`"),
        ("RuntimeError", "Trying to backward through the graph a second time (or …", "", "Detach what a step"),
        ("RuntimeError", "… has been modified by an inplace operation: [torch.FloatTensor", "", "Run once under"),
        (
            "RuntimeError",
            "[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 534",
            "",
            "Check the room and the quota",
        ),
        (
            "RuntimeError",
            "stack expects each tensor to be equal size, but got [64] at entry 0 and [65] at entry 20",
            "",
            "Give all samples one size",
        ),
        ("RuntimeError", "DataLoader timed out after 5 seconds", "", "Run `tidegauge stacks`"),
        (
            "AttributeError",
            "Can't pickle local object 'main.<locals>.<lambda>'",
            "multiprocessing/reduction.py",
            "Define what the message names at the top level",
        ),
        (
            "AcceleratorError",
            "CUDA error: device-side assert triggered",
            "",
            "Run again with CUDA_LAUNCH_BLOCKING=1",
        ),
        ("RuntimeError", "can't start new thread", "threading.py", "Check `ulimit -u`"),
        (
            "BlockingIOError",
            "[Errno 11] Unable to synchronously open file (unable to lock file, errno = 11, error message = \
'Resource temporarily unavailable')",
            "h5py/_hl/files.py",
            "End what has the file open for writing",
        ),
        ("RuntimeError", "each element in list of batch should be of equal size", "", "Give all samples one size"),
        ("RuntimeError", "Trying to resize storage that is not resizable", COLLATE, "Give all samples one size"),
        (
            "RuntimeError",
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support",
            COLLATE,
            "Return tensors without gradients",
        ),
        ("OSError", "[Errno 12] Cannot allocate memory", "self.pid = os.fork()", "Start processes before"),
        ("RuntimeError", "std::bad_alloc", "", "Check shape and dtype"),
        ("BrokenPipeError", "[Errno 32] Broken pipe", "print(loss)", "Check what reads its output"),
        ("BrokenPipeError", "[Errno 32] Broken pipe", "multiprocessing/popen_spawn_posix.py", "Look at the end of"),
        ("OperationalError", "database is locked", "", "Let one process alone write"),
        ("ReadersFullError", "MDB_READERS_FULL: Environment maxreaders limit reached", "", "Open the environment"),
        ("BlockingIOError", "[Errno 11] Resource temporarily unavailable", "os.fork()", "Check `ulimit -u`"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "", "Check the server at the other end"),
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory",
            "multiprocessing/resource_sharer.py",
            "Let a process that puts tensors into a queue live",
        ),
        (
            "ConnectionRefusedError",
            "[Errno 111] Connection refused",
            "multiprocessing/resource_sharer.py",
            "Let a process that puts tensors into a queue live",
        ),
        (
            "RuntimeError",
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use",
            "",
            "Keep CUDA out of dataset",
        ),
        (
            "AssertionError",
            "daemonic processes are not allowed to have children",
            "",
            "Use num_workers=0 for a DataLoader inside a dataset",
        ),
        (
            "BrokenProcessPool",
            "A process in the process pool was terminated abruptly while the future was running or pending.",
            "",
            "Find out what ended it",
        ),
        ("OSError", "[Errno 116] Stale file handle: '/data/a.npy'", "", "Check the mount and its server"),
        (
            "RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "",
            "Leave more GPU memory free",
        ),
        (
            "DistStoreError",
            "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
            "",
            "Look for the rank that has not started",
        ),
        (
            "DistNetworkError",
            "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, \
code: -98, name: EADDRINUSE, message: address already in use",
            "",
            "Give each training on this machine its own MASTER_PORT",
        ),
    ],
)
def test_known_error_comes_with_advice_for_its_cause_and_then_the_traceback(kind, message, trace, advice):
    first, *_, last = crash(kind, message, trace=f"Traceback\n{trace}\n{kind}: {message}").advice
    assert first.text.startswith(advice)
    assert last.text.startswith("Read the traceback")


def test_a_weight_that_the_optimizer_changed_is_no_operation_of_the_forward_pass():
    first, *_ = crash("RuntimeError", "… modified by an inplace operation: [torch.FloatTensor [64, 8]] …").advice
    assert "optimizer.step() changed its weights: detach()" in first.text


NO_THREAD = "can't start new thread"
EVER_MORE = [10 + 40 * tick for tick in range(20)]
POOL_AT_ONCE = [10] * 9 + [400] * 11


@pytest.mark.parametrize(
    ("counts", "told", "advice"),
    [
        (EVER_MORE, "It had 770 threads, and ever more of them.", "their number rose by 760"),
        (POOL_AT_ONCE, "The limit of threads is met, or that of address space", "`ulimit -v`: each thread takes"),
    ],
)
def test_threads_that_never_end_are_the_cause_where_no_more_can_be_started(counts, told, advice):
    """They are counted in the worker that raised."""
    script, count = training(), len(counts)
    seconds = [START_SECONDS + tick / 5 for tick in range(count)]
    held = [MIB] * count
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held, thread_count=[10] * count)
    sample_process(script, seconds, WORKERS[1], ROLE_WORKER, private=held, rss=held, thread_count=counts)
    error = {"loader": 0, "type": "RuntimeError", "in_worker": True, "error_time_ns": ns(script.now_seconds - 0.6)}
    script.event(script.now_seconds - 0.6, "loader-error", **error)
    text = f"Caught RuntimeError in DataLoader worker process 1.\nRuntimeError: {NO_THREAD}"
    script.event(script.now_seconds - 0.5, "exception", type="RuntimeError", message=text, traceback="…")
    found = diagnose(end_run(end_training(end_workers(script)), 1).tables()).findings[0]
    assert told in found.summary
    assert advice in found.advice[0].text
    assert found.value_of("thread_count") == counts[-1]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ValueError", "loss is NaN"),
        ("TypeError", "cannot pickle 'Lock' object"),  # by the user's own pickle.dump
        ("BlockingIOError", "[Errno 11] Resource temporarily unavailable"),  # of a socket
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'train.csv'"),
    ],
)
def test_other_errors_come_with_their_traceback_alone(kind, message):
    (advice,) = crash(kind, message).advice
    assert advice.text.startswith("Read the traceback")


def test_slow_batches_before_a_timeout_are_told():
    found = crash("RuntimeError", "DataLoader timed out after 5 seconds")
    assert "No batch took its worker longer than" in found.summary
    assert 0.01 < found.value_of("longest_fetch_seconds") < 0.02


@pytest.mark.parametrize(("made", "what"), [(47, "had not made"), (48, "made, and which did not arrive")])
def test_worker_whose_batch_a_timeout_ended_the_wait_for_is_named(made, what):
    """A validation whose loader began later, and is over, has nothing to do with it."""
    script = training()
    script.parts["batch"] = [rows[rows["index"] < 48] for rows in script.parts["batch"]]
    script.parts["fetch"] = [rows[rows["index"] <= made] for rows in script.parts["fetch"]]
    validation = {"loader": 1, "epoch": 0, "worker_pids": [2000, 2001]}
    script.event(script.now_seconds - 2, "epoch-start", **validation)
    error = {"type": "RuntimeError", "message": "DataLoader timed out after 5 seconds"}
    script.event(script.now_seconds - 0.6, "loader-error", loader=0, in_worker=False, **error)
    exception(script, error["type"], error["message"])
    (found, *_) = diagnose(end_run(end_training(end_workers(script)), 1).tables()).findings
    assert f"It waited for batch 48, which worker 0 (pid {WORKERS[0][1]}) {what}." in found.summary


@pytest.mark.parametrize("trains", [False, True])
def test_exception_of_a_worker_that_has_not_started_is_the_cause(trains):
    script = exception(training(), "RuntimeError", "DataLoader worker (pid(s) 1001) exited unexpectedly")
    script.events = [event for event in script.events if event["kind"] != "worker-start"]
    if trains:  # the script trains where it should only define
        script.event(START_SECONDS + 1, "process-start", WORKERS[1], argv=["python"], parent_pid=MAIN[1])
    begun = script.now_seconds - 0.9
    text = "\n    An attempt has been made to start a new process before the\n    current process has finished its \
bootstrapping phase.\n\n    This probably means"
    script.event(begun, "exception", WORKERS[1], type="RuntimeError", message=text, traceback="…")
    for worker, code in ((1, 1), (0, -15)):
        died = {"worker": worker, "worker_pid": 1000 + worker, "exit_code": code, "last_index": worker}
        script.event(begun + 0.2, "worker-died", loader=0, epoch=0, **died)
    verdict = diagnose(end_run(end_training(script), 1).tables())
    (found,) = [finding for finding in verdict.findings if finding.kind in DEATHS]
    assert (found.kind, found.locus.role, found.locus.worker, found.locus.pid) == ("crashed", "worker", 1, 1001)
    assert "before the current process has finished its bootstrapping phase" in found.summary
    assert any("its bootstrapping phase" in happening.text for happening in verdict.ending.happenings)
    assert found.advice[0].text.startswith('Put the code that trains under `if __name__ == "__main__":`')


@pytest.mark.parametrize(("start_method", "is_shared"), [("fork", True), ("spawn", False)])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("BadZipFile", "Bad CRC-32 for file '7'"),
        ("error", "Error -3 while decompressing data: invalid block type"),
        ("OSError", "Can't synchronously read data (inflate() failed)"),
    ],
)
def test_archive_that_reads_as_damaged_in_a_forked_worker_points_to_a_shared_handle(
    kind, message, start_method, is_shared
):
    trace = f"Caught {kind} in DataLoader worker process 0."
    found = crash(kind, message, trace=trace, start_method=start_method)
    assert ("share the position" in found.summary) == is_shared
    assert found.advice[0].text.startswith("Open the file in each worker") == is_shared
