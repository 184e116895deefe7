"""Simulated CUDA devices: build their libraries, and run programs on them.

python tests/cuda_sim/simulator.py [--memory 4G[,3G…]] [--devices 1] -- COMMAND…

NVML alone needs g++ and no torch. The CUDA half is built if this environment holds PyTorch's CUDA wheel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parent
INCLUDE = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
_COMPILE = ("g++", "-std=c++17", "-O2", "-fPIC", "-shared")
#: PyTorch looks for the driver under this name; its functions are those of the preloaded library.
_DRIVER = "int cuda_sim_driver;"


def has_cuda() -> bool:
    """Return whether this environment has the headers that the CUDA half needs."""
    return (INCLUDE / "cuda.h").exists()


def build(folder: Path) -> Path:
    """Compile the libraries into a folder, unless they are newer than their sources; return the folder.

    Raises:
        subprocess.CalledProcessError: the compiler fails.
        FileNotFoundError: there is no g++.
    """
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))

    def compile_library(name: str, *arguments: str, text: str | None = None) -> None:
        target = folder / name
        if not target.exists() or target.stat().st_mtime < newest:
            scratch = folder / f".{name}.{os.getpid()}"  # others may build, or use, the same
            command = [*_COMPILE, f"-Wl,-soname,{name}", "-o", str(scratch), *arguments]
            subprocess.run(command, input=text, text=True, check=True)
            scratch.replace(target)

    compile_library("libnvidia-ml.so.1", str(SOURCES / "nvml.cpp"), "-lpthread")
    if has_cuda():
        compile_library("libcudasim.so", f"-I{INCLUDE}", str(SOURCES / "cuda.cpp"), "-lpthread", "-ldl")
        driver = ("-Wl,--no-as-needed", "-x", "c++", "-", "-x", "none", f"-L{folder}", "-lcudasim")
        compile_library("libcuda.so.1", *driver, text=_DRIVER)
    return folder


def environment(
    libraries: Path, *, memory: str = "4G", devices: int = 1, name: str = "", base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of programs that see the same devices.

    Args:
        libraries: where `build` put them.
        memory: of each device, separated by commas; K, M and G are powers of 1024.
        devices: how many there are.
        name: programs with the same name share the devices; a new one if it is empty.
        base: further variables of the environment.
    """
    changes = {
        "CUDA_SIM_NAME": name or uuid.uuid4().hex[:12],
        "CUDA_SIM_MEMORY": memory,
        "CUDA_SIM_DEVICES": str(devices),
        "LD_LIBRARY_PATH": ":".join(filter(None, (str(libraries), base.get("LD_LIBRARY_PATH")))),
    }
    if (libraries / "libcudasim.so").exists():
        changes["LD_PRELOAD"] = str(libraries / "libcudasim.so")
    return {**base, **changes}


def remove_registry(name: str) -> None:
    """Remove the account of the devices of that name; programs that still use them go on with theirs."""
    Path(f"/dev/shm/cuda-sim-{name}").unlink(missing_ok=True)


def main() -> None:
    """Run a command on simulated devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="4G")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--name", default="")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    libraries = build(Path(sys.prefix) / "cuda_sim")
    env = environment(libraries, memory=options.memory, devices=options.devices, name=options.name)
    try:
        sys.exit(subprocess.run(options.command, env=env).returncode)
    finally:
        if not options.name:
            remove_registry(env["CUDA_SIM_NAME"])


if __name__ == "__main__":
    main()
