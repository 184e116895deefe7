"""Names that a user knows: a loader by its variable, line and dataset; a process without a rank by its pid."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from collector.diagnosis.loading.loaders import loader_settings, replaced_loaders
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.findings import Finding, Locus
from collector.store import ProcessKey


def add_loader_name(finding: Finding, tables: RunTables) -> Finding:
    """Return the finding with the name of its loader, where one loader fits its locus."""
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


def without_replaced_settings(findings: list[Finding], tables: RunTables) -> list[Finding]:
    """Leave out findings on a DataLoader's earlier setting that are there for its last setting too."""
    replaced, settings = replaced_loaders(tables), loader_settings(tables)
    if not replaced:
        return findings
    last = {
        (finding.kind, main, loader)
        for finding in findings
        for (main, loader), setting in settings.items()
        if main is not None and loader == finding.locus.loader and _fits(finding.locus, main, setting)
    }

    def is_repeated(finding: Finding) -> bool:
        return any(
            (finding.kind, main, newest) in last
            for (main, loader), newest in replaced.items()
            if main is not None
            and loader == finding.locus.loader
            and _fits(finding.locus, main, settings[main, loader])
        )

    return [finding for finding in findings if not is_repeated(finding)]


def loader_name(setting: Mapping[str, Any]) -> str:
    """Return `train_loader, main.py:37, ImageFolder, batch 64`, as far as its `loader` event has them."""
    path, batch_size = setting.get("file"), setting.get("batch_size")
    parts = (
        setting.get("variable"),
        f"{os.path.basename(str(path))}:{setting.get('line')}" if path else None,
        setting.get("dataset"),
        f"batch {batch_size}" if batch_size is not None else None,
    )
    return ", ".join(str(part) for part in parts if part)


def pid_if_shared(tables: RunTables, main: ProcessKey, rank: int | None) -> int | None:
    """Return the pid of a training process without a rank on a host that has several of them; else None."""
    mains = lifecycle_of(tables).mains
    return main[1] if rank is None and sum(host == main[0] for host, _, _ in mains) > 1 else None


def _fits(where: Locus, main: ProcessKey, setting: Mapping[str, Any]) -> bool:
    main_pid = where.pid if where.main_pid is None and where.role != "worker" else where.main_pid
    of_process = main_pid in (None, main[1])
    return where.host in (None, main[0]) and of_process and where.rank == setting.get("rank")
