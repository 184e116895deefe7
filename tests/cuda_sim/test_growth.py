"""Memory that each step keeps is reported with its mechanism, at any pace; growth that ends has no warning."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("pace", ["even", "uneven", "slowing"])
@pytest.mark.parametrize(
    ("kind", "finding"),
    [("tensors", "gpu-tensor-leak"), ("library", "gpu-non-pytorch-growth"), ("pinned", "pinned-cache-growth")],
)
def test_growth_is_reported_with_its_mechanism(watched, kind, finding, pace):
    run = watched("growth.py", kind, "--pace", pace, memory="4G")
    assert run.done.returncode == 0, run.done.stderr
    assert run.findings(finding)
    assert run.warned <= {finding, "gpu-oom-risk"}


@pytest.mark.parametrize(
    ("kind", "finding", "owner"),
    [("captures", "gpu-fragmentation", "CUDA graphs"), ("pinned_buffers", "main-heap-leak", "pinned host memory")],
)
def test_growth_names_what_holds_it(watched, kind, finding, owner):
    run = watched("growth.py", kind, "--bytes", str(1 << 20), memory="4G")
    assert run.done.returncode == 0, run.done.stderr
    [grown] = run.findings(finding)
    assert owner in grown["summary"]


@pytest.mark.parametrize(
    "words",
    [
        ("variable",),
        ("evaluation",),
        ("filling",),
        ("nothing",),
        ("captures", "--fixed"),
        ("pinned_buffers", "--fixed"),
    ],
)
def test_memory_that_levels_off_has_no_warning(watched, words):
    run = watched("growth.py", *words, memory="4G")
    assert run.done.returncode == 0, run.done.stderr
    assert run.warned == set()


def test_layers_that_are_unfrozen_one_by_one_are_growth_that_ends(watched):
    run = watched("growth.py", "unfreezing", memory="4G")
    assert run.done.returncode == 0, run.done.stderr
    assert run.warned == set()
    [told] = run.findings("bounded-growth")
    assert told["locus"]["device"] == 0
    assert "gradients and state of its optimizers" in told["summary"]


@pytest.mark.parametrize(("words", "warned"), [((), {"gpu-tensor-leak"}), (("--fixed",), set())])
def test_replays_of_a_graph_without_an_optimizer_are_judged_like_forward_passes(watched, words, warned):
    run = watched("replays.py", *words, memory="8G")
    assert (run.report["run"]["steps"], run.report["run"]["step_unit"]) == (400, "forward pass")
    assert run.warned - {"gpu-oom-risk"} == warned
    assert run.failed_hooks == []
