"""The collector is named as the tracer of a process where Yama asks for it, and nowhere else."""

from __future__ import annotations

import os

import pytest

from training_harness.ptracer import COLLECTOR_VARIABLE, allow_collector, process_name, ptrace_scope

PR_SET_PTRACER = 0x59616D61


@pytest.fixture
def proc(tmp_path):
    """A tree of /proc with Yama, and with this process."""
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    return tmp_path


def named(proc, scope, collector, monkeypatch):
    (proc / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    monkeypatch.setenv(COLLECTOR_VARIABLE, collector)
    calls = []
    allow_collector(str(proc), lambda *words: calls.append(words) or 0)
    return calls


def test_the_collector_is_named_where_only_ancestors_may_read(proc, monkeypatch):
    collector = process_name(os.getpid())
    assert named(proc, 1, collector, monkeypatch) == [(PR_SET_PTRACER, os.getpid(), 0, 0, 0)]


@pytest.mark.parametrize("scope", [0, 2, 3])
def test_no_tracer_is_named_where_it_is_not_needed_or_does_not_help(proc, scope, monkeypatch):
    assert named(proc, scope, process_name(os.getpid()), monkeypatch) == []


@pytest.mark.parametrize(
    "collector", [f"{os.getpid()}.1", "4194305.1", "", "x"], ids=["another start", "gone", "empty", "text"]
)
def test_a_collector_that_is_gone_or_of_another_namespace_is_not_named(proc, collector, monkeypatch):
    assert named(proc, 1, collector, monkeypatch) == []


def test_without_yama_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.setenv(COLLECTOR_VARIABLE, process_name(os.getpid()))
    assert ptrace_scope(str(tmp_path)) is None
    calls = []
    allow_collector(str(tmp_path), lambda *words: calls.append(words) or 0)
    assert calls == []


def test_a_kernel_that_refuses_the_call_does_no_harm(proc, monkeypatch):
    (proc / "sys/kernel/yama/ptrace_scope").write_text("1\n")
    monkeypatch.setenv(COLLECTOR_VARIABLE, process_name(os.getpid()))
    allow_collector(str(proc))  # the real prctl(2), which fails with EINVAL where the kernel has no Yama
