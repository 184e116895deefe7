"""Steps that run in CUDA graphs, with a graph of the interface of torch's; tests/cuda_sim replays real ones."""

from __future__ import annotations

import sys
import threading
from types import FunctionType, SimpleNamespace

import pytest
import torch

from training_harness import layout, session
from training_harness.hooks.training import cuda_graphs, forward_passes, steps
from training_harness.hooks.training.step_phases import Progress


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


@pytest.fixture
def passes(tmp_path, monkeypatch):
    """Install the hooks in a session without an optimizer; return a function that counts the passes so far."""
    monkeypatch.delenv(layout.DISABLED_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", SimpleNamespace(CUDAGraph=Graph))
    monkeypatch.setattr(forward_passes, "has_optimizer", lambda: False)  # other tests have made some
    session.start(layout.create_run(tmp_path, name="passes", argv=[]))
    progress = Progress()
    hook = forward_passes.install(progress)
    installed = cuda_graphs.install(SimpleNamespace(captured=None), hook)

    def count():
        progress.calls.run()
        return progress.step + (progress._passes > 0)

    yield count
    assert hook.active
    assert installed.active
    installed.remove()
    hook.remove()
    session.stop()


def model():
    return type("Model", (torch.nn.Linear,), {})(2, 2)


def test_each_replay_of_a_loop_of_replays_is_a_pass(passes):
    graph, other, warm_up = Graph(), Graph(), model()
    warm_up(torch.zeros(1, 2))
    for _ in range(5):
        graph.replay()
        other.replay()
    assert passes() == 10


def test_loop_of_replays_after_calls_of_its_module_counts_on(passes):
    graph, warm_up = Graph(), model()
    for _ in range(4):
        warm_up(torch.zeros(1, 2))
    for _ in range(5):
        graph.replay()
    assert passes() == 4 + 4, "the first replay may belong to the last call"


def test_replays_in_a_loop_that_calls_a_module_are_no_passes_of_their_own(passes):
    embed, graphs = model(), [Graph(), Graph()]
    for iteration in range(12):
        embed(torch.zeros(1, 2))
        if iteration >= 3:
            for graph in graphs:
                graph.replay()
    assert passes() == 12


def test_replay_within_the_call_of_a_module_is_no_pass(passes):
    graphed = type("Graphed", (torch.nn.Linear,), {"forward": lambda self, graph: graph.replay()})(2, 2)
    graph = Graph()
    for _ in range(2):
        graphed(graph)
    assert passes() == 0, "two calls lead nowhere yet"


def test_replays_by_torch_itself_are_no_passes(passes):
    """Autograd replays the backward graph, the compiler one graph for each part of a function."""

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values * 2

        @staticmethod
        def backward(ctx, gradients):
            graph.replay()
            return gradients * 2

    graph, values = Graph(), torch.ones(1, requires_grad=True)
    names = {"__name__": "torch._inductor.cudagraph_trees"}
    run = FunctionType((lambda graph: graph.replay()).__code__, names)
    for _ in range(3):
        Graphed.apply(values).backward()
        run(graph)
    assert passes() == 0


def test_replays_of_a_second_thread_are_no_passes(passes):
    graph = Graph()
    graph.replay()
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join()
    graph.replay()
    assert passes() == 2
