"""Where runs live, how they are named, and their manifest: the layout of a Tidegauge home.

    <home>/runs/<run_id>/
        run.json                                    the manifest
        journal/<host>.<pid>.<stream>.<time_ns>.journal    the time (CLOCK_MONOTONIC) of its opening
        events/<host>.<pid>.jsonl
        lake.sqlite  data/                          written by the collector
        snapshots/                                  written by the harness, on OOM or on request
        requests/                                   what `tidegauge snapshot` asks of the harness

    <home>/launches/                                which run the ranks of a launcher belong to, if none was given

Standard library alone: both the harness (`attach()`) and the collector create runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training_harness.journal import start_ticks

HOME_VARIABLE = "TIDEGAUGE_HOME"
RUN_DIR_VARIABLE = "TIDEGAUGE_RUN_DIR"
DISABLED_VARIABLE = "TIDEGAUGE_DISABLED"
#: "0" switches the recognition of stages off.
STAGES_VARIABLE = "TIDEGAUGE_STAGES"
#: The `CUDA_VISIBLE_DEVICES` of the command of a run, or `ALL_DEVICES`.
RUN_DEVICES_VARIABLE = "TIDEGAUGE_DEVICES"
ALL_DEVICES = "all"
MEMORY_HISTORY_VARIABLE = "TIDEGAUGE_MEMORY_HISTORY"
#: Where a team's runs go: a PostgreSQL URL, and a folder or s3:// prefix (`collector.store.shared`).
STORE_VARIABLE = "TIDEGAUGE_STORE"
DATA_VARIABLE = "TIDEGAUGE_DATA"
#: The id of the run that begins, the same on every node that takes part in it.
RUN_ID_VARIABLE = "TIDEGAUGE_RUN_ID"
#: "1" in a trial of `tidegauge tune`, for scripts that then write no checkpoints; and what its loaders are to be.
TRIAL_VARIABLE = "TIDEGAUGE_TRIAL"
TRIAL_LOADER_VARIABLE = "TIDEGAUGE_TRIAL_LOADER"
CEILING = "ceiling"
#: Before a number: every loader's batch size times that.
BATCH_TIMES = "batch*"

MANIFEST = "run.json"
MANIFEST_SCHEMA = 1
#: So begins the name of a directory that is being made or deleted, and is no run.
HIDDEN_PREFIX = ".pruned-"
#: Beside the manifest of one node's part in a run: that of all nodes.
NODES = "nodes.json"
#: In the manifest of a run that this node has no part in.
MIRROR = "mirror"
SNAPSHOTS = "snapshots"
#: A manifest holds a command line, of which Linux allows 6 MiB.
_MANIFEST_LIMIT_BYTES = 2**25
SUBDIRECTORIES = ("journal", "events", SNAPSHOTS)
#: The folder of the requests, made with the first one, and what can be asked for.
REQUESTS = "requests"
SNAPSHOT_KINDS = ("allocator", "census", "growth", "profile")
#: Those that take several steps, and how many if nothing is said.
SNAPSHOT_STEPS = {"growth": 100, "profile": 5}

#: An id is the name of a directory, and of a schema in PostgreSQL, which cuts names at 63 bytes.
RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")
#: User and password in a URL.
_IN_URL = re.compile(r"://[^/\s@]+@")
_SECRET = re.compile(r"token|secret|passw|credential|api[-_]?key", re.IGNORECASE)

#: The only environment variables whose values are recorded in a manifest.
RECORDED_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "WORLD_SIZE",
)


def home_path() -> Path:
    """The Tidegauge home: `TIDEGAUGE_HOME`, else the user's data directory (XDG)."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.environ.get("HOME", "~"), ".local", "share")
    return Path(data).expanduser() / "tidegauge"


def new_run_id(name: str, *, wall_seconds: float) -> str:
    """`<UTC yyyymmdd-hhmmss>-<name>-<4 hex>`; characters that are awkward in a path become `-`."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(wall_seconds))
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:34] or "run"
    return f"{stamp}-{slug}-{secrets.token_hex(2)}"


def create_run(home: Path, *, name: str, argv: Sequence[str], tags: Mapping[str, str] | None = None) -> Path:
    """Make a run directory (0700) with its manifest, and return its path.

    Its id is new, unless the environment gives one.

    Raises:
        OSError: the home cannot be written, or has a run of the given id.
        ValueError: the given id cannot be one.

    """
    given = os.environ.get(RUN_ID_VARIABLE)
    if given and not RUN_ID.fullmatch(given):
        raise ValueError(f"{given!r} is no run id: give up to 60 letters, digits, '_', '-' and '.'")
    run_dir = home / "runs" / (given or new_run_id(name, wall_seconds=time.time()))
    if (run_dir / MANIFEST).exists():
        if not read_manifest(run_dir).get(MIRROR):
            raise FileExistsError(errno.EEXIST, f"run {given} exists already", str(run_dir))
        told = run_dir.with_name(f"{HIDDEN_PREFIX}{run_dir.name}-{secrets.token_hex(4)}")
        os.rename(run_dir, told)  # what this node was told of the others
        shutil.rmtree(told)
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "run_id": run_dir.name,
        "name": name,
        "argv": redacted(argv),
        "cwd": os.getcwd(),
        "git_commit": _git_commit(),
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "environment": {key: os.environ[key] for key in RECORDED_ENVIRONMENT if key in os.environ},
        "tags": dict(tags or {}),
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
    """The process that started this one as one of several ranks (torchrun and its like); None if there is none."""
    return os.getppid() if "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" else None


def join_or_create_run(home: Path, *, name: str, argv: Sequence[str]) -> tuple[Path, bool]:
    """The run of this process, and whether it was made here: of the ranks of one launcher, the first makes it.

    Raises:
        OSError: the home cannot be written.

    """
    launcher = launcher_pid()
    if launcher is None:
        return create_run(home, name=name, argv=argv), True
    launches = home / "launches"
    for directory in (home, launches):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    link = launches / f"{socket.gethostname()}.{launcher}.{start_ticks(launcher)}"
    with _one_at_a_time(launches / "lock"):
        if link.is_symlink():
            return link.readlink(), False
        made = create_run(home, name=name, argv=argv)
        link.symlink_to(made.absolute())
    return made, True


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Only one rank of a launcher does this at once; where there are no locks, one that is late fails."""
    with path.open("ab") as held:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def wall_anchor() -> dict[str, Any]:
    """One reading of both clocks, so that monotonic times of this boot can be shown as wall time."""
    return {"time_ns": time.monotonic_ns(), "wall_ns": time.time_ns(), "boot_id": boot_id()}


def boot_id() -> str | None:
    """The kernel's id of this boot: monotonic times and pids mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def redacted(argv: Sequence[str]) -> list[str]:
    """A command line without the values of options and variables that are named like secrets, or in URLs."""
    safe: list[str] = []
    secret_follows = False
    for word in argv:
        word = _IN_URL.sub("://***@", word)
        option, equals, _ = word.partition("=")
        is_name = option.startswith("-") or (bool(equals) and option.isidentifier())
        named = is_name and _SECRET.search(option) is not None
        safe.append("***" if secret_follows else f"{option}=***" if named and equals else word)
        secret_follows = named and not equals
    return safe


def redacted_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, but for those that are named like secrets."""
    return {name: "***" if _SECRET.search(str(name)) else value for name, value in values.items()}


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a manifest, or of a newer Tidegauge.

    """
    path = run_dir / MANIFEST
    try:
        manifest = json.loads(read_plain(path, _MANIFEST_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or not _is_int64(manifest.get("schema")):
        raise ValueError(f"{path} is damaged: it holds no manifest")
    if manifest["schema"] > MANIFEST_SCHEMA:
        raise ValueError(
            f"{path} has manifest schema {manifest['schema']}, this Tidegauge reads up to "
            f"{MANIFEST_SCHEMA}: upgrade Tidegauge"
        )
    for name, fits in _MANIFEST_FIELDS.items():
        if not fits(manifest.get(name)):
            raise ValueError(f"{path} is damaged: {name!r} is {repr(manifest.get(name))[:80]}")
    return dict.fromkeys(_MANIFEST_FIELDS) | manifest


def read_plain(path: Path, limit_bytes: int) -> bytes:
    """The content of a plain file; a FIFO would keep the reader waiting, and a device has no end.

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
    """Replace the manifest atomically, so that a reader or a kill never meets half of one."""
    path = run_dir / name
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(manifest, stream, indent=1)
    os.replace(scratch, path)


def _is_int64(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_process(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("host"), str)
        and _is_int64(value.get("pid"))
        and _is_int64(value.get("start_ticks"))
    )


def _are_anchors(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(anchor, dict) and _is_int64(anchor.get("time_ns")) and _is_int64(anchor.get("wall_ns"))
        for anchor in value.values()
    )


#: What the readers of a manifest rely on.
_MANIFEST_FIELDS: dict[str, Callable[[object], bool]] = {
    "name": lambda value: isinstance(value, str),
    "host": lambda value: value is None or isinstance(value, str),
    "anchors": _are_anchors,
    "collector": lambda value: value is None or _is_process(value),
    "command": lambda value: value is None or _is_process(value),
    "end_time_ns": lambda value: value is None or _is_int64(value),
    "exit_status": lambda value: value is None or _is_int64(value),
}


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
