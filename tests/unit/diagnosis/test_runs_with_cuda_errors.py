"""Runs with an error of CUDA memory: their other findings and figures."""

from ended_runs import end_run
from simulated_runs import MIB, START_SECONDS, Script

from collector.diagnosis.verdict import diagnose
from tests.recorded_runs import recorded, with_changed_event, with_event


def test_later_crash_is_reported_along_with_a_caught_error():
    run = recorded("caught-errors")
    end_ns = run.events_of("process-exit")[-1]["time_ns"] - 10**6
    crashed = with_event(run, "exception", time_ns=end_ns, type="ValueError", message="boom", traceback="")
    crashed = with_changed_event(crashed, "command-exit", exit_status=1)
    assert {"crashed", "cuda-oom"} <= {finding.kind for finding in diagnose(crashed).findings}
    [crash] = [each for each in diagnose(crashed).findings if each.kind == "crashed"]
    assert crash.consequence_of is None


def test_crash_before_the_next_step_names_the_error_that_was_caught():
    """A search for a batch size that fits gives up like this."""
    run = recorded("out-of-memory")
    end_ns = run.events_of("process-exit")[-1]["time_ns"] - 10**6
    crashed = with_event(run, "exception", time_ns=end_ns, type="ValueError", message="no size fits", traceback="")
    caught = with_changed_event(crashed, "cuda-oom", caught=None, type=None, message=None)
    crash, found = (each for each in diagnose(caught).findings if each.kind in ("crashed", "cuda-oom"))
    assert (crash.kind, crash.consequence_of, found.severity) == ("crashed", "cuda-oom", "warning")
    assert crash.advice[0].text.startswith("See cuda-oom first")


def test_error_of_a_spawned_process_is_no_crash_too():
    """`torch.multiprocessing.spawn` catches it, ends the child, and raises it again in the parent."""
    text, child, at = "CUDA out of memory. Tried to allocate 20.00 MiB.", ("node", 200, 900), START_SECONDS + 10
    script = Script().event(at - 5, "process-start", child, parent_pid=100)
    exits = {"message": "exit status 1", "status": 1}
    script.event(at, "exit-message", child, **exits, site="torch/multiprocessing/spawn.py:96", handled=f"X: {text}")
    script.event(at, "cuda-oom", child, caught=None, errors_count=1, device=0, step=3, requested_bytes=20 * MIB)
    script.event(at, "process-exit", child, lost_count=0)
    script.event(at + 0.1, "exit-message", child, **exits, site="multiprocessing/spawn.py:123", handled=None)
    quoted = f"\n\n-- Process 0 terminated with the following error:\nTraceback\ntorch.OutOfMemoryError: {text}\n"
    script.event(at + 1, "exception", type="ProcessRaisedException", message=quoted, traceback="…")
    (death,) = [
        each for each in diagnose(end_run(script, 1).tables()).findings if each.kind in ("crashed", "cuda-oom")
    ]
    assert (death.kind, death.severity, death.locus.pid) == ("cuda-oom", "critical", 200)
    assert "The script caught" not in death.summary


def test_a_met_limit_leaves_no_doubt_about_it():
    findings = diagnose(recorded("out-of-memory")).findings
    assert "cuda-oom" in {finding.kind for finding in findings}
    assert not [finding for finding in findings if "not known whether memory runs out" in finding.summary]


def test_peak_of_the_run_counts_the_allocator_of_a_worker_at_its_error():
    """A worker records no allocator in between."""
    held = 2 << 40
    run = with_changed_event(recorded("another-job"), "cuda-oom", allocated_bytes=held, reserved_bytes=held + MIB)
    peaks = diagnose(run).summary["peak"]
    assert (peaks["device_allocated_bytes"], peaks["device_reserved_bytes"]) == (held, held + MIB)
