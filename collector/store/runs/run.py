"""A run's directory: its paths, its manifest, and its processes that are still alive."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from collector.store.runs import documents
from collector.store.runs.annotations import Annotation, annotation_of
from training_harness import layout
from training_harness.journal import stat_fields

ProcessKey = tuple[str, int, int]
"""(host, pid, start_ticks)."""

#: Prefix of the name of a run directory that is being deleted and is no longer a run.
PRUNED_PREFIX = layout.HIDDEN_PREFIX
#: States in /proc/PID/stat of a process that is not alive: zombie and dead (proc_pid_stat(5)).
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
    def home(self) -> Path:
        """The home that the run is in."""
        return self.path.parent.parent

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest, read from the file each time.

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
    def _readable_manifest(self) -> dict[str, Any]:
        """The manifest; empty if it cannot be read."""
        try:
            return self.manifest
        except TidegaugeError:
            return {}

    @property
    def annotation(self) -> Annotation:
        """The notes of people on the run, read from the file each time."""
        return annotation_of(documents.read_document(self.path, documents.ANNOTATION))

    @property
    def recorded_tags(self) -> dict[str, str]:
        """The tags that the run was started with; none if the manifest cannot be read."""
        return tags_of(self._readable_manifest)

    @property
    def name(self) -> str:
        """The name that was given to the run last.

        Raises:
            TidegaugeError: the manifest cannot be read.
        """
        return self.annotation.name or str(self.manifest["name"])

    @property
    def tags(self) -> Mapping[str, str]:
        """The present tags."""
        tags = self.annotation.tags
        return self.recorded_tags if tags is None else tags

    @property
    def anchors(self) -> dict[str, dict[str, Any]]:
        """Host -> one reading of its monotonic and its wall clock, for every node of the run that is known here.

        Raises:
            TidegaugeError: the manifest cannot be read.
        """
        return {**self._nodes.get("anchors", {}), **self.manifest.get("anchors", {})}

    @property
    def _nodes(self) -> dict[str, Any]:
        """The manifest of all nodes, next to the one of this node's part; empty without one."""
        try:
            nodes: dict[str, Any] = json.loads((self.path / layout.NODES).read_bytes())
            if not isinstance(nodes["anchors"], dict):
                raise ValueError("it holds no anchors")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise TidegaugeError(f"{self.path / layout.NODES} is damaged ({error}): delete it") from None
        return nodes

    @property
    def is_mirror(self) -> bool:
        """True if this node has no part in the run; False if the manifest cannot be read."""
        return bool(self._readable_manifest.get(layout.MIRROR))

    @property
    def is_shared(self) -> bool:
        """True if the lake is in the shared store; False if the manifest cannot be read."""
        return bool(self._readable_manifest.get("store") == "shared")

    @property
    def has_ended_everywhere(self) -> bool:
        """True unless another node of a shared run goes on, as far as this node knows.

        Raises:
            TidegaugeError: a manifest cannot be read.
        """
        if not self.is_shared or self.is_mirror:
            return not self.is_shared or self.manifest["end_time_ns"] is not None
        return self._nodes.get("end_time_ns") is not None

    @property
    def awaits_store(self) -> bool:
        """True if the shared store may still lack records of this node; False if the manifest cannot be read."""
        return self.is_shared and not self.manifest.get("is_stored")

    @property
    def journal_dir(self) -> Path:
        """The directory of the journals."""
        return self.path / "journal"

    @property
    def events_dir(self) -> Path:
        """The directory of the event logs."""
        return self.path / "events"

    @property
    def data_dir(self) -> Path:
        """The directory of the lake's Parquet files."""
        return self.path / "data"

    @property
    def catalog_path(self) -> Path:
        """The lake's catalog; it exists once a collector has opened the run."""
        return self.path / "lake.sqlite"


def tags_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags in a manifest: those that the run was started with."""
    tags = manifest.get("tags")
    return {str(key): str(value) for key, value in tags.items()} if isinstance(tags, dict) else {}


def refuse_links(run: Run) -> None:
    """Refuse a run with links: files are deleted in the run's own directory, never in the target of a link.

    Raises:
        TidegaugeError: a part of the run is a link.
    """
    for path in (run.journal_dir, run.events_dir, run.data_dir, run.catalog_path):
        if path.is_symlink():
            raise TidegaugeError(
                f"{path} is a link to {os.readlink(path)}, which may belong to another run: "
                "replace it with the run's own"
            )


def of_this_boot(run: Run) -> bool:
    """Return True if the run began on this host in this boot, so that its clock and pids are valid here."""
    anchor = run.manifest.get("anchors", {}).get(socket.gethostname())
    boot = layout.boot_id()
    return anchor is not None and boot is not None and anchor.get("boot_id") == boot


def command_and_collector(manifest: Mapping[str, Any]) -> frozenset[ProcessKey]:
    """Return the keys of the command and the collector, as far as the manifest names them."""
    processes = (manifest.get("command"), manifest.get("collector"))
    return frozenset((entry["host"], entry["pid"], entry["start_ticks"]) for entry in processes if entry)


def living_processes(
    run: Run, keys: Iterable[ProcessKey], proc: Path = Path("/proc")
) -> frozenset[ProcessKey] | None:
    """Return the keys of the processes that are alive now; a zombie is not.

    None stands for unknown: the run is of another boot, or a key is of another host.
    """
    keys = frozenset(keys)
    if not of_this_boot(run) or any(host != socket.gethostname() for host, _, _ in keys):
        return None
    return frozenset(key for key in keys if _is_alive(key, proc))


def _is_alive(key: ProcessKey, proc: Path) -> bool:
    _, pid, start_ticks = key
    try:
        fields = stat_fields((proc / str(pid) / "stat").read_bytes())
    except OSError:
        return False
    return int(fields[19]) == start_ticks and fields[0] not in _DEAD_STATES
