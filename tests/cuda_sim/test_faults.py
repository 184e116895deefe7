"""The built-in jobs with a fault of device memory, and their twins without it."""

from __future__ import annotations

import sys

import pytest

from training_harness.jobs.faults.command import FAULTS

JOB = (sys.executable, "-P", "-m", "training_harness.jobs", "fault")
#: Faults of device memory, without `pin-bound`: on simulated devices pinning takes no time.
KINDS = sorted(kind for kind, fault in FAULTS.items() if fault.needs_gpu and kind != "pin-bound")


@pytest.mark.parametrize("kind", KINDS)
def test_fault_job_reports_its_finding_alone(watched, kind):
    run = watched(*JOB, kind)
    found = run.findings(FAULTS[kind].finding)
    assert found, run.done.stderr
    consequences = {"gpu-oom-risk", "gpu-tensor-leak"}  # of the growth
    assert run.warned <= {FAULTS[kind].finding, *consequences}


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_job_has_no_warnings(watched, kind):
    run = watched(*JOB, kind, "--fixed")
    assert run.done.returncode == 0
    assert run.warned == set()
