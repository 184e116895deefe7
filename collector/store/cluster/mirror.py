"""Mirror the runs of the shared store: a local directory for each run, with one manifest for all its nodes.

So a run of other machines is found, read and reported like a local one. A run that this node takes part in has its
directory already: there, the manifest of all nodes is in a second file, next to the node's own manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from collector.store.cluster import postgres
from collector.store.runs import documents
from collector.store.runs.run import Run
from training_harness import layout

#: Seconds between two queries of the store; a page that lists the runs refreshes every second.
_REFRESH_SECONDS = 5.0
_log = logging.getLogger("tidegauge")
#: Home -> monotonic seconds of its last refresh.
_refreshed: dict[Path, float] = {}


def refresh(home: Path) -> None:
    """Update the directories of the runs in the shared store; without the store they stay as they are."""
    now = time.monotonic()
    if now - _refreshed.get(home, -_REFRESH_SECONDS) < _REFRESH_SECONDS:
        return
    _refreshed[home] = now
    try:
        manifests_by_run = postgres.nodes()
    except TidegaugeError as error:
        _log.warning("tidegauge: %s: only its runs that were seen before are listed", error)
        return
    for run_id, manifests in manifests_by_run.items():
        if not layout.RUN_ID.fullmatch(
            run_id
        ):  # it becomes a path, and writers of the store need no right to write here
            continue
        try:
            _write(home / "runs" / run_id, merge_manifests(manifests))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning(
                "tidegauge: run %s of the shared store is left out (%s: %s)", run_id, type(error).__name__, error
            )
    _refresh_documents(home)


def _refresh_documents(home: Path) -> None:
    """Write the documents that have changed in the store; those of runs that are not in this home are left out."""
    try:
        changed = {}
        for (run_id, name), digest in postgres.document_hashes().items():
            folder = _folder(home, run_id, name)
            if folder is None or _digest(folder, name) == digest:
                continue
            if folder == home or Run(folder).is_shared:  # a local run may have the same id
                changed[run_id, name] = folder
        for (run_id, name), text in (postgres.documents(changed) if changed else {}).items():
            folder = changed[run_id, name]
            with documents.lock_documents(folder):
                layout.replace_file(documents.document_path(folder, name), text)
    except (OSError, TidegaugeError) as error:
        _log.warning("tidegauge: notes and results of the shared store are not up to date: %s", error)


def _folder(home: Path, run_id: str, name: str) -> Path | None:
    """Return the folder of a document of the store; None for one that this home has no place for."""
    if run_id == postgres.NO_RUN:
        return home if name == documents.SHARED_KNOWN_FINDINGS else None
    folder = home / "runs" / run_id
    is_valid = layout.RUN_ID.fullmatch(run_id) and name in documents.RUN_DOCUMENTS
    return folder if is_valid and folder.exists() else None


def _digest(folder: Path, name: str) -> str | None:
    try:
        text = documents.document_path(folder, name).read_bytes()
    except OSError:
        return None
    return hashlib.md5(text, usedforsecurity=False).hexdigest()


def take_part(run: Run) -> None:
    """Register this node's part in a run with the store, and write the manifests of the others here.

    Raises:
        TidegaugeError: the store cannot be reached, or does not take this node.
    """
    parts = postgres.register(run.manifest)
    try:
        _write(run.path, merge_manifests(parts))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TidegaugeError(f"cannot note the other nodes of run {run.run_id}: {error}") from None
    _refresh_documents(run.home)  # a verdict needs to know the findings that are known


def is_first(run: Run) -> bool:
    """Return True if this node began first among the nodes still in the run, or among all once all have ended.

    Raises:
        TidegaugeError: the store cannot be reached.
    """
    parts = postgres.nodes(run.run_id)[run.run_id]
    running = [part for part in parts if part["end_time_ns"] is None] or parts
    return bool(merge_manifests(running)["host"] == run.manifest["host"])


def merge_manifests(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one manifest for all nodes of a run: that of the node that began first, on its clock.

    The run has ended when all nodes have. Its exit status is the first one that is not 0.
    """
    ordered = sorted(manifests, key=lambda manifest: int(manifest["anchors"][manifest["host"]]["wall_ns"]))
    first = ordered[0]
    ends_ns = [_on_clock_of(first, manifest) for manifest in ordered]
    statuses = [manifest["exit_status"] for manifest in ordered]
    has_ended = None not in ends_ns
    return {
        **first,
        "anchors": {host: anchor for manifest in ordered for host, anchor in manifest["anchors"].items()},
        "end_time_ns": max(end_ns for end_ns in ends_ns if end_ns is not None) if has_ended else None,
        "exit_status": next((status for status in statuses if status), statuses[0]) if has_ended else None,
        layout.MIRROR: True,
    }


def _write(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest that has changed; for a run that is new here, create its whole directory at once."""
    if not path.exists():
        scratch = path.with_name(f"{layout.HIDDEN_PREFIX}{path.name}-{secrets.token_hex(4)}")
        for part in ("", *layout.SUBDIRECTORIES):
            (scratch / part).mkdir(mode=0o700, parents=True)
        layout.write_manifest(scratch, manifest)
        try:
            scratch.rename(path)
        except OSError:  # the run has begun here meanwhile
            shutil.rmtree(scratch)
        return
    name = layout.MANIFEST if layout.read_manifest(path).get(layout.MIRROR) else layout.NODES
    written = path / name
    if not written.exists() or json.loads(written.read_bytes()) != manifest:
        layout.write_manifest(path, manifest, name=name)


def _on_clock_of(first: Mapping[str, Any], manifest: Mapping[str, Any]) -> int | None:
    """Return when a node's part of the run ended, on the first node's clock; None while it goes on."""
    if manifest["end_time_ns"] is None:
        return None
    anchor, other = first["anchors"][first["host"]], manifest["anchors"][manifest["host"]]
    return int(
        manifest["end_time_ns"] - other["time_ns"] + other["wall_ns"] - anchor["wall_ns"] + anchor["time_ns"]
    )
