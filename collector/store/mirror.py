"""What a machine knows of the runs in the shared store: a directory for each, with one manifest for all its nodes.

So a run of other machines is found, read and reported like one of this one. The directory of a run that this node
has a part in is its own: there, what the others say is kept beside the manifest.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from collector.store import shared
from collector.store.runs import Run
from training_harness import layout

#: A page that shows the list of runs asks for it every second.
_EVERY_SECONDS = 5.0
_log = logging.getLogger("tidegauge")
_looked: dict[Path, float] = {}


def refresh(home: Path) -> None:
    """Bring the directories of the runs in the shared store up to date; without it, those that are known stay."""
    now = time.monotonic()
    if now - _looked.get(home, -_EVERY_SECONDS) < _EVERY_SECONDS:
        return
    _looked[home] = now
    try:
        found = shared.nodes()
    except TidegaugeError as error:
        _log.warning("tidegauge: %s: of its runs, those are listed that were seen before", error)
        return
    for run_id, manifests in found.items():
        if not layout.RUN_ID.fullmatch(run_id):  # it becomes a path: who may write there need not write here
            continue
        try:
            _note(home / "runs" / run_id, merged(manifests))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning(
                "tidegauge: run %s of the shared store is left out (%s: %s)", run_id, type(error).__name__, error
            )


def take_part(run: Run) -> None:
    """Tell the store of this node's part in a run, and note what it knows of the others.

    Raises:
        TidegaugeError: the store cannot be reached, or does not take this node.

    """
    parts = shared.register(run.manifest)
    try:
        _note(run.path, merged(parts))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TidegaugeError(f"cannot note the other nodes of run {run.run_id}: {error}") from None


def is_first(run: Run) -> bool:
    """Whether this node began first of those whose part in the run goes on, or all parts are over.

    Raises:
        TidegaugeError: the store cannot be reached.

    """
    parts = shared.nodes(run.run_id)[run.run_id]
    going_on = [part for part in parts if part["end_time_ns"] is None] or parts
    return bool(merged(going_on)["host"] == run.manifest["host"])


def merged(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One manifest for all nodes of a run, in the words and on the clock of the one that began first.

    The run has ended when all have; it failed as the first that did.
    """
    ordered = sorted(manifests, key=lambda manifest: _began_ns(manifest, manifest["host"]))
    first = ordered[0]
    ends_ns = [_on_clock_of(first, manifest) for manifest in ordered]
    statuses = [manifest["exit_status"] for manifest in ordered]
    over = None not in ends_ns
    return {
        **first,
        "anchors": {host: anchor for manifest in ordered for host, anchor in manifest["anchors"].items()},
        "end_time_ns": max(end_ns for end_ns in ends_ns if end_ns is not None) if over else None,
        "exit_status": next((status for status in statuses if status), statuses[0]) if over else None,
        layout.MIRROR: True,
    }


def _note(path: Path, manifest: dict[str, Any]) -> None:
    """Write what is new; of a run that is new here, a whole directory at once."""
    if not path.exists():
        scratch = path.with_name(f"{layout.HIDDEN_PREFIX}{path.name}-{secrets.token_hex(4)}")
        for part in ("", *layout.SUBDIRECTORIES):
            (scratch / part).mkdir(mode=0o700, parents=True)
        layout.write_manifest(scratch, manifest)
        try:
            scratch.rename(path)
        except OSError:  # it has begun here meanwhile
            shutil.rmtree(scratch)
        return
    name = layout.MANIFEST if layout.read_manifest(path).get(layout.MIRROR) else layout.NODES
    known = path / name
    if not known.exists() or json.loads(known.read_bytes()) != manifest:
        layout.write_manifest(path, manifest, name=name)


def _began_ns(manifest: Mapping[str, Any], host: str) -> int:
    return int(manifest["anchors"][host]["wall_ns"])


def _on_clock_of(first: Mapping[str, Any], manifest: Mapping[str, Any]) -> int | None:
    """When a node's part of the run ended, on the first node's clock; None while it goes on."""
    if manifest["end_time_ns"] is None:
        return None
    own, other = first["anchors"][first["host"]], manifest["anchors"][manifest["host"]]
    return int(manifest["end_time_ns"] - other["time_ns"] + other["wall_ns"] - own["wall_ns"] + own["time_ns"])
