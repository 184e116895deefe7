"""The `diabetes` job: a tiny network on a tiny table, where DataLoader workers cost more than they save."""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from training_harness.jobs.common import (
    JobError,
    JobParser,
    add_loader_options,
    ensure_data,
    expect_many_workers,
    loader_arguments,
    positive,
)

#: (name, mean, deviation, weight in the label): the shape of the classic table, without its people.
COLUMNS = (
    ("pregnancies", 3.8, 3.4, 0.4),
    ("glucose", 121.0, 31.0, 1.1),
    ("blood_pressure", 69.0, 19.0, -0.2),
    ("skin_thickness", 20.5, 16.0, 0.0),
    ("insulin", 80.0, 115.0, -0.1),
    ("bmi", 32.0, 7.9, 0.7),
    ("pedigree", 0.47, 0.33, 0.3),
    ("age", 33.0, 11.8, 0.2),
)
ROWS_COUNT = 768
_PASSES_PER_SETTING = 5
_SWEEP_MAX_WORKERS = 64


def make_table(path: Path) -> None:
    """Write the generated table: 768 rows of 8 features and a label, about a third of them 1."""
    rng = np.random.default_rng(0)
    standard = rng.standard_normal((ROWS_COUNT, len(COLUMNS)))
    weights = np.array([weight for *_, weight in COLUMNS])
    labels = standard @ weights + rng.logistic(size=ROWS_COUNT) > 0.8
    means = np.array([mean for _, mean, _, _ in COLUMNS])
    deviations = np.array([deviation for _, _, deviation, _ in COLUMNS])
    values = np.maximum(means + deviations * standard, 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.part")
    header = ",".join([name for name, *_ in COLUMNS] + ["label"])
    formats = ["%.3f"] * len(COLUMNS) + ["%d"]
    np.savetxt(scratch, np.column_stack([values, labels]), formats, ",", header=header, comments="")
    scratch.replace(path)


def read_table(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read features, (n, 8) float32 of zero mean and unit deviation, and labels, (n, 1) float32.

    Raises:
        JobError: the file cannot be read, or a row is not 8 numbers and a label of 0 or 1.
    """
    try:
        with path.open(newline="") as stream:
            lines = list(enumerate(csv.reader(stream), start=1))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"cannot read {path}: {error}; --data takes a CSV file") from None
    if lines and not _is_number(lines[0][1][0] if lines[0][1] else ""):
        lines = lines[1:]  # a header
    rows = [_parse_row(path, number, cells) for number, cells in lines if cells]
    if len(rows) < 2:
        raise JobError(f"{path} holds {len(rows)} rows; at least 2 are needed")
    table = torch.tensor(rows)
    features = table[:, :-1]
    features = (features - features.mean(dim=0)) / features.std(dim=0).clamp_min(1e-6)
    return features, table[:, -1:]


def _parse_row(path: Path, number: int, cells: list[str]) -> list[float]:
    where = f"{path} line {number}"
    if len(cells) != len(COLUMNS) + 1:
        raise JobError(f"{where}: {len(cells)} values where {len(COLUMNS)} features and a label are needed")
    for cell in cells:
        if not _is_number(cell):
            raise JobError(f"{where}: {cell!r} is not a finite number")
    row = [float(cell) for cell in cells]
    if row[-1] not in (0.0, 1.0):
        raise JobError(f"{where}: the label is {cells[-1]!r}, it must be 0 or 1")
    return row


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def network() -> nn.Module:
    """Make the classic 8-6-4-1 network with sigmoids throughout."""
    return nn.Sequential(
        nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 1), nn.Sigmoid()
    )


class Trainer:
    """The network with its optimizer and loss."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.loss_of = nn.BCELoss()

    def train_pass(self, loader: Iterable[Any]) -> float:
        """Train on every batch once; return the mean loss."""
        losses = []
        for features, labels in loader:
            loss = self.loss_of(self.model(features), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return statistics.fmean(losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median times over several passes with one setting."""

    num_workers: int
    pass_seconds: float
    first_batch_seconds: float


def parse_sweep(text: str) -> range:
    """Parse a range like `0-8`, which includes both ends."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if not match or int(match[1]) > int(match[2]) or int(match[2]) > _SWEEP_MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range like 0-8, from 0 up to {_SWEEP_MAX_WORKERS}")
    return range(int(match[1]), int(match[2]) + 1)


def measure(dataset: TensorDataset, options: argparse.Namespace, num_workers: int) -> Timing:
    """Time whole passes with this many workers, which are started again for each pass unless they persist."""
    loader = DataLoader(
        dataset, batch_size=options.batch_size, shuffle=True, **loader_arguments(options, num_workers=num_workers)
    )
    trainer = Trainer()
    pass_seconds, first_batch_seconds = [], []
    for _ in range(_PASSES_PER_SETTING):
        start = time.perf_counter()
        batches = iter(loader)
        first = next(batches)
        first_batch_seconds.append(time.perf_counter() - start)
        trainer.train_pass(itertools.chain([first], batches))
        pass_seconds.append(time.perf_counter() - start)
    return Timing(
        num_workers=num_workers,
        pass_seconds=statistics.median(pass_seconds),
        first_batch_seconds=statistics.median(first_batch_seconds),
    )


def measure_fetch(dataset: TensorDataset, batch_size: int) -> float:
    """Measure the seconds to fetch and collate one batch in this process."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        default_collate([dataset[index] for index in range(min(batch_size, len(dataset)))])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_hop(dataset: TensorDataset, options: argparse.Namespace) -> float:
    """Measure the seconds per batch from one busy worker: fetch, pickle, queue, shared memory, unpickle."""
    endless = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=200 * options.batch_size)
    arguments = loader_arguments(options, num_workers=1)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=endless, **arguments)
    arrivals = [time.perf_counter() for _ in loader]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(arrivals))


def sweep(dataset: TensorDataset, options: argparse.Namespace) -> None:
    """Measure each num_workers, print the table and explain it."""
    steps = math.ceil(len(dataset) / options.batch_size)
    print(f"{len(dataset)} rows, {steps} batches of {options.batch_size} a pass; medians of {_PASSES_PER_SETTING}")
    print(f"{'workers':>7}  {'ms a pass':>9}  {'first batch ms':>14}  {'batches/s':>9}", flush=True)
    timings = []
    for num_workers in options.sweep:
        timing = measure(dataset, options, num_workers)
        timings.append(timing)
        print(
            f"{num_workers:>7}  {timing.pass_seconds * 1e3:>9.1f}  {timing.first_batch_seconds * 1e3:>14.1f}  "
            f"{steps / timing.pass_seconds:>9.0f}",
            flush=True,
        )
    print(explain(timings, steps, measure_fetch(dataset, options.batch_size), measure_hop(dataset, options)))


def explain(timings: Sequence[Timing], steps: int, fetch_seconds: float, hop_seconds: float) -> str:
    """Explain the table, with measured numbers alone."""
    best = min(timings, key=lambda timing: timing.pass_seconds)
    lines = [
        f"\nfastest: {best.num_workers} workers, {best.pass_seconds * 1e3:.1f} ms a pass",
        f"making a batch takes {fetch_seconds * 1e6:.0f} us in the training process; one that comes from a worker "
        f"takes {hop_seconds * 1e6:.0f} us",
    ]
    parallel = [timing for timing in timings if timing.num_workers]
    if parallel:
        start = min(parallel, key=lambda timing: timing.num_workers)
        gain = steps * fetch_seconds * 1e3
        lines.append(
            f"the most that workers could save is {gain:.1f} ms a pass; before the first batch from "
            f"{start.num_workers} worker{'s' if start.num_workers > 1 else ''} alone pass "
            f"{start.first_batch_seconds * 1e3:.1f} ms"
        )
    if best.num_workers == 0 and parallel:
        lines.append("so 0 workers is right here: starting workers and passing batches costs more than making them")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Run the job."""
    parser = JobParser("diabetes", "The 8-6-4-1 sigmoid network on a table of 768 rows.")
    parser.add_argument("--data", type=Path, metavar="FILE", help="CSV: 8 features and a label of 0 or 1 a row")
    parser.add_argument("--epochs", type=positive, default=100, metavar="N", help="passes over the data")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="rows per step")
    parser.add_argument("--sweep", type=parse_sweep, metavar="A-B", help="measure each num_workers from A to B")
    add_loader_options(parser, num_workers=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    dataset = TensorDataset(*read_table(options.data or ensure_data("diabetes.csv", make_table)))
    if options.sweep is not None:
        expect_many_workers()
        sweep(dataset, options)
        return
    loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, **loader_arguments(options))
    trainer = Trainer()
    for epoch in range(options.epochs):
        loss = trainer.train_pass(loader)
        if (epoch + 1) % max(1, options.epochs // 10) == 0:
            print(f"epoch {epoch}  loss {loss:.4f}", flush=True)
