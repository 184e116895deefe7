"""Batches and datasets that forked workers cannot make or use."""

import sqlite3
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from training_harness.hooks.loading.loader_ids import NO_BATCH, LoaderInfo
from training_harness.hooks.loading.obstacles import batch_obstacle, obstacle

ELSEWHERE = torch.empty(2, device="meta")
WEIGHT = torch.nn.Parameter(torch.ones(2))


class Rows(Dataset):
    def __init__(self, **parts):
        self.__dict__.update(parts)

    def __len__(self):
        return 8


def of(dataset, *, batch=None, **options):
    """Return the obstacle of a loader that has made this batch."""
    loader = DataLoader(dataset, **options)
    info = LoaderInfo(0, (0, None))
    if batch is not None:
        info.batch_obstacle = batch_obstacle(batch)
    return obstacle(loader, info, (2, 2))


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": [torch.ones(2), np.ones(3)], "name": "a"}, None),
        ((WEIGHT, None), None),
        (np.array([1, "a"], dtype=object), None),
        (np.array([threading.Lock()], dtype=object), "cannot be pickled"),
        ([{"x": (ELSEWHERE,)}], "on a device"),
        ([WEIGHT * 2], "gradients"),
        ([(row for row in "ab")], "cannot be pickled"),
    ],
)
def test_batch_that_no_worker_can_send_is_an_obstacle(batch, why):
    found = batch_obstacle(batch)
    assert found is None if why is None else why in found


def test_content_of_tensors_is_not_pickled(monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", never)
    assert batch_obstacle([torch.ones(2)]) is None


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"rows": list(range(100_000)), "names": {"a": b""}}, None),
        ({"rows": list(range(100_000)), "file": [open(__file__)]}, "open TextIOWrapper"),  # noqa: SIM115
        ({"base": {"connection": sqlite3.connect(":memory:")}}, "open Connection"),
        ({"model": torch.nn.Linear(2, 2, device="meta")}, "on a device"),
        ({"model": torch.nn.Linear(2, 2)}, None),
    ],
)
def test_dataset_that_processes_cannot_share_is_an_obstacle(parts, why):
    found = of(Rows(**parts), batch=[])
    assert found is None if why is None else why in found


def test_loader_without_workers_has_to_show_a_batch_first():
    assert of(Rows()) == NO_BATCH
    assert of(Rows(), num_workers=1) is None
