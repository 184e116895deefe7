"""Record the runs in tests/data/gpu, on simulated devices: PyTorch's real allocator, its journals and snapshots.

.cuda/bin/python -m tests.cuda_sim.record [NAME …]

`allocator` is no run: it is PyTorch's statistics of its allocators (programs/allocator_state.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import bare_environment
from tests.cuda_sim import simulator
from tests.golden.journals import keep_journals_alone, linked_journals
from tests.recorded_runs import ALLOCATOR, GPU_RUNS

PROGRAMS = Path(__file__).parent / "programs"
#: Takes memory of device 0, and keeps it until its input ends.
_ANOTHER_JOB = "import torch; x = torch.empty({}, dtype=torch.uint8, device='cuda'); print(flush=True); input()"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A program of `programs/` on simulated devices.

    Attributes:
        words: the program and its arguments.
        memory: of each device.
        options: of `tidegauge run`.
        environ: further variables of its environment.
        others_bytes: memory that another job has on device 0 meanwhile, without its context.
    """

    words: tuple[str, ...]
    memory: str = "1G"
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    others_bytes: int = 0


def _growth(kind: str, *words: str, steps: int = 400, **traits: object) -> Recording:
    words = ("growth.py", kind, "--steps", str(steps), *words)
    return Recording(words=words, **traits)  # type: ignore[arg-type]


_MIB = 1 << 20
_MIB_PER_STEP = ("--bytes", str(_MIB), "--seconds", "0.05")
_OFTEN = ("--interval", "0.25")
_WITH_LINES = ("--memory-history", "200")
RECORDINGS = {
    "tensor-leak": _growth("tensors", *_MIB_PER_STEP),
    "library-growth": _growth("library", *_MIB_PER_STEP),
    "out-of-memory": Recording(words=("errors.py", "backward")),
    "share-met": Recording(words=("errors.py", "forward", "--fraction", "0.3"), memory="2G"),
    "two-devices": Recording(words=("devices.py", ".", "--use", "0", "--use", "1", "--parallel"), memory="1G,768M"),
    "uneven-batches": _growth("nothing", "--noise", others_bytes=200 * _MIB, options=("--interval", "0.5")),
    "evaluation": _growth("evaluation"),
    "late-optimizer": _growth("late_optimizer"),
    "leak-to-the-end": _growth(
        "tensors", *_MIB_PER_STEP, steps=4000, memory="640M", options=(*_OFTEN, *_WITH_LINES)
    ),
    "another-job": Recording(
        words=("errors.py", "backward"), memory="1500M", options=_OFTEN, others_bytes=400 * _MIB
    ),
    "caught-errors": Recording(words=("errors.py", "backward", "--catch"), memory="2G", options=_OFTEN),
    "malloc-async": Recording(
        words=("errors.py", "forward"),
        memory="2G",
        environ={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    ),
    "device-lost": Recording(
        words=("devices.py", ".", "--use", "0", "--lose", "lost"),
        options=_OFTEN,
        environ={"CUDA_SIM_NVML_LOST": "lost"},
    ),
    "snapshots": Recording(
        words=("asking.py", "said", *["python -P -m collector snapshot {run}"] * 2),
        options=_WITH_LINES,
    ),
    "investigated": _growth("tensors", "--bytes", str(_MIB // 2), steps=700, options=("--investigate",)),
}
#: Scratch files of the store, its locks, and what torch alone reads.
_LEFT_OUT = ("-shm", ".lock", "/result.json", ".pickle")


def main() -> None:
    """Record the named runs, or all."""
    GPU_RUNS.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or (*RECORDINGS, "allocator"):
        path = record(name, RECORDINGS[name]) if name in RECORDINGS else record_allocator()
        print(f"{name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def record(name: str, recording: Recording) -> Path:
    """Run the program and keep its run directory, with its journals instead of a lake."""
    with prepared(recording.memory) as (folder, environ), contextlib.ExitStack() as after:
        environ |= recording.environ
        if recording.others_bytes:
            after.enter_context(another_job(recording.others_bytes, environ))
        command = [f"{folder}/venv/bin/python", "-P", "-m", "collector", "run", "--home", "home", "--name", name]
        with linked_journals(folder / "home", folder / "journal"):
            subprocess.run(
                [*command, *recording.options, "--", "python", *recording.words],
                cwd=folder,
                env=environ,
                check=False,
            )
        (run,) = (folder / "home" / "runs").iterdir()
        keep_journals_alone(run, folder / "journal" / run.name)
        path = GPU_RUNS / f"{name}.tar.gz"
        with tarfile.open(path, "w:gz", compresslevel=9) as archive:
            archive.add(run, name, filter=lambda entry: None if entry.name.endswith(_LEFT_OUT) else entry)
        return path


def record_allocator() -> Path:
    """Keep PyTorch's statistics of its allocators."""
    with prepared("1G,1G") as (folder, environ):
        subprocess.run(["python", "allocator_state.py", str(ALLOCATOR)], cwd=folder, env=environ, check=True)
    return ALLOCATOR


@contextlib.contextmanager
def prepared(memory: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a folder with the programs, and the environment of processes on new devices, for the block."""
    libraries = simulator.build(Path(sys.prefix) / "cuda_sim")
    environ = simulator.environment(
        libraries, memory=memory, devices=memory.count(",") + 1, base=bare_environment()
    )
    with tempfile.TemporaryDirectory(prefix="train-") as name_of_folder, contextlib.ExitStack() as after:
        after.callback(simulator.remove_registry, environ["CUDA_SIM_NAME"])
        folder = Path(name_of_folder)
        # Tracebacks and command lines name these folders, not those of this machine.
        (folder / "venv").symlink_to(sys.prefix)
        (folder / "source").symlink_to(Path(__file__).parents[2])
        environ |= {"PATH": f"{folder}/venv/bin{os.pathsep}{environ['PATH']}", "PYTHONPATH": f"{folder}/source"}
        for program in PROGRAMS.glob("*.py"):
            shutil.copy(program, folder)
        yield folder, environ


@contextlib.contextmanager
def another_job(size_bytes: int, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold memory of device 0 in another process for the block."""
    command = [sys.executable, "-c", _ANOTHER_JOB.format(size_bytes)]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdout.readline()  # it has its memory
        try:
            yield
        finally:
            job.stdin.close()


if __name__ == "__main__":
    main()
