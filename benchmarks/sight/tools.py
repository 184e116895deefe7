"""The tools, and how each is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Seconds after the start at which py-spy reads the stacks.
DUMP_SECONDS = 20.0

#: (interpreter, program, folder of the run) -> command.
Command = Callable[[Path, str, Path], list[str]]


def plain(python: Path, program: str, _folder: Path) -> list[str]:
    return [str(python), program]


def by_tidegauge(python: Path, program: str, _folder: Path) -> list[str]:
    return [str(python), "-P", "-m", "training_harness.command", "run", "--", str(python), program]


def by_traceml(python: Path, program: str, folder: Path) -> list[str]:
    return [str(python.with_name("traceml")), "run", "--run-name=sight", f"--logs-dir={folder}/logs", program]


def by_memray(python: Path, program: str, folder: Path) -> list[str]:
    options = ["--quiet", "--follow-fork", "--output", f"{folder}/allocations.bin"]
    return [str(python), "-m", "memray", "run", *options, program]


@dataclass(frozen=True)
class Tool:
    """One tool in one way of use.

    Attributes:
        title: name on the page.
        environment: name of its environment.
        use: way of use, in words.
        command: the command that runs the program.
        edit: the edits of the program, "" if there are none.
        shows: word for a fault that its output shows, but that a reader has to find.
    """

    name: str
    title: str
    environment: str
    use: str
    command: Command = plain
    edit: str = ""
    shows: str = "hint"


_TRACEML = "`traceml run train.py`"
_TOOLS = (
    Tool("tidegauge", "Tidegauge", "", "`tidegauge run -- python train.py`; its card", by_tidegauge),
    Tool(
        "traceml",
        "TraceML",
        "traceml",
        f"{_TRACEML}, `init()`, `with trace_step(model)`; its summary",
        by_traceml,
        "traceml",
    ),
    Tool("traceml-unedited", "TraceML, no edit", "traceml", f"{_TRACEML}; its summary", by_traceml),
    Tool(
        "stormlog",
        "Stormlog",
        "stormlog",
        "`CPUMemoryTracker`, for a GPU `MemoryTracker`; `gpumemprof analyze`",
        plain,
        "stormlog",
        "curve",
    ),
    Tool("wandb", "W&B", "wandb", "`init`, `log`; its system metrics", plain, "wandb", "curve"),
    Tool(
        "mlflow", "MLflow", "mlflow", "`start_run(log_system_metrics=True)`, `log_metric`", plain, "mlflow", "curve"
    ),
    Tool("trackio", "trackio", "trackio", "`init`, `log`; its system metrics, alerts", plain, "trackio", "curve"),
    Tool("aim", "Aim", "aim", "`Run`, `track`; its system metrics", plain, "aim", "curve"),
    Tool("tensorboard", "TensorBoard", "tensorboard", "`add_scalar`", plain, "tensorboard", "curve"),
    Tool("memray", "memray", "memray", "`memray run --follow-fork`, `memray summary`", by_memray, "", "line"),
    Tool("torch.profiler", "torch.profiler", "", "`profile(profile_memory=True)`", plain, "profiler", "table"),
    Tool("py-spy", "py-spy", "", f"`py-spy dump --subprocesses` after {DUMP_SECONDS:.0f} s", plain, "", "stack"),
)
#: The training without a tool.
ALONE = Tool("alone", "", "", "")
TOOLS = {tool.name: tool for tool in _TOOLS}
