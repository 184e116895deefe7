"""Finding runs in a home, their manifests, and which of their processes still live."""

from __future__ import annotations

import calendar
import functools
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from training_harness import layout

ProcessKey = tuple[str, int, int]
"""(host, pid, start_ticks)."""

LATEST = "latest"
_STAMP_CHARACTERS = len("yyyymmdd-hhmmss")
_SHOWN_MATCHES = 5
#: So begins the name of a run directory that is being deleted, and is no run any more.
PRUNED_PREFIX = layout.HIDDEN_PREFIX
#: Process states of /proc/PID/stat that are no life: zombie and dead (proc_pid_stat(5)).
_DEAD_STATES = (b"Z", b"X", b"x")


@dataclass(frozen=True, slots=True)
class Run:
    """One run directory."""

    path: Path

    @property
    def run_id(self) -> str:
        """The name of the directory."""
        return self.path.name

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest, read afresh each time.

        Raises:
            TidegaugeError: it cannot be read, is damaged, or is of a newer Tidegauge.

        """
        try:
            return layout.read_manifest(self.path)
        except ValueError as error:
            raise TidegaugeError(str(error)) from None
        except OSError as error:
            raise TidegaugeError(f"cannot read the manifest of run {self.run_id}: {error}") from None

    @property
    def anchors(self) -> dict[str, dict[str, Any]]:
        """Host -> one reading of both its clocks, for every node of the run that is known here.

        Raises:
            TidegaugeError: the manifest cannot be read.

        """
        own: dict[str, dict[str, Any]] = self.manifest.get("anchors", {})
        try:
            others = json.loads((self.path / layout.NODES).read_bytes())["anchors"]
        except FileNotFoundError:
            return own
        except (OSError, ValueError, KeyError) as error:
            raise TidegaugeError(f"{self.path / layout.NODES} is damaged ({error}): delete it") from None
        return {**others, **own}

    @property
    def is_mirror(self) -> bool:
        """Whether this node has no part in it; False if the manifest cannot tell."""
        try:
            return bool(self.manifest.get(layout.MIRROR))
        except TidegaugeError:
            return False

    @property
    def is_shared(self) -> bool:
        """Whether its lake is in the shared store; False if the manifest cannot tell."""
        try:
            return bool(self.manifest.get("store") == "shared")
        except TidegaugeError:
            return False

    @property
    def journal_dir(self) -> Path:
        """Where the journals are."""
        return self.path / "journal"

    @property
    def events_dir(self) -> Path:
        """Where the event logs are."""
        return self.path / "events"

    @property
    def data_dir(self) -> Path:
        """Where the lake keeps its Parquet files."""
        return self.path / "data"

    @property
    def catalog_path(self) -> Path:
        """The lake's catalog; it exists once a collector has opened the run."""
        return self.path / "lake.sqlite"


def list_runs(home: Path) -> list[Run]:
    """All runs of a home, and of the shared store if one is configured, newest first.

    Raises:
        TidegaugeError: the home cannot be read.

    """
    if os.environ.get(layout.STORE_VARIABLE):
        from collector.store import mirror  # and with it DuckDB

        mirror.refresh(home)
    try:
        paths = [
            path for path in (home / "runs").iterdir() if not path.name.startswith(PRUNED_PREFIX) and _is_run(path)
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TidegaugeError(f"cannot list the runs of {home}: {error}") from None
    paths.sort(key=_started_wall_ns, reverse=True)
    return [Run(path) for path in paths]


def find_run(home: Path, spec: str) -> Run:
    """The run that `spec` means: a run id, `latest`, a path to a run directory, or a unique part of an id.

    A whole word of an id, as the name, comes before a part of a word.

    Raises:
        TidegaugeError: there is none, or more than one.

    """
    as_path = Path(os.path.expanduser(spec))
    if spec and os.path.isfile(as_path / layout.MANIFEST):
        return Run(as_path.resolve())
    runs = list_runs(home)
    if not runs:
        raise TidegaugeError(
            f"no run {spec!r}: {home / 'runs'} holds no runs; start one with `tidegauge run -- COMMAND`"
        )
    if spec == LATEST:
        return runs[0]
    exact = [run for run in runs if run.run_id == spec]
    prefixed = [run for run in runs if spec and run.run_id.startswith(spec)]
    worded = [run for run in runs if f"-{spec}-" in f"-{run.run_id}-"]
    matches = exact or prefixed or worded or [run for run in runs if spec and spec in run.run_id]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise TidegaugeError(
            f"no run {spec!r} among the {len(runs)} in {home / 'runs'}: give a run id, a unique part of one, the "
            f"path of a run directory, or `{LATEST}`; `tidegauge runs` lists them"
        )
    shown = ", ".join(run.run_id for run in matches[:_SHOWN_MATCHES])
    more = ", …" if len(matches) > _SHOWN_MATCHES else ""
    raise TidegaugeError(f"{spec!r} fits {len(matches)} runs ({shown}{more}): give more of the id")


def _is_run(path: Path) -> bool:
    """Whether a directory of the home is a run, also one of another user that cannot be looked into."""
    try:
        return (path / layout.MANIFEST).is_file() and path.name.encode() != b""
    except PermissionError:
        return True
    except UnicodeEncodeError:  # Tidegauge gives no such name, and DuckDB finds no such path
        return False


def refuse_links(run: Run) -> None:
    """Journals are deleted and Parquet files swept in the run's own directory, never where a link in it leads.

    Raises:
        TidegaugeError: a part of the run is a link.

    """
    for path in (run.journal_dir, run.events_dir, run.data_dir, run.catalog_path):
        if path.is_symlink():
            raise TidegaugeError(
                f"{path} is a link to {os.readlink(path)}, and what is there may be another's: "
                "put the run's own in its place"
            )


def of_this_boot(run: Run) -> bool:
    """Whether the run began on this host in this boot, so that its clock and pids are ours."""
    anchor = run.manifest.get("anchors", {}).get(socket.gethostname())
    boot = layout.boot_id()
    return anchor is not None and boot is not None and anchor.get("boot_id") == boot


def command_and_collector(manifest: Mapping[str, Any]) -> frozenset[ProcessKey]:
    """Those of the two that the manifest names."""
    named = (manifest.get("command"), manifest.get("collector"))
    return frozenset((who["host"], who["pid"], who["start_ticks"]) for who in named if who)


def living_processes(
    run: Run, keys: Iterable[ProcessKey], proc: Path = Path("/proc")
) -> frozenset[ProcessKey] | None:
    """Those of `keys` that are alive now; a zombie is not.

    Returns:
        None where it can't be known: the run is of another boot, or a key is of another host.

    """
    wanted = frozenset(keys)
    if not of_this_boot(run) or any(host != socket.gethostname() for host, _, _ in wanted):
        return None
    return frozenset(key for key in wanted if _is_alive(key, proc))


def _is_alive(key: ProcessKey, proc: Path) -> bool:
    _, pid, start_ticks = key
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return False
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[19]) == start_ticks and fields[0] not in _DEAD_STATES


@functools.cache
def _started_wall_ns(path: Path) -> int:
    """When the run began; if the manifest does not tell, its id may. 0 if nothing does."""
    try:
        anchors = layout.read_manifest(path)["anchors"].values()
        return min(int(anchor["wall_ns"]) for anchor in anchors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    try:
        return calendar.timegm(time.strptime(path.name[:_STAMP_CHARACTERS], "%Y%m%d-%H%M%S")) * 10**9
    except ValueError:
        return 0
