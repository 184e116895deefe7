"""Run a program under a tool, in a folder of its own; a run that ended there before is read, not run again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environments import REPOSITORY, python_of
from benchmarks.sight.tools import DUMP_SECONDS, Tool
from tests.cgroups import memory_cgroup
from tests.cuda_sim import simulator

#: A /dev/shm, a /proc/meminfo and a memory cgroup of its own, then the command.
_CONFINED = """
mount -t tmpfs -o size=4g sight /dev/shm && mount --bind meminfo /proc/meminfo && echo $$ > "$0/cgroup.procs" &&
exec "$@"
"""
#: Memory limit of the training that the kernel kills, and of all others.
_LIMIT_MIB, _AMPLE_MIB = 1200, 1 << 20
#: Memory of the simulated GPU on which the training runs out of it, and of that of all others.
_SMALL_GPU, _AMPLE_GPU = "900M", "4G"
TRAINING_SECONDS = 25.0
#: A tool that does not start the training on a busy machine is tried again.
_ATTEMPTS = 3
#: A training that lasts longer gets Ctrl-C, as from a user, and is killed if it does not end.
PATIENCE_SECONDS, LAST_SECONDS = 70.0, 60.0


def said(tool: Tool, fault: str, device: str, keep: Path) -> dict[str, Any]:
    """Return what a tool said of a fault; run the program on `cpu` or a simulated `cuda` if it is not kept."""
    folder = keep / device / fault / tool.name
    if not (folder / "said.json").exists():
        for _ in range(_ATTEMPTS):
            if (folder / "began").exists() and (folder / "status.json").exists():
                break
            _run(tool, fault, device, folder)
        reading = str(REPOSITORY / "benchmarks" / "sight" / "reading.py")
        words = [str(python_of(tool.environment)), "-P", reading, tool.name, str(folder)]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"SIGHT_DEVICE": device},
        )
        status = json.loads((folder / "status.json").read_text())
        content = json.loads(done.stdout.splitlines()[-1]) | status
        (folder / "said.json").write_text(json.dumps(content))
    return dict(json.loads((folder / "said.json").read_text()))


def _run(tool: Tool, fault: str, device: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and its children
    environ = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(folder),
        "SIGHT_FAULT": fault,
        "SIGHT_TOOL": tool.edit,
        "SIGHT_DEVICE": device,
        "SIGHT_SECONDS": str(TRAINING_SECONDS),
        "TIDEGAUGE_HOME": str(folder / "home"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "COLUMNS": "160",
    }
    if device == "cuda":
        libraries = simulator.build(Path(sys.prefix) / "cuda_sim")
        memory = _SMALL_GPU if fault == "cuda-oom" else _AMPLE_GPU
        environ = simulator.environment(libraries, memory=memory, base=environ)
    program = str(REPOSITORY / "benchmarks" / "sight" / "program.py")
    command = tool.command(python_of(tool.environment), program, folder)
    with (
        _cgroup(_LIMIT_MIB if fault == "oom-kill" else _AMPLE_MIB) as group,
        _own_meminfo(group, folder),
        (folder / "output").open("wb") as output,
    ):
        words = ["unshare", "--mount", "sh", "-c", _CONFINED, str(group), *command]
        process = subprocess.Popen(
            words,
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        while process.poll() is None and not (folder / "began").exists():
            time.sleep(0.1)
        begun = time.monotonic()
        if tool.name == "py-spy":
            _dump(process, folder)
        _wait(process, PATIENCE_SECONDS - (time.monotonic() - begun))
        seconds = time.monotonic() - begun
    status = {"status": process.returncode, "seconds": seconds, "load": os.getloadavg()[1]}
    (folder / "status.json").write_text(json.dumps(status))


def _wait(process: subprocess.Popen[bytes], patience_seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_seconds)
        return
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _dump(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Write the stacks of the training and its workers, as py-spy shows them."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DUMP_SECONDS)
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--subprocesses", "--pid", str(process.pid)]
    with (folder / "dump").open("wb") as output:
        subprocess.run(command, stdout=output, stderr=output, check=False)


@contextlib.contextmanager
def _cgroup(limit_mib: int) -> Iterator[Path]:
    """A memory cgroup for the block; processes that are left in it are killed."""
    with memory_cgroup(f"sight-{os.getpid()}", limit_mib) as group:
        try:
            yield group
        finally:
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def _own_meminfo(group: Path, folder: Path) -> Iterator[None]:
    """Write a meminfo with the memory of the cgroup alone, as lxcfs does, until the block ends.

    Recorders of the host's memory read it, so that other programs of this machine are not in their curves.
    """
    ended, path = threading.Event(), folder / "meminfo"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def write() -> None:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int(stat["total_rss"]) + int(stat["total_shmem"])
        amounts = {
            "MemTotal": total,
            "MemFree": total - used,
            "MemAvailable": total - used,
            "Buffers": 0,
            "Cached": 0,
        }
        amounts |= {"Active": used, "Inactive": 0, "Shmem": int(stat["total_shmem"]), "Slab": 0, "SReclaimable": 0}
        amounts |= {"SwapTotal": 0, "SwapFree": 0, "SwapCached": 0}
        lines = [f"{name + ':':<16}{size // 1024:>12} kB\n" for name, size in amounts.items()]
        os.pwrite(file, "".join(lines).encode(), 0)  # always as long, so a reader never finds a part of it

    def follow() -> None:
        while not ended.wait(0.5):
            write()

    file = os.open(path, os.O_RDWR | os.O_CREAT)
    write()
    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()
        os.close(file)
