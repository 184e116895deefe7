"""Names that a user knows: a loader by its variable, line and dataset; a process without a rank by its pid."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from collector.diagnosis.loading.loaders import LoaderKey, loader_settings, replaced_loaders
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables
from collector.findings import Finding, Locus
from collector.store import ProcessKey


def add_loader_name(finding: Finding, tables: RunTables) -> Finding:
    """Return the finding with the name of its loader, where one loader fits its locus."""
    where, settings = finding.locus, loader_settings(tables)
    if where.loader is None:
        return finding
    names = {loader_name(settings[place]) for place in _fitting(where, tables)}
    name = names.pop() if len(names) == 1 else None
    return dataclasses.replace(finding, locus=dataclasses.replace(where, loader_name=name)) if name else finding


def without_replaced_settings(findings: list[Finding], tables: RunTables) -> list[Finding]:
    """Leave out findings on a DataLoader's earlier setting that are there for its last setting too."""
    replaced = replaced_loaders(tables)
    if not replaced:
        return findings
    places = [list(_fitting(finding.locus, tables)) for finding in findings]
    last = {(finding.kind, *place) for finding, fitting in zip(findings, places, strict=True) for place in fitting}
    return [
        finding
        for finding, fitting in zip(findings, places, strict=True)
        if not any((finding.kind, place[0], replaced[place]) in last for place in fitting if place in replaced)
    ]


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


def _fitting(where: Locus, tables: RunTables) -> Iterator[LoaderKey]:
    """Yield the loaders that a finding may be about."""
    main_pid = where.pid if where.main_pid is None and where.role != "worker" else where.main_pid
    for (main, loader), setting in loader_settings(tables).items():
        if loader != where.loader or where.rank != setting.get("rank"):
            continue
        if where.host in (None, main[0]) and main_pid in (None, main[1]):
            yield main, loader
