"""Known findings: those that a team has accepted for a command, each with the reason.

They stay visible, as information with the reason, but they do not lead a verdict and send no alert. They are stored
in the home, for runs of the shared store in the store.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collector.findings import SEVERITIES, Identity, identity
from collector.store import (
    KNOWN_FINDINGS,
    SHARED_KNOWN_FINDINGS,
    Run,
    change_document,
    document_path,
    read_document,
)

if TYPE_CHECKING:
    from collector.diagnosis import Verdict

SCHEMA = 1


@dataclass(frozen=True, slots=True, order=True)
class Command:
    """The identity of a command over runs: its words, with the interpreter and the script as short as possible."""

    text: str = ""
    folder: str = ""


def command_of(manifest: Mapping[str, Any]) -> Command:
    """Return the command of a run: neither where Python is installed nor `./` before the script is a difference."""
    words = [str(word) for word in manifest.get("argv") or ()]
    folder = str(manifest.get("cwd") or "")
    program = [re.sub(r"^(python|pypy)[\d.]*$", r"\1", os.path.basename(word)) for word in words[:1]]
    arguments = (word.removeprefix(f"{folder or '.'}/").removeprefix("./") for word in words[1:])
    return Command(shlex.join([*program, *arguments]), folder)


#: (command, identity of a finding) -> the reason why it is accepted.
Known = Mapping[tuple[Command, Identity], str]


def known_findings(home: Path) -> Known:
    """Return the known findings of all commands; entries of another shape are left out."""
    bodies = [read_document(home, name).get("findings") for name in (KNOWN_FINDINGS, SHARED_KNOWN_FINDINGS)]
    return {
        (Command(row["command"], row["folder"]), Identity(row["kind"], row["place"])): row["reason"]
        for body in bodies
        if isinstance(body, list)
        for row in body
        if isinstance(row, dict) and all(isinstance(row.get(name), str) for name in _FIELDS)
    }


_FIELDS = ("command", "folder", "kind", "place", "reason")


def change_known(run: Run, identities: Iterable[Identity], reason: str | None) -> None:
    """Make findings known for the command of a run; None as the reason makes them count again.

    Raises:
        TidegaugeError: that cannot be stored, or the manifest cannot be read.
    """
    command = command_of(run.manifest)
    changed = [
        {"command": command.text, "folder": command.folder, "kind": one.kind, "place": one.place}
        for one in identities
    ]

    def change(body: dict[str, Any]) -> dict[str, Any]:
        rows = body.get("findings")
        kept = [
            row
            for row in (rows if isinstance(rows, list) else [])
            if isinstance(row, dict) and {name: row.get(name) for name in _FIELDS[:-1]} not in changed
        ]
        added = [] if reason is None else [{**row, "reason": reason} for row in changed]
        return {"schema": SCHEMA, "findings": [*kept, *added]}

    name = SHARED_KNOWN_FINDINGS if run.is_shared else KNOWN_FINDINGS
    change_document(run.home, name, change, "" if run.is_shared else None)


def known_files(home: Path) -> list[Path]:
    """Return the files of known findings, which may not exist."""
    return [document_path(home, name) for name in (KNOWN_FINDINGS, SHARED_KNOWN_FINDINGS)]


def with_known(verdict: Verdict, run: Run) -> Verdict:
    """Return the verdict with the known findings of the run's command as information, after the others of it."""
    known = known_findings(run.home)
    if not known:
        return verdict
    command = command_of(run.manifest)
    findings = []
    for finding in verdict.findings:
        if reason := known.get((command, identity(finding))):
            summary = f"Known: {reason.rstrip('.')}. {finding.summary}"
            finding = replace(finding, severity="info", known=reason, summary=summary)
        findings.append(finding)
    return replace(verdict, findings=tuple(sorted(findings, key=lambda each: SEVERITIES.index(each.severity))))
