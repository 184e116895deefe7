"""The healthy training that each fault spoils in one place, and the list of faults.

The training step and the slow parts of loading sleep, except in faults of computing. So a fault
is the same on any machine, and a job with four workers does not need four cores.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from training_harness.jobs.common import loader_arguments

BATCH_SIZE = 8
FEATURES_COUNT = 32
#: The healthy training: steps, workers, and seconds that a step sleeps.
_STEPS_COUNT, _NUM_WORKERS, _STEP_SECONDS = 1000, 2, 0.010
_REPORT_SECONDS = 2.0

Item = tuple[torch.Tensor, int]
Batch = tuple[torch.Tensor, torch.Tensor]


class Items(Dataset[Item]):
    """Items of `size` features and a label of 0 or 1, always the same; making one calls `work` with its index."""

    def __init__(self, work: Callable[[int], object], *, count: int = 100_000, size: int = FEATURES_COUNT) -> None:
        self.work = work
        self.count = count
        self.size = size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        self.work(index)
        return torch.full((self.size,), index % 7 / 7), index % 2


def sleep(batch_seconds: float, _index: int) -> None:
    """Sleep for an item's share of a batch's time."""
    time.sleep(batch_seconds / BATCH_SIZE)


class Job:
    """A healthy small training. A fault changes its attributes.

    With `faulty` false it must do the same work without the fault, in as many steps. `closing` frees
    everything that would outlive the training.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options = options
        self.faulty = not options.fixed
        self.device = device
        self.steps_count, self.num_workers, self.step_seconds = _STEPS_COUNT, _NUM_WORKERS, _STEP_SECONDS
        self.dataset: Dataset[Item] = Items(partial(sleep, 0.010))
        self.settings: dict[str, Any] = {}
        self.batches: Callable[[], Iterator[Batch]] = self.endless
        self.after_step: Callable[[torch.Tensor, Batch], object] = lambda _loss, _batch: None
        self.closing = contextlib.ExitStack()
        self.step = 0
        self.taken_bytes = 0
        self.objects: list[Any] = []
        self.model = self.make_model(16)

    def make_model(self, hidden_count: int) -> nn.Module:
        """Make a model of two layers with `hidden_count` hidden values."""
        layers = nn.Linear(FEATURES_COUNT, hidden_count), nn.ReLU(), nn.Linear(hidden_count, 2)
        return nn.Sequential(*layers).to(self.device)

    def loader(self) -> DataLoader[Item]:
        """Make the DataLoader; options of the command line override the fault's `settings`."""
        if self.options.num_workers is None:
            self.options.num_workers = self.num_workers
        settings = self.settings | loader_arguments(self.options)
        if self.options.num_workers == 0:
            settings.pop("persistent_workers", None)
        return DataLoader(self.dataset, batch_size=BATCH_SIZE, **settings)

    def endless(self) -> Iterator[Batch]:
        """Yield batches for ever, epoch after epoch."""
        loader = self.loader()
        while True:
            yield from loader

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss of one batch. Its graph holds a copy of the batch, not the shared memory."""
        features = features[:, :FEATURES_COUNT].to(self.device, copy=True)
        return nn.functional.cross_entropy(self.model(features), labels.to(self.device, copy=True))

    def may_take(self, size_bytes: int) -> bool:
        """Add `size_bytes` to the leak if the fault is on and `--limit-mb` allows it; return whether it did."""
        fits = self.faulty and self.taken_bytes + size_bytes <= self.options.limit_mb << 20
        self.taken_bytes += size_bytes if fits else 0
        return fits

    def keep(self, size_bytes: int, faulty: object, fixed: object = None) -> None:
        """Keep `faulty` for ever while the leak may take `size_bytes` more, else keep `fixed`."""
        self.objects.append(faulty if self.may_take(size_bytes) else fixed)

    def run(self) -> int:
        """Train; return the number of steps."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        start = last_report = time.monotonic()
        with self.closing:
            batches = self.batches()
            for step in range(1, (self.options.steps or self.steps_count) + 1):
                self.step = step
                batch = next(batches)
                loss = self.loss(*batch)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                time.sleep(self.step_seconds)
                self.after_step(loss, batch)
                if time.monotonic() - last_report >= _REPORT_SECONDS:
                    last_report = time.monotonic()
                    print(f"step {self.step}  loss {loss.item():.4f}  {last_report - start:.0f} s", flush=True)
            del batches  # ends the workers before the files that they read are closed
        return self.step


Spoil = Callable[[Job], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault.

    Attributes:
        finding: kind of finding that a diagnosis should give, one of those in docs/findings.md.
        meaning: description of the fault in one line.
        spoil: function that puts the fault, or its healthy replacement in the twin, into a job.
        needs_gpu: whether it is a fault of GPU memory or of the transfer to it.
        dies: whether the fault ends the training; its twin lives.
        ranks_count: number of training processes, started by torchrun if more than one.
        steps_count, num_workers, step_seconds: the training, also in the twin.
    """

    finding: str
    meaning: str
    spoil: Spoil
    needs_gpu: bool = False
    dies: bool = False
    ranks_count: int = 1
    steps_count: int = _STEPS_COUNT
    num_workers: int = _NUM_WORKERS
    step_seconds: float = _STEP_SECONDS


#: kind -> the fault.
FAULTS: dict[str, Fault] = {}


def fault(kind: str, finding: str | None = None, **traits: Any) -> Callable[[Spoil], Spoil]:
    """Declare the decorated function, whose docstring is the meaning; `finding` is `kind` by default."""

    def declare(spoil: Spoil) -> Spoil:
        meaning = (spoil.__doc__ or "").rstrip(".")
        FAULTS[kind] = Fault(finding=finding or kind, meaning=meaning, spoil=spoil, **traits)
        return spoil

    return declare
