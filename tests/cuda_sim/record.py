"""Record the runs in tests/data/gpu, on simulated devices: PyTorch's real allocator, its journals and snapshots.

.cuda/bin/python -m tests.cuda_sim.record [NAME …]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.cuda_sim import simulator

PROGRAMS = Path(__file__).parent / "programs"
RUNS = Path(__file__).parents[1] / "data" / "gpu"
#: name -> memory of the devices, and the program with its arguments
CASES = {
    "tensor-leak": ("1G", ("growth.py", "tensors", "--bytes", "1048576", "--steps", "400", "--seconds", "0.05")),
    "library-growth": ("1G", ("growth.py", "library", "--bytes", "1048576", "--steps", "400", "--seconds", "0.05")),
    "out-of-memory": ("1G", ("errors.py", "backward")),
    "share-met": ("2G", ("errors.py", "forward", "--fraction", "0.3")),
    "two-devices": ("1G,768M", ("devices.py", ".", "--use", "0", "--use", "1", "--parallel")),
}
#: Scratch files of the store, and its locks.
_LEFT_OUT = ("-shm", ".lock")


def main() -> None:
    libraries = simulator.build(Path(sys.prefix) / "cuda_sim")
    RUNS.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or CASES:
        memory, words = CASES[name]
        environ = simulator.environment(libraries, memory=memory, devices=memory.count(",") + 1)
        with tempfile.TemporaryDirectory(prefix="train-") as folder:
            # Tracebacks and command lines name these folders, not those of this machine.
            (Path(folder) / "venv").symlink_to(sys.prefix)
            (Path(folder) / "source").symlink_to(Path(__file__).parents[2])
            environ |= {"PATH": f"{folder}/venv/bin{os.pathsep}{environ['PATH']}", "PYTHONPATH": f"{folder}/source"}
            for program in PROGRAMS.glob("*.py"):
                shutil.copy(program, folder)
            command = ["tidegauge", "run", "--home", "home", "--name", name, "--", "python", *words]
            subprocess.run(command, cwd=folder, env=environ, check=False)
            (run,) = (Path(folder) / "home" / "runs").iterdir()
            with tarfile.open(RUNS / f"{name}.tar.gz", "w:gz") as archive:
                archive.add(run, name, filter=lambda entry: None if entry.name.endswith(_LEFT_OUT) else entry)
        simulator.remove_registry(environ["CUDA_SIM_NAME"])


if __name__ == "__main__":
    main()
