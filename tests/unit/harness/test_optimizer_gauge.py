"""The gauge of the optimizers: what they keep, on real ones."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

from training_harness.hooks.training.optimizers import OptimizerGauge

FLOAT_BYTES = 4


def kept(*optimizers: torch.optim.Optimizer) -> dict[int, tuple[int, int]]:
    """Return the device -> bytes of gradients and of state, as the gauge records them."""
    gauge, rows = OptimizerGauge(), []
    for optimizer in optimizers * 2:
        gauge.see(weakref.ref(optimizer))
    gauge.record(SimpleNamespace(optimizer=lambda *row: rows.append(row)))
    return {device: (gradients, state) for _, device, gradients, state in rows}


def step(optimizer: torch.optim.Optimizer, layer: torch.nn.Module) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = layer(torch.ones(1, 100)).pow(2).sum()
        value.backward()
        return value

    optimizer.step(loss)


def test_gradients_and_momenta_are_those_of_the_layers_that_train() -> None:
    first, second = torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    size = 100 * 100 * FLOAT_BYTES
    step(optimizer, first)
    gradients, state = kept(optimizer)[-1]
    assert (gradients, state // size) == (size, 2)
    step(optimizer, second)
    gradients, state = kept(optimizer)[-1]
    assert (gradients, state // size) == (size, 4), "the first layer has no gradient now, and keeps its state"


def test_history_of_lbfgs_is_state() -> None:
    layer = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.01, max_iter=1, history_size=50)
    step(optimizer, layer)
    _, before = kept(optimizer)[-1]
    for _ in range(5):
        step(optimizer, layer)
    _, after = kept(optimizer)[-1]
    assert after - before >= 5 * 100 * 100 * FLOAT_BYTES


def test_optimizers_count_together_and_not_once_they_are_gone() -> None:
    layers = [torch.nn.Linear(100, 100, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9) for layer in layers]
    for optimizer, layer in zip(optimizers, layers, strict=True):
        step(optimizer, layer)
    size = 100 * 100 * FLOAT_BYTES
    assert kept(*optimizers) == {-1: (2 * size, 2 * size)}
    gauge, rows = OptimizerGauge(), []
    gauge.see(weakref.ref(torch.optim.SGD(layers[0].parameters(), 0.1)))
    gauge.record(SimpleNamespace(optimizer=lambda *row: rows.append(row)))
    assert rows == []


def test_optimizers_of_earlier_trials_are_no_longer_in_use() -> None:
    trials, rows, gauge = [], [], OptimizerGauge()
    for _ in range(3):
        layer = torch.nn.Linear(100, 100, bias=False)
        trials.append(torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9))
        step(trials[-1], layer)
        gauge.see(weakref.ref(trials[-1]))
        gauge.record(SimpleNamespace(optimizer=lambda *row: rows.append(row)))
    size = 100 * 100 * FLOAT_BYTES
    assert [row[2:] for row in rows] == [(size, size)] * 3


class Wrapped(torch.Tensor):
    """A tensor whose every use would be seen."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{function} was called")


def test_tensors_of_a_subclass_are_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.state[parameter] = {"kept": torch.ones(10).as_subclass(Wrapped)}
    assert kept(optimizer) == {}
