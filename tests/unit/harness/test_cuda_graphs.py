"""Steps that run in CUDA graphs, with a graph of the interface of torch's; tests/cuda_sim replays real ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from training_harness.hooks.training import cuda_graphs, steps


class Graph:
    """Captures and replays nothing; `is_capturing` is what the driver would say."""

    is_capturing = False

    def capture_begin(self):
        Graph.is_capturing = True

    def capture_end(self):
        Graph.is_capturing = False

    def replay(self):
        pass


@pytest.fixture
def graph_of(monkeypatch):
    """Install the hooks; return a function that captures a graph in which optimizers step."""
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", SimpleNamespace(CUDAGraph=Graph))
    monkeypatch.setattr(steps, "is_capturing", lambda _: Graph.is_capturing)
    hook = SimpleNamespace(captured=None, stepped=[])
    hook.before = lambda optimizer, *_: hook.stepped.append(("before", optimizer))
    hook.after = lambda optimizer, *_: hook.stepped.append(("after", optimizer))
    original, installed = Graph.replay, cuda_graphs.install(hook, None)

    def capture(*optimizers, ends=True):
        graph = Graph()
        graph.capture_begin()
        assert all(steps.StepHook.is_captured(hook, optimizer) for optimizer in optimizers)
        if ends:
            graph.capture_end()
        return graph

    yield SimpleNamespace(capture=capture, hook=hook)
    Graph.is_capturing = False
    installed.remove()
    assert Graph.replay is original


def optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_replay_is_one_step_of_each_optimizer_in_the_graph(graph_of):
    first, second = optimizer(), optimizer()
    both, none = graph_of.capture(first, second, first), graph_of.capture()
    for graph in (both, none):
        graph.replay()
    expected = [(when, each) for when in ("before", "after") for each in (first, second)]
    assert graph_of.hook.stepped == expected


def test_steps_after_a_capture_that_had_no_end_count(graph_of):
    graph_of.capture(ends=False)
    Graph.is_capturing = False
    assert not steps.StepHook.is_captured(graph_of.hook, optimizer())
