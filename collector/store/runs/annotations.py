"""The annotation of a run: the name and the tags that people give it later, their notes, and its pin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """The annotation of one run.

    Attributes:
        name: name given later; None for the one in the manifest.
        tags: all tags of the run; None for those in the manifest.
    """

    name: str | None = None
    tags: Mapping[str, str] | None = None
    note: str = ""
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of an annotation; None leaves a field as it is, and tags stay that are neither added nor removed."""

    name: str | None = None
    add: Mapping[str, str] = field(default_factory=dict)
    remove: frozenset[str] = frozenset()
    note: str | None = None
    is_pinned: bool | None = None

    @property
    def is_empty(self) -> bool:
        """True if it changes nothing."""
        return self == Edit()

    def apply(self, annotation: Annotation, recorded_tags: Mapping[str, str]) -> Annotation:
        """Return the annotation after the change; `recorded_tags` are those of the manifest."""
        tags = annotation.tags
        if self.add or self.remove:
            before = recorded_tags if tags is None else tags
            tags = {**{key: value for key, value in before.items() if key not in self.remove}, **self.add}
        return replace(
            annotation,
            name=annotation.name if self.name is None else self.name,
            tags=tags,
            note=annotation.note if self.note is None else self.note,
            is_pinned=annotation.is_pinned if self.is_pinned is None else self.is_pinned,
        )


def annotation_of(body: Mapping[str, Any]) -> Annotation:
    """Return the annotation in a document; fields of another shape count as missing."""
    name, tags, note = body.get("name"), body.get("tags"), body.get("note")
    return Annotation(
        name=name if isinstance(name, str) and name else None,
        tags={str(key): str(value) for key, value in tags.items()} if isinstance(tags, dict) else None,
        note=note if isinstance(note, str) else "",
        is_pinned=body.get("is_pinned") is True,
    )
