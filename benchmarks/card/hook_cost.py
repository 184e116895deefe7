"""Measure the time that Tidegauge adds to a training step on a GPU.

python -m benchmarks.card.hook_cost [--pairs 40]

Blocks of steps run bare and attached, in one process and in random order within each pair. Host time is that of the
loop, which launches kernels and runs ahead of the GPU; whole time includes the wait for the GPU at the end of the
block. Without device hooks, neither the allocator's gauges nor the phases' times on the GPU are recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.in_turn import in_turn
from training_harness import layout
from training_harness.hooks.training.step_phases import Progress

_US_PER_SECOND = 1e6
_FEATURES = 256
Block = Callable[[], tuple[float, float]]
"""Runs some steps; returns host time and whole time per step, in µs."""
HEAD = (
    "| training | hooks | bare step, host | added, host | bare step, whole | added, whole (quartiles) |\n"
    "|---|---|---|---|---|---|"
)


def block_of(model: nn.Module, batch: torch.Tensor, steps: int) -> Block:
    """Return a block of training steps of a model, one batch each."""
    warm = steps // 4  # the loop is new, and so are its journals: each block attaches again
    loader = DataLoader(TensorDataset(batch[None].expand(warm + steps, *batch.shape)), batch_size=None)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def block() -> tuple[float, float]:
        batches = iter(loader)
        for (rows,) in itertools.islice(batches, warm):
            _step(model, optimizer, rows)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for (rows,) in batches:
            _step(model, optimizer, rows)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        return (launched - begun) / steps * _US_PER_SECOND, (ended - begun) / steps * _US_PER_SECOND

    return block


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    loss = model(rows.cuda(non_blocking=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def trainings() -> dict[str, Block]:
    """Return one training whose host is the bottleneck, and one that waits for the GPU."""
    layers = itertools.chain.from_iterable((nn.Linear(_FEATURES, _FEATURES), nn.ReLU()) for _ in range(4))
    encoder = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
    return {
        "four small layers": block_of(nn.Sequential(*layers), torch.zeros(64, _FEATURES), 200),
        "transformer, 8 layers": block_of(
            nn.TransformerEncoder(encoder, 8, enable_nested_tensor=False), torch.zeros(8, 512, 512), 30
        ),
    }


@contextlib.contextmanager
def without_device_hooks() -> Iterator[None]:
    """Attach in the block as if CUDA were never initialised."""

    def detect(progress: Progress) -> None:
        progress.uses_device = False
        progress.calls.set_deferred(yes=progress.requests.due_ns > 0)

    with patch.object(Progress, Progress._detect_device.__name__, detect):
        yield


HOOKS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "all": contextlib.nullcontext,
    "without device hooks": without_device_hooks,
}


def rows(pairs: int) -> Iterator[str]:
    """Measure, and return the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = str(layout.create_run(Path(folder), name="cost", argv=[]))
        for name, block in trainings().items():
            for hooks, chosen in HOOKS.items():
                with chosen():
                    yield f"| {name} | {hooks} | {_compare(block, pairs, run_dir)} |"


def _compare(block: Block, pairs: int, run_dir: str) -> str:
    taken = in_turn(block, pairs, run_dir)
    cells = []
    for which in range(2):
        bare = statistics.median(times[which] for times in taken[False])
        added = [after[which] - before[which] for before, after in zip(taken[False], taken[True], strict=True)]
        low, middle, high = statistics.quantiles(added, n=4)
        cells.append(f"{bare:.0f} µs | {middle:+.1f} µs ({low:+.1f} … {high:+.1f})")
    return " | ".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="blocks of each kind")
    print(HEAD)
    for row in rows(parser.parse_args().pairs):
        print(row, flush=True)


if __name__ == "__main__":
    main()
