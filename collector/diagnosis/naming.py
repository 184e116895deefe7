"""Names that a user knows: a loader by its variable, its line and what it loads; processes that are told apart."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from collector.diagnosis.findings import Finding, Locus
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.loops import loader_settings
from collector.diagnosis.tables import RunTables
from collector.store.runs import ProcessKey


def named(finding: Finding, tables: RunTables) -> Finding:
    """Return the finding with the name of its loader, and with its process where several trainings share a rank."""
    where = finding.locus
    if where.loader is None:
        return finding
    names = {
        loader_name(setting)
        for (main, loader), setting in loader_settings(tables).items()
        if loader == where.loader and main is not None and _fits(where, main, setting)
    }
    name = names.pop() if len(names) == 1 else None
    return dataclasses.replace(finding, locus=dataclasses.replace(where, loader_name=name)) if name else finding


def loader_name(setting: Mapping[str, Any]) -> str:
    """Return `train_loader, main.py:37, ImageFolder, batch 64`, as far as its `loader` event tells."""
    path, batch_size = setting.get("file"), setting.get("batch_size")
    parts = (
        setting.get("variable"),
        f"{os.path.basename(str(path))}:{setting.get('line')}" if path else None,
        setting.get("dataset"),
        f"batch {batch_size}" if batch_size is not None else None,
    )
    return ", ".join(str(part) for part in parts if part)


def pid_if_shared(tables: RunTables, main: ProcessKey, rank: int | None) -> int | None:
    """Return the pid of a training process where its rank does not tell it from another one; else None."""
    mains = tables.once("mains", lambda: Lifecycle(tables).mains)
    return main[1] if rank is None and sum(host == main[0] for host, _, _ in mains) > 1 else None


def _fits(where: Locus, main: ProcessKey, setting: Mapping[str, Any]) -> bool:
    own = where.pid if where.main_pid is None and where.role != "worker" else where.main_pid
    of_process = own in (None, main[1])
    return where.host in (None, main[0]) and of_process and where.rank == setting.get("rank")
