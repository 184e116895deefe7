"""Change the documents of runs: in a run's directory, and for a shared run in the shared store, for all nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collector.errors import TidegaugeError
from collector.store.runs.annotations import Annotation, Edit, annotation_of
from collector.store.runs.documents import ANNOTATION, document_path, lock_documents, read_document
from collector.store.runs.run import Run
from training_harness.layout import replace_file

Change = Callable[[dict[str, Any]], Mapping[str, Any]]


def annotate(run: Run, edit: Edit) -> Annotation:
    """Change the annotation of a run and return it. Two editors of different things both keep their changes.

    Raises:
        TidegaugeError: it cannot be stored.
    """
    tags, key = run.recorded_tags, run.run_id if run.is_shared else None
    return annotation_of(
        change_document(run.path, ANNOTATION, lambda body: asdict(edit.apply(annotation_of(body), tags)), key)
    )


def change_document(folder: Path, name: str, change: Change, shared_key: str | None) -> Mapping[str, Any]:
    """Change a document of a run or of a home and return it.

    `shared_key` is the run's id if the shared store has the document too, "" for one of all its runs.

    Raises:
        TidegaugeError: it cannot be stored.
    """
    path = document_path(folder, name)
    try:
        with lock_documents(folder):
            before = read_document(folder, name)
            if shared_key is None:
                text = _as_text(change(before))
            else:
                from collector.store.cluster import postgres

                def change_text(stored: str | None) -> str:
                    return _as_text(change(before if stored is None else json.loads(stored)))

                text = postgres.change_document(shared_key, name, change_text)
            replace_file(path, text)
    except OSError as error:
        raise TidegaugeError(f"cannot write {path}: {error.strerror or error}; make its folder writable") from None
    body: Mapping[str, Any] = json.loads(text)
    return body


def _as_text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, allow_nan=False)
