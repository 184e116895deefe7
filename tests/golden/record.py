"""Record the runs of tests/data/runs: python -m tests.golden.record [NAME …].

Those with a GPU need PyTorch's CUDA build: .cuda/bin/python -m tests.golden.record. Golden files are written
afterwards, with python -m tests.golden --write.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2

from tests.cgroups import memory_cgroup
from tests.conftest import bare_environment
from tests.cuda_sim import simulator
from tests.golden.cases import CASES, Case
from tests.golden.journals import LEFT_OUT, keep_journals_alone, linked_journals
from tests.recorded_runs import RUNS
from training_harness.jobs import photographs

REPOSITORY = Path(__file__).resolve().parents[2]
_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
#: Classes, images per class and pixels of the job `images`.
_CLASSES, _PER_CLASS, _SIZE = ("discs", "rings"), 32, (320, 240)


def main() -> None:
    """Record the named runs, or all that this environment can."""
    RUNS.mkdir(parents=True, exist_ok=True)
    possible = [name for name, case in CASES.items() if bool(case.gpu_memory) == simulator.has_cuda()]
    for name in sys.argv[1:] or possible:
        begun = time.monotonic()
        record(name, CASES[name])
        size = (RUNS / f"{name}.tar.gz").stat().st_size
        print(f"{name}: {time.monotonic() - begun:.0f} s, {size / 1000:.0f} kB", flush=True)


def record(name: str, case: Case) -> None:
    """Run the training in a new folder and keep its run directory."""
    with tempfile.TemporaryDirectory(prefix="train-") as name_of_folder, contextlib.ExitStack() as after:
        folder = Path(name_of_folder)
        # Tracebacks and command lines name these folders, not those of this machine.
        (folder / "venv").symlink_to(sys.prefix)
        (folder / "source").symlink_to(REPOSITORY)
        if "pictures" in case.job:
            make_pictures(folder / "pictures")
        environ = bare_environment() | {
            "PATH": f"{folder}/venv/bin{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}/source",
            "XDG_CACHE_HOME": f"{folder}/cache",
            "OMP_NUM_THREADS": "1",
        }
        if case.gpu_memory:
            libraries = simulator.build(Path(sys.prefix) / "cuda_sim")
            environ = simulator.environment(libraries, memory=case.gpu_memory, base=environ)
            after.callback(simulator.remove_registry, environ["CUDA_SIM_NAME"])
        command = ["python", "-P", "-m", "training_harness.jobs", *case.job]
        if case.memory_mib is not None:
            group = after.enter_context(memory_cgroup(f"train-{name}", case.memory_mib))
            command = ["sh", "-c", _JOIN, str(group), *command]
        after.enter_context(linked_journals(folder / "home", folder / "journal"))
        watched = [f"{folder}/venv/bin/python", "-P", "-m", "collector", "run", "--home", "home", "--name", name]
        subprocess.run(
            [*watched, "--interval", str(case.interval_seconds), "--", *command],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            check=False,
            preexec_fn=file_limit(case.files_count),
        )
        (run,) = (folder / "home" / "runs").iterdir()
        keep_journals_alone(run, folder / "journal" / run.name)
        keep(run, name)


def keep(run: Path, name: str) -> None:
    """Write the archive; scratch files of the store, its locks and the verdict of that day are left out."""
    with tarfile.open(RUNS / f"{name}.tar.gz", "w:gz", compresslevel=9) as archive:
        archive.add(run, name, filter=lambda entry: None if entry.name.endswith(LEFT_OUT) else entry)


def make_pictures(folder: Path) -> None:
    """Write small photographs of two classes."""
    for name in _CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(_PER_CLASS):
            small = cv2.resize(photographs.compose(name, number), _SIZE)
            cv2.imwrite(str(folder / name / f"{number}.jpg"), small)


def file_limit(count: int | None) -> Callable[[], None] | None:
    """Return what sets the limit of open files in a new process."""
    if count is None:
        return None
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


if __name__ == "__main__":
    main()
