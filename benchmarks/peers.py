"""Measure a training step under Tidegauge and under other tools, side by side.

    python -m benchmarks.peers [--pairs 60] [--image-pairs 8] [TOOL ...]

Every tool has a process of its own. Each but Tidegauge has a virtual environment of its own, created on demand in
benchmarks/.peers (torch and numpy come from this environment). The process runs short blocks of the same loop
with the tool and without, in random order within each pair. Tidegauge is attached and detached; it records steps,
phases, batches and fetches. TraceML gets `init()` (its patches stay in for the bare blocks) and `with
trace_step(model)` around each step. The others get one call per step that logs six scalars.

There are two loops. The first is a step below 1 ms (a tiny model, one DataLoader worker), in µs per step: the
median of all steps, and the mean of pairs, which includes costs that occur only now and then. The second is the
`images` job (a CNN, two workers, batches of 16), in percent of an epoch's wall time: median and quartiles of
pairs, which show what can be resolved here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.environments import REPOSITORY, python_of
from benchmarks.overhead import BATCH_SIZE, Rows, durations
from training_harness import attach, detach, layout
from training_harness.jobs.common import ensure_data
from training_harness.jobs.images import Photographs, prepare_worker, small_cnn
from training_harness.jobs.photographs import ensure_photographs

TIMEOUT_SECONDS = 600
TOOLS = ("tidegauge", "traceml", "trackio", "tensorboard", "wandb", "aim", "mlflow")
Work = Callable[[Any], float]
Step = Callable[[Work, Any], None]
Block = Callable[[Step | None], list[int]]


def logging_step(log: Callable[[int, dict[str, float]], object]) -> Step:
    """A step after which six scalars are logged."""
    number, ended = 0, time.perf_counter()

    def step(work: Work, batch: Any) -> None:
        nonlocal number, ended
        begun = time.perf_counter()
        loss = work(batch)
        now = time.perf_counter()
        number += 1
        log(
            number, {"loss": loss, "step": now - begun, "wait": begun - ended, "lr": 0.1, "epoch": 0.0, "size": 8.0}
        )
        ended = now

    return step


def logger(tool: str, folder: Path) -> Callable[[int, dict[str, float]], object]:
    """Start a tool that logs, and return its call."""
    module = importlib.import_module("torch.utils.tensorboard" if tool == "tensorboard" else tool)
    if tool == "tensorboard":
        writer = module.SummaryWriter(str(folder))
        return lambda n, values: [writer.add_scalar(name, value, n) for name, value in values.items()]
    if tool == "wandb":
        run = module.init(mode="offline", dir=str(folder), project="peers", settings=module.Settings(silent=True))
        return lambda n, values: run.log(values, step=n)
    if tool == "aim":
        run = module.Run(repo=str(folder))
        return lambda n, values: run.track(values, step=n)
    if tool == "mlflow":
        module.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        module.start_run()
        return lambda n, values: module.log_metrics(values, step=n)
    module.init(project="peers")
    return lambda n, values: module.log(values)


def started(tool: str, model: Any, folder: Path) -> Step:
    """Start a tool, and return its step."""
    if tool != "traceml":
        return logging_step(logger(tool, folder))
    traceml = importlib.import_module("traceml_ai")
    traceml.init(mode="auto")

    def step(work: Work, batch: Any) -> None:
        with traceml.trace_step(model):
            work(batch)

    return step


def block_of(loader: Any, model: Any, loss_of: Callable[[Any, Any], Any]) -> Block:
    """A pass over a loader; it returns when it began and when each step ended, in ns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def work(batch: Any) -> float:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def block(step: Step | None) -> list[int]:
        times_ns = [time.monotonic_ns()]
        for batch in loader:
            work(batch) if step is None else step(work, batch)
            times_ns.append(time.monotonic_ns())
        return times_ns

    return block


def tiny_loop() -> tuple[Any, Block]:
    """A tiny model, and a block of 100 steps below 1 ms."""
    loader = DataLoader(
        Rows(100), batch_size=BATCH_SIZE, num_workers=1, persistent_workers=True, collate_fn=np.stack
    )
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return model, block_of(loader, model, lambda model, batch: model(torch.from_numpy(batch)).square().mean())


def images_loop() -> Block:
    """An epoch of the `images` job: 192 photographs, 12 steps."""
    cv2.setNumThreads(0)
    photographs = Photographs(ensure_data("photographs", ensure_photographs), limit=192)
    loader = DataLoader(photographs, batch_size=16, shuffle=True, num_workers=2, worker_init_fn=prepare_worker)
    loss_of = torch.nn.CrossEntropyLoss()
    model = small_cnn(len(photographs.classes))
    return block_of(loader, model, lambda model, batch: loss_of(model(batch[0]), batch[1]))


def pairs_of(block: Block, step: Step | None, pairs: int, run_dir: str) -> list[tuple[list[int], list[int]]]:
    """(bare, with the tool) times of each pair of blocks; without a step it is Tidegauge, attached and detached."""
    taken = []
    for number in range(pairs + 1):
        pair: dict[bool, list[int]] = {}
        for with_tool in random.sample((False, True), 2):
            if step is None and with_tool:
                attach(run_dir)
            pair[with_tool] = block(step if with_tool else None)
            if step is None and with_tool:
                detach()
        if number:  # the first pair warms both up
            taken.append((pair[False], pair[True]))
    return taken


def measure(tool: str, options: argparse.Namespace) -> None:
    """Write the figures of one tool, used in this process; those of the tiny step as soon as they are there."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
        run_dir = str(layout.create_run(Path(scratch), name="peers", argv=[]))
        model, tiny = tiny_loop()
        if tool == "tidegauge":
            attach(run_dir)  # an iterator that began without it stays without
        tiny(None)  # starts the worker: some tools do not bear a fork
        detach()
        step = None if tool == "tidegauge" else started(tool, model, Path(scratch))
        small = pairs_of(tiny, step, options.pairs, run_dir)
        taken = [[[value / 1e3 for value in durations(times[1:])] for times in pair] for pair in small]
        bare, with_tool = ([value for pair in taken for value in pair[at]] for at in (0, 1))
        means = [statistics.fmean(pair[1]) - statistics.fmean(pair[0]) for pair in taken]
        middle = statistics.median(bare)
        added = {"added_us": statistics.median(with_tool) - middle, "added_mean_us": statistics.median(means)}
        found = {"bare_us": middle} | added
        options.result.write_text(json.dumps(found))
        images = pairs_of(images_loop(), step, options.image_pairs, run_dir)
        bare_ns, with_tool_ns = ([pair[at][-1] - pair[at][0] for pair in images] for at in (0, 1))
        percent = [100 * (after / before - 1) for before, after in zip(bare_ns, with_tool_ns, strict=True)]
        options.result.write_text(json.dumps(found | {"images_percent": statistics.quantiles(percent, n=4)}))


def run_tool(tool: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a tool in a process of its own."""
    python = python_of(tool)
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
        result = Path(scratch) / "result.json"
        arguments = [f"--pairs={options.pairs}", f"--image-pairs={options.image_pairs}", f"--result={result}", tool]
        command = [str(python), __file__, *arguments]
        if tool == "traceml":
            launch = [str(python.with_name("traceml")), "run", "--run-name=peers", f"--logs-dir={scratch}"]
            command = [*launch, __file__, "--args", *arguments]
        environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "TRACKIO_DIR": scratch, "WANDB_SILENT": "true"}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=environ, cwd=scratch, check=True, timeout=TIMEOUT_SECONDS, **pipes)
        if not result.exists():
            raise subprocess.CalledProcessError(124, command, stderr=f"not done after {TIMEOUT_SECONDS} s")
        return dict(json.loads(result.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; all by default")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks of 100 steps below 1 ms")
    parser.add_argument("--image-pairs", type=int, default=8, help="pairs of epochs of 12 steps of the images job")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        measure(options.tools[0], options)
        os._exit(0)  # some tools take their time to leave
    print(f"{'':<12} {'bare step':>10} {'added':>9} {'added, mean':>12}   images job: added (quartiles)")
    for tool in options.tools or TOOLS:
        try:
            found = run_tool(tool, options)
        except subprocess.CalledProcessError as error:
            print(f"{tool:<12} not measured: {str(error.stderr).strip().splitlines()[-1]:.150}", flush=True)
            continue
        low, middle, high = found.get("images_percent", [float("nan")] * 3)
        tiny = f"{found['bare_us']:>7.0f} µs {found['added_us']:>6.0f} µs {found['added_mean_us']:>9.0f} µs"
        print(f"{tool:<12} {tiny}   {middle:+.1f} % ({low:+.1f} … {high:+.1f})", flush=True)


if __name__ == "__main__":
    main()
