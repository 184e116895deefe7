"""How well the replay predicts other settings of a DataLoader, against real loaders of known costs.

    python benchmarks/replay.py [--batches 300] [--repeats 3] [--only NAME …]

A round of a workload is one training that uses a loader of each setting in turn. From the first one alone (marked
"from") the throughput of the others is predicted and compared with what was measured: predicted / measured - 1, the
median of `--repeats` rounds. Rounds whose first setting is not reproduced are left out, as Tidegauge then gives no
figures; the last line counts them. "inside" says in how many rounds the 90 % interval held what was measured, and
"noise" how far these lie apart: (highest - lowest) / median. The rule of thumb is max(c, w / N) per batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collector.diagnosis.calibration import Calibrated, calibrate
from collector.diagnosis.loops import loops
from collector.diagnosis.replay import Setting, predict
from collector.diagnosis.tables import load_tables
from collector.diagnosis.tuning import MODEL_ERROR, OWN_ERROR, UNSEEN_ERROR
from collector.store.runs import find_run

COUNTS = ((1, 2), (2, 2), (3, 2), (4, 2), (4, 1), (2, 6), (6, 2))


@dataclass(frozen=True)
class Workload:
    """Costs of one batch in milliseconds; `settings` begins with the one to predict from."""

    sleep: float = 0.0  # of a fetch, lognormal with `spread`
    cpu: float = 0.0  # of a fetch
    step: float = 8.0  # of the loop, asleep
    step_cpu: float = 0.0  # of the loop, computing
    spread: float = 0.3
    slow_every: int = 0  # every so many batches, a fetch sleeps 10 times as long
    batch_bytes: int = 4096
    epoch: int = 0  # batches; 0: all in one
    in_order: bool = True
    settings: tuple[tuple[int, int], ...] = ((2, 2), *(pair for pair in COUNTS if pair != (2, 2)))


WORKLOADS = {
    "sleep": Workload(sleep=31.0),
    "sleep, wide": Workload(sleep=24.0, spread=0.9, step=7.0),
    "sleep, unordered": Workload(sleep=24.0, spread=0.9, step=7.0, in_order=False),
    "stragglers": Workload(sleep=17.0, slow_every=29, step=7.0),
    "cpu": Workload(cpu=14.0, step=9.0),
    "cpu, loop too": Workload(cpu=12.0, step=1.0, step_cpu=7.0),
    "cpu and sleep": Workload(cpu=7.0, sleep=22.0, step=8.0),
    "from 4 workers": Workload(cpu=9.0, sleep=12.0, step=5.0, settings=((4, 2), (1, 2), (2, 2), (3, 2), (6, 2))),
    "large batches": Workload(sleep=26.0, batch_bytes=12 << 20, step=9.0),
    "short epochs": Workload(sleep=31.0, epoch=25),
    "inline, sleep": Workload(sleep=19.0, step=7.0, settings=((0, 2), (1, 2), (2, 2), (3, 2), (4, 2))),
    "inline, cpu": Workload(cpu=11.0, step=9.0, settings=((0, 2), (1, 2), (2, 2), (3, 2))),
}


def train(work: Workload, batches: int) -> None:
    """One round; this function's process is the one that is recorded."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    def compute(milliseconds: float) -> None:
        end = time.thread_time() + milliseconds / 1e3
        while time.thread_time() < end:
            sum(range(100))

    class Costly(Dataset):
        def __len__(self) -> int:
            return work.epoch or batches

        def __getitem__(self, index: int) -> torch.Tensor:
            factor = float(np.exp(np.random.default_rng(index).normal(-(work.spread**2) / 2, work.spread)))
            factor *= 10 if work.slow_every and index % work.slow_every == 0 else 1
            time.sleep(work.sleep * factor / 1e3)
            compute(work.cpu * factor)
            return torch.full((work.batch_bytes // 4,), 1.0)

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for workers, prefetch in work.settings:
        extra = {"prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
        loader = DataLoader(Costly(), shuffle=True, num_workers=workers, in_order=work.in_order, **extra)
        for _ in range(batches // (work.epoch or batches)):
            for batch in loader:
                (weight * batch[0, :8].sum()).sum().backward()
                optimizer.step()
                time.sleep(work.step / 1e3)
                compute(work.step_cpu)


def recorded(name: str, batches: int, home: Path) -> list[Calibrated]:
    """What was measured in each setting, in one round."""
    command = [sys.executable, __file__, "--train", name, str(batches)]
    options = ["--home", str(home), "--name", "replay", "--interval", "0.5"]
    watched = [sys.executable, "-P", "-m", "collector", "run", *options, "--"]
    subprocess.run([*watched, *command], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    tables = load_tables(find_run(home, "latest"))
    found = [calibrate(tables, loop) for loop in loops(tables)]
    measured = [one for one in found if not isinstance(one, str)]
    if len(measured) < len(found):
        sys.exit(f"{name} cannot be calibrated: {found}; give more --batches")
    return measured


@dataclass(frozen=True)
class Round:
    """One setting in one round; errors as ratios."""

    measured: float
    error: float
    thumb: float
    inside: bool
    believed: bool


def one_round(settings: list[Setting], runs: list[Calibrated]) -> list[Round]:
    source = runs[0]
    predictions = predict(source.trace, settings)
    off = abs(np.log(predictions[0].batches_per_second / source.batches_per_second))
    fetch, loop = (source.trace.cpu + source.trace.blocked).mean(), source.trace.loop.mean()
    low, high = predictions[0].interval(OWN_ERROR)
    believed = low <= source.batches_per_second <= high
    found = []
    for setting, run, prediction in zip(settings, runs, predictions, strict=True):
        low, high = prediction.interval(off + (MODEL_ERROR if settings[0].num_workers else UNSEEN_ERROR))
        measured = run.batches_per_second
        thumb = 1 / max(loop, fetch / max(setting.num_workers, 1))
        error = prediction.batches_per_second / measured - 1
        found.append(Round(measured, error, thumb / measured - 1, low <= measured <= high, believed))
    return found


def compare(name: str, batches: int, repeats: int, home: Path) -> list[Round]:
    """Print a row for each setting; returns the rounds of those that were predicted from another one."""
    work = WORKLOADS[name]
    settings = [Setting(num_workers=n, prefetch_factor=p, in_order=work.in_order) for n, p in work.settings]
    rounds = [one_round(settings, recorded(name, batches, home)) for _ in range(repeats)]
    for at, setting in enumerate(settings):
        mine = [found[at] for found in rounds]
        rate = [one.measured for one in mine]
        print(
            f"{name:18}{setting.num_workers:8}{setting.prefetch_factor:9}{np.median(rate):12.1f}"
            f"{np.ptp(rate) / np.median(rate):8.0%}{np.median([one.error for one in mine]):+9.1%}"
            f"{np.median([one.thumb for one in mine]):+9.1%}{sum(one.inside for one in mine):5} of {repeats}"
            f"{'' if at else '  from'}"
            f"{'' if all(one.believed for one in mine) else '  not reproduced'}",
            flush=True,
        )
    return [one for found in rounds for one in found[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=WORKLOADS, nargs="+")
    parser.add_argument("--train", nargs=2, metavar=("WORKLOAD", "BATCHES"), help="one round")
    options = parser.parse_args()
    if options.train:
        train(WORKLOADS[options.train[0]], int(options.train[1]))
        return
    titles = ("prefetch", "measured/s", "noise", "error", "thumb")
    print(f"{'workload':18}{'workers':>8}" + "".join(map("{:>{}}".format, titles, (9, 12, 8, 9, 9))) + "  inside")
    with tempfile.TemporaryDirectory() as folder:
        found = [
            one
            for name in options.only or WORKLOADS
            for one in compare(name, options.batches, options.repeats, Path(folder))
        ]
    refused, found = sum(not one.believed for one in found), [one for one in found if one.believed]
    for title, errors in (
        ("replay", [one.error for one in found]),
        ("rule of thumb", [one.thumb for one in found]),
    ):
        values = np.abs(errors)
        print(
            f"{title:14} n {len(values)}: median {np.median(values):.1%}, "
            f"p95 {np.quantile(values, 0.95):.1%}, worst {values.max():.1%}"
        )
    inside = np.mean([one.inside for one in found])
    print(f"inside the 90 % interval: {inside:.0%}; load {os.getloadavg()[1]:.1f}; without figures: {refused}")


if __name__ == "__main__":
    main()
