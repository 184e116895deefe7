"""Small JSON documents of a run or of a home: what people and verdicts say of runs, apart from their records.

Each is one file that is replaced as a whole. A change is made under a lock, so that two editors lose nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training_harness.layout import read_plain

#: Name and tags that were given later, notes, and the pin of a run (`annotations.Annotation`).
ANNOTATION = "annotation"
#: Figures and findings of a run that has ended (`collector.report.results.Result`).
RESULT = "result"
#: Findings that are known, with the reasons (`collector.report.known`): those of the home's own runs, and those of
#: runs of the shared store.
KNOWN_FINDINGS, SHARED_KNOWN_FINDINGS = "known-findings", "shared-known-findings"
#: Documents of a run.
RUN_DOCUMENTS = (ANNOTATION, RESULT)
#: Bytes of the largest document.
_LIMIT_BYTES = 2**22
_LOCK_NAME = "documents.lock"


def document_path(folder: Path, name: str) -> Path:
    """Return the file of a document."""
    return folder / f"{name}.json"


def read_document(folder: Path, name: str) -> dict[str, Any]:
    """Return a document; empty if there is none, or if it cannot be read."""
    try:
        body = json.loads(read_plain(document_path(folder, name), _LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


@contextlib.contextmanager
def lock_documents(folder: Path) -> Iterator[None]:
    """Keep other editors of a folder's documents out; on a file system without locks, the last one wins.

    Raises:
        OSError: the folder cannot be written.
    """
    descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
