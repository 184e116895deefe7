"""The census of tensors: what it counts, and that it calls no code of the user's."""

from __future__ import annotations

import gc
import warnings

import torch

from training_harness.hooks.on_request import tensor_census as census_module
from training_harness.hooks.on_request.tensor_census import census


class Hostile:
    """An object that fails if the census calls any of its code."""

    @property
    def __class__(self):
        raise AssertionError("the census called user code")

    def __getattribute__(self, name):
        raise AssertionError("the census called user code")


class HostileMeta(type):
    def __hash__(cls):
        raise AssertionError("the census called user code")

    def __eq__(cls, other):
        raise AssertionError("the census called user code")

    def __instancecheck__(cls, instance):
        raise AssertionError("the census called user code")


class HostileType(metaclass=HostileMeta):
    pass


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the census called user code")


def test_census_counts_each_storage_once_and_calls_no_user_code():
    base = torch.zeros(10, 10)
    with warnings.catch_warnings(action="ignore"):  # a prototype
        nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    objects = [
        Hostile(), HostileType(), base[0], base, base[:5], torch.nn.Parameter(torch.zeros(4)), torch.zeros(4),
        torch.eye(3).to_sparse(), nested, torch.zeros(2).as_subclass(Wrapped), "text", None,
    ]  # fmt: skip
    counted = census(torch, objects)
    assert counted["storage_bytes"] == {"cpu": 400 + 16 + 16}
    first = counted["rows"][0]
    assert (first["shape"], first["tensors_count"], first["storage_bytes"]) == ((10, 10), 1, 400)
    assert {row["type"] for row in counted["rows"]} == {"Tensor", "Parameter"}
    assert counted["subclasses"] == {"Wrapped": 1}
    assert (counted["without_storage_count"], counted["complete"]) == (2, True)
    assert sum(row["tensors_count"] for row in counted["rows"]) == counted["tensors_count"] == 6


def test_census_is_bounded_in_time_and_triggers_no_collection():
    ticks = iter(range(10**6))
    many = [torch.zeros(1) for _ in range(3 * census_module._CLOCK_EVERY)]
    counted = census(torch, many, limit_ns=1, clock_ns=lambda: next(ticks))
    assert counted["complete"] is False
    assert 0 < counted["tensors_count"] < len(many)

    collected: list[str] = []

    def walk():
        collected.clear()
        yield from many
        assert collected == []

    note = lambda phase, info: collected.append(phase)  # noqa: E731
    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        assert census(torch, walk())["tensors_count"] == len(many)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
