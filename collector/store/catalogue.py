"""Find runs: those of a home, and of the shared store where one is configured."""

from __future__ import annotations

import calendar
import functools
import os
import time
from collections.abc import Iterable
from pathlib import Path

from collector.errors import TidegaugeError
from collector.store.runs.run import PRUNED_PREFIX, Run
from training_harness import layout

LATEST = "latest"
_STAMP_CHARACTERS = len("yyyymmdd-hhmmss")
_SHOWN_MATCHES = 5


def list_runs(home: Path) -> list[Run]:
    """Return all runs of a home, and of the shared store if one is configured, newest first.

    Raises:
        TidegaugeError: the home cannot be read.
    """
    if os.environ.get(layout.STORE_VARIABLE):
        from collector.store.cluster import mirror

        mirror.refresh(home)
    try:
        paths = [
            path for path in (home / "runs").iterdir() if not path.name.startswith(PRUNED_PREFIX) and _is_run(path)
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TidegaugeError(f"cannot list the runs of {home}: {error}") from None
    paths.sort(key=started_wall_ns, reverse=True)
    return [Run(path) for path in paths]


def own_first(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with the trials of `tidegauge tune` after all others; otherwise in the given order."""
    return sorted(runs, key=is_trial)


def find_run(home: Path, spec: str) -> Run:
    """Return the run that `spec` names: an id, a name, `latest`, a path to a run directory, a unique part of an id.

    A name given later comes before one of an id, that before a word of a longer one, and a word before a part.

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
        return own_first(runs)[0]
    exact = [run for run in runs if run.run_id == spec]
    prefixed = [run for run in runs if spec and run.run_id.startswith(spec)]
    renamed = [run for run in runs if run.annotation.name == spec]
    # A name stands in an id between the start's date and time and the last word.
    named = [run for run in runs if "-".join(run.run_id.split("-")[2:-1]) == spec]
    with_word = [run for run in runs if f"-{spec}-" in f"-{run.run_id}-"]
    with_part = [run for run in runs if spec and spec in run.run_id]
    matches = exact or prefixed or renamed or named or with_word or with_part
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise TidegaugeError(
            f"no run {spec!r} among the {len(runs)} in {home / 'runs'}: give a run id, a unique part of one, the "
            f"name of a run, the path of a run directory, or `{LATEST}`; `tidegauge runs` lists them"
        )
    shown = ", ".join(run.run_id for run in matches[:_SHOWN_MATCHES])
    more = ", …" if len(matches) > _SHOWN_MATCHES else ""
    raise TidegaugeError(f"{spec!r} fits {len(matches)} runs ({shown}{more}): give more of the id")


def _is_run(path: Path) -> bool:
    """Return True if a directory of the home is a run; one of another user that cannot be read counts."""
    try:
        return (path / layout.MANIFEST).is_file() and path.name.encode() != b""
    except PermissionError:
        return True
    except UnicodeEncodeError:  # Tidegauge gives no such name, and DuckDB finds no such path
        return False


def is_trial(run: Run) -> bool:
    """Return True for a trial of `tidegauge tune`; False if the manifest cannot be read."""
    return _constants(run.path)[1]


def started_wall_ns(path: Path) -> int:
    """Return the start of a run from its manifest, else from its id, else 0."""
    return _constants(path)[0]


@functools.cache
def _constants(path: Path) -> tuple[int, bool]:
    """Return what never changes in a manifest: the start, and whether the run is a trial."""
    try:
        manifest = layout.read_manifest(path)
    except (OSError, ValueError):
        return _stamp_ns(path.name), False
    try:
        start_ns = min(int(anchor["wall_ns"]) for anchor in manifest["anchors"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        start_ns = _stamp_ns(path.name)
    return start_ns, manifest.get("is_trial") is True


def _stamp_ns(run_id: str) -> int:
    """Return the time that a run id begins with; 0 if it does not."""
    try:
        return calendar.timegm(time.strptime(run_id[:_STAMP_CHARACTERS], "%Y%m%d-%H%M%S")) * 10**9
    except ValueError:
        return 0
