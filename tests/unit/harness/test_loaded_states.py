"""States that a module has copied, on the CPU; tests/cuda_sim has them on a device."""

from __future__ import annotations

import pytest
import torch

from training_harness.hooks.training import loaded_states

LINEAR_BYTES = 4 * (8 * 8 + 8)


@pytest.fixture
def states(monkeypatch):
    """Install the hook, for tensors on the CPU."""
    monkeypatch.setattr(loaded_states, "DEVICE_TYPES", ("cpu",))
    original = torch.nn.Module.load_state_dict
    hook = loaded_states.install()
    yield hook
    hook.remove()
    assert torch.nn.Module.load_state_dict is original


def linear():
    return torch.nn.Linear(8, 8)


def copy_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def held(states):
    assert states.active
    return states.bytes_on(None)  # the number of the CPU


def test_copied_state_counts_until_it_is_let_go(states):
    model = linear()
    state = copy_of(model)
    model.load_state_dict(state)
    model.load_state_dict(state)
    assert held(states) == LINEAR_BYTES
    del state["weight"]
    assert held(states) == 4 * 8
    del state
    assert held(states) == 0


def test_tensors_of_one_storage_count_once(states):
    model, values = torch.nn.Sequential(linear(), linear()), torch.zeros(8, 8)
    state = copy_of(model) | {"0.weight": values, "1.weight": values.view(8, 8)}
    del values
    model.load_state_dict(state)
    assert held(states) == 4 * (8 * 8 + 8 + 8)


def test_tensor_that_lives_on_in_a_graph_counts_as_in_use(states):
    model = linear()
    state = copy_of(model)
    model.load_state_dict(state)
    rows = torch.ones(1, 8, requires_grad=True)
    result = rows @ state["weight"].view(8, 8)
    assert held(states) == 4 * 8
    del state, result
    assert held(states) == 0


def test_states_that_a_living_model_shares_do_not_count(states):
    policy, target = linear(), linear()
    target.load_state_dict(dict(policy.named_parameters()), strict=False)
    assert held(states) == 0
    state = policy.state_dict()
    target.load_state_dict(state)
    assert held(states) == 0, "letting go of the state frees nothing"
    del policy
    assert held(states) == LINEAR_BYTES


def test_assigned_state_is_the_model(states):
    model = linear()
    state = copy_of(model)
    model.load_state_dict(state, assign=True)
    assert held(states) == 0


def test_note_leaves_shared_data_shared(states):
    """A lazy clone shares its data until someone writes to it."""
    model = linear()
    state = {name: torch._lazy_clone(tensor) for name, tensor in copy_of(model).items()}
    model.load_state_dict(state)
    assert held(states) == LINEAR_BYTES
    assert all(torch._C._is_cow_tensor(tensor) for tensor in state.values())


def test_load_that_is_made_again_and_again_is_noted_now_and_then(states):
    model = linear()
    state = copy_of(model)
    for _ in range(100):
        model.load_state_dict(copy_of(model))
    model.load_state_dict(state)
    assert held(states) == 0
    for _ in range(99):
        model.load_state_dict(state)
    assert held(states) == LINEAR_BYTES


class Unreadable(dict):
    """State whose values can't be listed."""

    def values(self):
        raise RuntimeError


def test_failing_hook_leaves_the_load_as_it_is(states):
    model, state = linear(), Unreadable(copy_of(linear()))
    result = model.load_state_dict(state)
    assert (result.missing_keys, states.active) == ([], False)
    assert torch.equal(model.weight, state["weight"])
    assert states.attempt(states.bytes_on, 0) is None
