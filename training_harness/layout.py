"""Layout of a Tidegauge home: the places and names of runs, and their manifests.

    <home>/runs/<run_id>/
        run.json                                    the manifest
        journal/<host>.<pid>.<stream>.<time_ns>.journal    time_ns: CLOCK_MONOTONIC when it was opened
        events/<host>.<pid>.jsonl
        lake.sqlite  data/                          written by the collector
        snapshots/                                  written by the harness, on OOM or on request
        requests/                                   requests of `tidegauge snapshot` to the harness
        loader-settings.<host>.json                 settings for DataLoaders, written by the collector

    <home>/launches/                                links to the runs of launchers whose ranks were given none

Standard library alone: both the harness (`attach()`) and the collector create runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from training_harness.journal import start_ticks
from training_harness.redaction import redact

HOME_VARIABLE = "TIDEGAUGE_HOME"
RUN_DIR_VARIABLE = "TIDEGAUGE_RUN_DIR"
DISABLED_VARIABLE = "TIDEGAUGE_DISABLED"
#: "0" switches the recognition of stages off.
STAGES_VARIABLE = "TIDEGAUGE_STAGES"
#: The devices that the command of a run may see (`visible_devices`), or `ALL_DEVICES`.
RUN_DEVICES_VARIABLE = "TIDEGAUGE_DEVICES"
ALL_DEVICES = "all"
MEMORY_HISTORY_VARIABLE = "TIDEGAUGE_MEMORY_HISTORY"
#: Place of a team's runs: a PostgreSQL URL, and a folder or s3:// prefix (`collector.store.cluster.postgres`).
STORE_VARIABLE = "TIDEGAUGE_STORE"
DATA_VARIABLE = "TIDEGAUGE_DATA"
#: Id of the run that begins, the same on every node that takes part in it.
RUN_ID_VARIABLE = "TIDEGAUGE_RUN_ID"
#: "1" in a trial of `tidegauge tune`, for scripts that then write no checkpoints; and the trial's loader settings.
TRIAL_VARIABLE = "TIDEGAUGE_TRIAL"
TRIAL_LOADER_VARIABLE = "TIDEGAUGE_TRIAL_LOADER"
CEILING = "ceiling"
#: "auto" if the loaders get the settings that the collector finds.
WORKERS_VARIABLE = "TIDEGAUGE_WORKERS"
WORKERS_AUTO = "auto"
#: Prefix of a number that every loader's batch size is multiplied by.
BATCH_TIMES = "batch*"

MANIFEST = "run.json"
MANIFEST_SCHEMA = 1
#: Prefix of the name of a directory that is being made or deleted, and is no run.
HIDDEN_PREFIX = ".pruned-"
#: Manifest of all nodes, next to the one of this node's part in a run.
NODES = "nodes.json"
#: Key in the manifest of a run that this node has no part in.
MIRROR = "mirror"
SNAPSHOTS = "snapshots"
#: Card of a run that a notebook shows, within its directory.
CARD = "card.html"
#: Largest manifest in bytes. It holds a command line, and Linux allows 6 MiB for one.
_MANIFEST_LIMIT_BYTES = 2**25
SUBDIRECTORIES = ("journal", "events", SNAPSHOTS)
#: Folder of the requests, made with the first one, and the kinds of requests.
REQUESTS = "requests"
SNAPSHOT_KINDS = ("allocator", "census", "growth", "profile")
#: Kinds that take several steps -> default number of steps.
SNAPSHOT_STEPS = {"growth": 100, "profile": 5}

#: A run id is the name of a directory, and of a schema in PostgreSQL, which cuts names at 63 bytes.
RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")

#: The only environment variables whose values are recorded in a manifest.
RECORDED_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "WORLD_SIZE",
    "ZE_AFFINITY_MASK",
)
#: Variables of Slurm that a manifest has too, in its `slurm`: the job, and its limit of memory in MiB.
SLURM_ENVIRONMENT = (
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_ID",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_RESTART_COUNT",
)


def home_path() -> Path:
    """Return the Tidegauge home: `TIDEGAUGE_HOME`, else the user's data directory (XDG)."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.environ.get("HOME", "~"), ".local", "share")
    return Path(data).expanduser() / "tidegauge"


def new_run_id(name: str, *, wall_seconds: float) -> str:
    """Return `<UTC yyyymmdd-hhmmss>-<name>-<4 hex>`; characters that are awkward in a path become `-`."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(wall_seconds))
    return f"{stamp}-{slug(name)}-{os.urandom(2).hex()}"


def name_in_run_id(run_id: str) -> str:
    """Return the name in an id that `new_run_id` made: that of the script, unless the user gave another one."""
    return run_id[16:-5]


def slug(name: str) -> str:
    """Return a name as it stands in a run id."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:34] or "run"


def loader_settings_path(run_dir: Path, host: str) -> Path:
    """Return the path of the settings that the collector of a host found for the DataLoaders there."""
    return run_dir / f"loader-settings.{host}.json"


def visible_devices(environ: Mapping[str, str]) -> str | None:
    """Return the devices that a process with this environment may see; None if all.

    ROCm takes CUDA's variable too, and oneAPI has its own ("Environment Variables" of HIP and of oneAPI).
    """
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    return next((environ[name] for name in names if name in environ), None)


def create_run(
    home: Path, *, name: str, argv: Sequence[str], tags: Mapping[str, str] | None = None, is_trial: bool = False
) -> Path:
    """Make a run directory (0700) with its manifest, and return its path.

    Its id is new, unless the environment gives one. `is_trial` is True for a trial of `tidegauge tune`.

    Raises:
        OSError: the home cannot be written, or has a run with the id from the environment.
        ValueError: the id from the environment is not valid.
    """
    run_id = os.environ.get(RUN_ID_VARIABLE)
    if run_id and not RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} is no run id: give up to 60 letters, digits, '_', '-' and '.'")
    run_dir = home / "runs" / (run_id or new_run_id(name, wall_seconds=time.time()))
    if (run_dir / MANIFEST).exists():
        if not read_manifest(run_dir).get(MIRROR):
            raise FileExistsError(errno.EEXIST, f"run {run_id} exists already", str(run_dir))
        mirror = run_dir.with_name(f"{HIDDEN_PREFIX}{run_dir.name}-{os.urandom(4).hex()}")
        os.rename(run_dir, mirror)  # the mirror of the other nodes' part gives way to the run itself
        shutil.rmtree(mirror)
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "run_id": run_dir.name,
        "name": name,
        "argv": redact(argv),
        "cwd": os.getcwd(),
        "git_commit": _git_commit(),
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "environment": {key: os.environ[key] for key in RECORDED_ENVIRONMENT if key in os.environ},
        "slurm": {key: os.environ[key] for key in SLURM_ENVIRONMENT if key in os.environ},
        "tags": dict(tags or {}),
        "is_trial": is_trial,
        "store": "shared" if os.environ.get(STORE_VARIABLE) else "embedded",
        "anchors": {socket.gethostname(): wall_anchor()},
        "collector": None,
        "command": None,
        "end_time_ns": None,
        "exit_status": None,
    }
    for directory in (home, home / "runs", run_dir):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_manifest(run_dir, manifest)
    for part in SUBDIRECTORIES:
        (run_dir / part).mkdir(mode=0o700, exist_ok=True)
    return run_dir


def launcher_pid() -> int | None:
    """Return the pid of the launcher (torchrun, say) that started this process as one of several ranks, or None."""
    return os.getppid() if "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" else None


def ray_group() -> str | None:
    """Return the group of Ray's workers that this process trains in, or None outside of Ray.

    Ray's own process on a node starts the workers of all jobs, and outlives them. So it is no launcher to go by.
    """
    if os.environ.get("RAY_RAYLET_PID") != str(os.getppid()):
        return None
    return f"ray-{os.environ.get('RAY_JOB_ID')}-{os.environ.get('MASTER_PORT')}"


def join_or_create_run(home: Path, *, name: str, argv: Sequence[str]) -> tuple[Path, bool]:
    """Return the run of this process, and whether this call made it: the first rank of a launcher makes the run.

    Raises:
        OSError: the home cannot be written.
    """
    launcher = launcher_pid()
    if launcher is None:
        return create_run(home, name=name, argv=argv), True
    launches = home / "launches"
    for directory in (home, launches):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    group = ray_group()
    name_of_launch = f"{socket.gethostname()}.{launcher}.{start_ticks(launcher)}"
    link = launches / (f"{name_of_launch}.{group}" if group else name_of_launch)
    with _lock(launches / "lock"):
        if link.is_symlink():
            return link.readlink(), False
        run_dir = create_run(home, name=name, argv=argv)
        link.symlink_to(run_dir.absolute())
    return run_dir, True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one rank of a launcher in at a time. On a file system without locks, a rank that comes late fails."""
    with path.open("ab") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def wall_anchor() -> dict[str, Any]:
    """Read both clocks at once, so that monotonic times of this boot can be shown as wall time."""
    return {"time_ns": time.monotonic_ns(), "wall_ns": time.time_ns(), "boot_id": boot_id()}


def boot_id() -> str | None:
    """Return the kernel's id of this boot: monotonic times and pids mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """Read the manifest of a run.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a manifest, or a newer Tidegauge wrote it.
    """
    path = run_dir / MANIFEST
    try:
        manifest = json.loads(read_plain(path, _MANIFEST_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or not _fits(manifest.get("schema"), int):
        raise ValueError(f"{path} is damaged: it holds no manifest")
    if manifest["schema"] > MANIFEST_SCHEMA:
        raise ValueError(
            f"{path} has manifest schema {manifest['schema']}, this Tidegauge reads up to "
            f"{MANIFEST_SCHEMA}: upgrade Tidegauge"
        )
    for name, shape in _MANIFEST_FIELDS.items():
        if not _fits(manifest.get(name), shape):
            raise ValueError(f"{path} is damaged: {name!r} is {repr(manifest.get(name))[:80]}")
    return dict.fromkeys(_MANIFEST_FIELDS) | manifest


def read_plain(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a plain file. A FIFO would keep the reader waiting, and a device has no end.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no plain file, or has more than `limit_bytes`.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no plain file")
        if status.st_size > limit_bytes:
            raise ValueError(f"it has {status.st_size} bytes, the bound is {limit_bytes}")
        return file.read()


def write_manifest(run_dir: Path, manifest: Mapping[str, Any], *, name: str = MANIFEST) -> None:
    """Replace the manifest."""
    replace_file(run_dir / name, json.dumps(manifest, indent=1))


#: Mode of files by which a collector, maybe of another user, speaks to the training.
FOR_TRAINING = 0o644


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file atomically: neither a reader nor a kill leaves half of one.

    Raises:
        OSError: it cannot be written.
    """
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(scratch, path)


def _fits(value: object, shape: Any) -> bool:
    """Return whether a value has a shape: a type, one of several, a dict of fields, or [shape of the values]."""
    if isinstance(shape, tuple):
        return any(_fits(value, one) for one in shape)
    if isinstance(shape, list):
        return isinstance(value, dict) and all(_fits(each, shape[0]) for each in value.values())
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), part) for name, part in shape.items())
    if shape is int:
        return type(value) is int and -(2**63) <= value < 2**63
    return isinstance(value, shape)


_PROCESS = {"host": str, "pid": int, "start_ticks": int}
#: Field that readers of a manifest rely on -> shape of its value.
_MANIFEST_FIELDS: dict[str, Any] = {
    "name": str,
    "host": (str, NoneType),
    "anchors": [{"time_ns": int, "wall_ns": int}],
    "collector": (_PROCESS, NoneType),
    "command": (_PROCESS, NoneType),
    "end_time_ns": (int, NoneType),
    "exit_status": (int, NoneType),
}


def _git_commit() -> str | None:
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return git.stdout.strip() or None if git.returncode == 0 else None
