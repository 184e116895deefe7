"""The lines that each tool's own docs ask to add to a training program.

The recorders of system metrics take a sample each second, so that a training of half a minute gives a curve.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The folder in which the tool stores its files; the program runs in it.
FOLDER = Path.cwd()
SECONDS = 1


@dataclass(frozen=True)
class Edit:
    """Parts that a tool adds to the loop: a context around a step, and a call that logs the loss."""

    step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    log: Callable[[float], object] = id


@contextlib.contextmanager
def traceml(model: Any) -> Iterator[Edit]:
    """Lines: `init`, and `with trace_step(model)` around each step."""
    traceml = importlib.import_module("traceml_ai")
    traceml.init(mode="auto")
    yield Edit(step=lambda: traceml.trace_step(model))


@contextlib.contextmanager
def stormlog(_model: Any) -> Iterator[Edit]:
    """Lines: a tracker from the start to the end, whose events are exported; on a GPU it records errors too."""
    stormlog, guard = importlib.import_module("stormlog"), contextlib.nullcontext()
    if os.environ["SIGHT_DEVICE"] == "cuda":
        tracker = stormlog.MemoryTracker(enable_oom_flight_recorder=True, oom_dump_dir=str(FOLDER / "oom"))
        guard = tracker.capture_oom()
    else:
        tracker = stormlog.CPUMemoryTracker()
    tracker.start_tracking()
    try:
        with guard:
            yield Edit()
    finally:
        tracker.stop_tracking()
        tracker.export_events(str(FOLDER / "events.json"), format="json")


@contextlib.contextmanager
def wandb(_model: Any) -> Iterator[Edit]:
    """Lines: `init`, and a call that logs the loss."""
    wandb = importlib.import_module("wandb")
    settings = wandb.Settings(x_stats_sampling_interval=SECONDS)
    with wandb.init(mode="offline", dir=str(FOLDER), project="sight", settings=settings) as run:
        yield Edit(log=lambda loss: run.log({"loss": loss}))


@contextlib.contextmanager
def mlflow(_model: Any) -> Iterator[Edit]:
    """Lines: `start_run(log_system_metrics=True)`, and a call that logs the loss at every tenth step."""
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{FOLDER}/mlflow.db")
    mlflow.set_system_metrics_sampling_interval(SECONDS)
    with mlflow.start_run(log_system_metrics=True):
        steps = 0

        def log(loss: float) -> None:
            nonlocal steps
            steps += 1
            if steps % 10 == 0:  # a call takes some 5 ms
                mlflow.log_metric("loss", loss, step=steps)

        yield Edit(log=log)


@contextlib.contextmanager
def trackio(_model: Any) -> Iterator[Edit]:
    """Lines: `init`, a call that logs the loss, and `finish`."""
    trackio = importlib.import_module("trackio")
    trackio.init(project="sight", cpu_log_interval=SECONDS, gpu_log_interval=SECONDS, embed=False)
    yield Edit(log=lambda loss: trackio.log({"loss": loss}))
    trackio.finish()


@contextlib.contextmanager
def aim(_model: Any) -> Iterator[Edit]:
    """Lines: a `Run`, a call that tracks the loss, and `close`."""
    run = importlib.import_module("aim").Run(repo=str(FOLDER), system_tracking_interval=SECONDS)
    yield Edit(log=lambda loss: run.track(loss, name="loss"))
    run.close()


@contextlib.contextmanager
def tensorboard(_model: Any) -> Iterator[Edit]:
    """Lines: a `SummaryWriter`, and a call that adds the loss."""
    steps = 0
    with importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(FOLDER)) as writer:

        def log(loss: float) -> None:
            nonlocal steps
            steps += 1
            writer.add_scalar("loss", loss, steps)

        yield Edit(log=log)


@contextlib.contextmanager
def profiler(_model: Any) -> Iterator[Edit]:
    """Lines: `profile` with a schedule, `step` after each step, and the printed table."""
    profiler = importlib.import_module("torch.profiler")

    def write(profile: Any) -> None:
        averages = profile.key_averages()
        table = averages.table(sort_by="cpu_time_total", row_limit=-1, max_name_column_width=60)
        (FOLDER / "table.txt").write_text(table)
        total = sum(row.self_cpu_time_total for row in averages)
        rows = {
            row.key: (
                100 * row.cpu_time_total / total,
                (row.self_cpu_memory_usage + row.self_device_memory_usage) / 2**20,
            )
            for row in averages
        }
        (FOLDER / "rows.json").write_text(json.dumps(rows))

    schedule = profiler.schedule(wait=100, warmup=10, active=200, repeat=1)
    activities = [profiler.ProfilerActivity.CPU]
    with profiler.profile(
        activities=activities, schedule=schedule, profile_memory=True, on_trace_ready=write
    ) as profile:
        yield Edit(log=lambda _loss: profile.step())


EDITS = {edit.__name__: edit for edit in (traceml, stormlog, wandb, mlflow, trackio, aim, tensorboard, profiler)}


def edited(tool: str, model: Any) -> AbstractContextManager[Edit]:
    """The edits of a tool; none for a tool that needs none."""
    return EDITS[tool](model) if tool else contextlib.nullcontext(Edit())
