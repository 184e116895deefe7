"""Doctor's judgement of this machine, and of the hooks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from collector.agent.samplers import stack_dumps
from collector.agent.samplers.devices import NvidiaSampler
from collector.commands import checks as doctor_checks
from tests.conftest import render
from training_harness.installation import HOOKS

HOST = {
    "memory_total_bytes": 64 * 2**30,
    "cgroup_limit_bytes": None,
    "shm_used_bytes": 0,
    "shm_total_bytes": 8 * 2**30,
    "memory_some_avg10_ratio": 0.0,
    "cpu_some_avg10_ratio": 0.25,
}


def test_doctor_has_no_remedies_on_a_good_machine(tmp_path):
    checks = [
        doctor_checks.check_memory_limit(HOST),
        doctor_checks.check_shm(HOST),
        doctor_checks.check_pressure(HOST),
        doctor_checks.check_smaps("/proc", os.getpid()),
        doctor_checks.check_stacks(),
        doctor_checks.check_devices(NvidiaSampler(), Path("/proc")),
        doctor_checks.check_lake(),
        doctor_checks.check_home(tmp_path / "not" / "yet"),
    ]
    assert [check.remedy for check in checks] == [None] * len(checks)
    assert not (tmp_path / "not").exists()
    text = render(doctor_checks.checks_table(checks))
    assert text.count("ok") >= len(checks)
    assert "none: NVIDIA driver not found" in text


def test_doctor_names_the_python_that_the_training_runs_with():
    assert doctor_checks.check_python(sys.executable).detail.endswith(sys.executable)
    both = doctor_checks.check_python("/opt/train/bin/python").detail
    assert sys.executable in both
    assert both.endswith("the training's: /opt/train/bin/python")


def test_doctor_says_how_to_get_py_spy_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(stack_dumps, "py_spy", lambda: None)
    check = doctor_checks.check_stacks()
    assert "pip install 'tidegauge[collector]'" in check.detail
    assert "hang" in check.remedy


def test_doctor_gives_a_remedy_for_each_problem(tmp_path):
    (tmp_path / "file").write_text("")
    lacking = [
        doctor_checks.check_shm({**HOST, "shm_total_bytes": 64 * 2**20}),
        doctor_checks.check_shm({**HOST, "shm_total_bytes": None}),
        doctor_checks.check_pressure({**HOST, "memory_some_avg10_ratio": None}),
        doctor_checks.check_smaps(str(tmp_path), 1),
        doctor_checks.check_home(tmp_path / "file" / "home"),
    ]
    assert all(check.remedy for check in lacking)
    text = render(doctor_checks.checks_table(lacking))
    assert text.count("warning") == len(lacking)
    assert "--shm-size=8g" in text


STARTED = {
    "kind": "process-start",
    "torch": "2.13.0",
    "capabilities": {"batch": True, "worker": True, "step": True},
}


@pytest.mark.parametrize(
    ("exit_status", "stderr", "events", "said"),
    [
        (0, "", [STARTED, {"kind": "worker-start"}], None),
        (0, "", [STARTED], "the worker did not report"),
        (0, "", [STARTED | {"capabilities": {"batch": False}}, {"kind": "worker-start"}], "batches"),
        (0, "", [STARTED, {"kind": "hook-disabled", "hook": "step", "error": "E"}], "(E)"),
        (0, "", [], "reported nothing"),
        (1, "", [], "as of a program that is no Python"),
        (1, "Traceback\nModuleNotFoundError: No module named 'torch'\n", [], "No module named 'torch'"),
    ],
)
def test_doctor_judges_hooks_by_their_events(exit_status, stderr, events, said):
    text = render(doctor_checks.checks_table(doctor_checks.judge_hooks(exit_status, stderr, events)))
    assert ("warning" in text) == (said is not None)
    assert said is None or said in text


def test_doctor_names_what_each_hook_measures():
    optional = {"_next_index", "_reset", "_get_data", "_shutdown_workers"}
    hooks = {name for name in HOOKS if not name.startswith("trial")} | optional
    measured = [doctor_checks.measurement(hook) for hook in hooks]
    assert len({name for name, _ in measured}) == len(hooks)
    assert not [name for name, _ in measured if name.startswith(("_", "stage:")) or "cuda_oom" in name]
    assert not [name for name, words in measured if "further hook" in words]


@pytest.mark.parametrize(("scope", "remedy"), [(None, "--cap-add=SYS_PTRACE"), (1, "ptrace_scope=0"), (3, "boot")])
def test_a_refused_stack_has_the_remedy_of_this_kernel(scope, remedy):
    assert remedy in stack_dumps.not_allowed(scope)
