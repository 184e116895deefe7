"""Traces of the lines whose memory stays, and what to do where they show none."""

from dataclasses import replace

from growing_memory import RAMP, memory, training
from simulated_runs import MIB

from collector.diagnosis.verdict import diagnose
from collector.store import ProcessGrowth, SiteGrowth


def leak_of_worker(held_bytes):
    """Return the finding on a worker that was traced."""
    tables = memory(training(), workers=300 * RAMP, total=10**14).tables()
    event = {"role": "worker", "host": "node", "loader": 0, "worker": 0}
    grown = ProcessGrowth(event=event, window="50 batches", held_bytes=held_bytes, lines=())
    findings = diagnose(replace(tables, grown=(grown,))).findings
    return next(finding for finding in findings if finding.kind == "worker-heap-leak")


def test_workers_that_take_memory_without_python_objects_are_not_advised_to_look_for_a_cache():
    leak = leak_of_worker({"cpu": 20 * MIB})
    assert "C and C++ libraries" in leak.advice[0].text
    assert leak.advice[0].expected.startswith("the growth of")
    assert not any("cache" in advice.text for advice in leak.advice)


def test_a_leak_whose_traced_steps_kept_nothing_needs_a_longer_trace():
    assert "--kind growth --worker 0 --steps 1000`" in leak_of_worker({}).advice[-1].text


def test_tensors_of_a_kept_exception_are_no_matter_of_graphs():
    tables = memory(training(), workers=300 * RAMP, total=10**14).tables()
    held = SiteGrowth(
        site="train.py:7 check",
        callers=(),
        device="cpu",
        made_by="MulBackward0",
        grown_count=50,
        grown_bytes=20 * MIB,
        grown_nodes_count=50,
        in_traceback=True,
    )
    event = {"role": "worker", "host": "node", "loader": 0, "worker": 0}
    grown = ProcessGrowth(event=event, window="50 batches", held_bytes={"cpu": 20 * MIB}, lines=(held,))
    findings = diagnose(replace(tables, grown=(grown,))).findings
    leak = next(finding for finding in findings if finding.kind == "worker-heap-leak")
    assert leak.advice[0].text.startswith("Keep no exception with its traceback")
    assert "traceback" in leak.held_by[0].what
