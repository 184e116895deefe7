"""Change the documents of runs: in a run's directory, and for a shared run in the shared store, for all nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from collector.store.runs import documents
from collector.store.runs.annotations import Annotation, Edit, annotation_of
from collector.store.runs.run import Run

Change = Callable[[dict[str, Any]], Mapping[str, Any]]


def annotate(run: Run, edit: Edit) -> Annotation:
    """Change the annotation of a run and return it. Two editors of different things both keep their changes.

    Raises:
        TidegaugeError: it cannot be stored.
    """
    tags = run.recorded_tags
    body = change_document(run, documents.ANNOTATION, lambda body: asdict(edit.apply(annotation_of(body), tags)))
    return annotation_of(body)


def change_document(run: Run, name: str, change: Change) -> Mapping[str, Any]:
    """Change a document of a run and return it.

    Raises:
        TidegaugeError: it cannot be stored.
    """
    return _change(run.path, run.run_id if run.is_shared else None, name, change)


def change_home_document(home: Path, name: str, change: Change, *, is_shared: bool) -> Mapping[str, Any]:
    """Change a document of a home, or of the shared store, and return it.

    Raises:
        TidegaugeError: it cannot be stored.
    """
    return _change(home, "" if is_shared else None, name, change)


def _change(folder: Path, shared_key: str | None, name: str, change: Change) -> Mapping[str, Any]:
    try:
        with documents.lock_documents(folder):
            before = documents.read_document(folder, name)
            if shared_key is None:
                text = _as_text(change(before))
            else:
                from collector.store.cluster import postgres

                def change_text(stored: str | None) -> str:
                    return _as_text(change(before if stored is None else json.loads(stored)))

                text = postgres.change_document(shared_key, name, change_text)
            documents.write_document(folder, name, text)
    except OSError as error:
        path = documents.document_path(folder, name)
        raise TidegaugeError(f"cannot write {path}: {error.strerror or error}; make its folder writable") from None
    body: Mapping[str, Any] = json.loads(text)
    return body


def _as_text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, allow_nan=False)
