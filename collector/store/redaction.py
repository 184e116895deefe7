"""Pseudonyms for the texts of a run, so that its records can be published.

Numbers, truth values and moments stay, and so do texts of a closed vocabulary: versions, settings, names of streams
and hooks. Every other text (command lines, paths, host names, messages, names of classes, lines of code) becomes a
pseudonym. The same text has the same pseudonym throughout one `Redactor`, so records can still be joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

#: Fields of events and of the manifest whose texts stay: Tidegauge or torch chose them, not the user.
VOCABULARY = frozenset(
    {
        "action",
        "container",
        "environment",
        "framework",
        "hook",
        "kind",
        "operation",
        "part",
        "phase",
        "python",
        "risk",
        "role",
        "start_method",
        "store",
        "stream",
        "torch",
        "what",
    }
)
#: Objects whose keys are the user's.
_OPEN_OBJECTS = frozenset({"values", "tags"})
#: Name and id of every redacted run: its own are made from its command.
_RUN = "redacted"


class Redactor:
    """Replaces texts by pseudonyms. Safe to call from several threads.

    Args:
        hosts: host names of the run; each becomes `host-1`, `host-2`, …
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self._lock = Lock()
        self._pseudonyms: dict[str, dict[str, str]] = {"host": {}, "stage": {}, "text": {}}
        for host in sorted(set(hosts)):
            self.host(host)

    def text(self, text: str) -> str:
        """Return the pseudonym of a text; a host's own for a host, and digits alone stay."""
        if text.isdecimal() or not text:
            return text
        return self.host(text) if text in self._pseudonyms["host"] else self._pseudonym(text, "text")

    def host(self, name: str) -> str:
        """Return the pseudonym of a host."""
        return self._pseudonym(name, "host")

    def stage(self, name: str) -> str:
        """Return the pseudonym of a stage."""
        return self._pseudonym(name, "stage")

    def event(self, body: str) -> str:
        """Return the JSON of an event without the user's texts."""
        try:
            fields = json.loads(body)
        except ValueError:
            return self.text(body)
        return json.dumps(self._value(fields, "event"))

    def manifest(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return a manifest without the user's texts."""
        redacted = {key: self._value(value, key) for key, value in manifest.items()}
        return redacted | {"run_id": _RUN, "name": _RUN}

    def _value(self, value: Any, field: str) -> Any:
        if isinstance(value, str):
            return value if field in VOCABULARY else self.text(value)
        if isinstance(value, list):
            return [self._value(item, field) for item in value]
        if isinstance(value, dict):
            keeps = field in VOCABULARY
            return {
                self._key(key, field): self._value(item, field if keeps else key) for key, item in value.items()
            }
        return value

    def _key(self, key: str, field: str) -> str:
        return self.text(key) if field in _OPEN_OBJECTS or key in self._pseudonyms["host"] else key

    def _pseudonym(self, text: str, what: str) -> str:
        with self._lock:
            known = self._pseudonyms[what]
            return known.setdefault(text, f"{what}-{len(known) + 1}")
