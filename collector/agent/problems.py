"""Problems of the collector: recorded as events, never raised into the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from training_harness.journal import EventLog

#: Problems recorded for one part: a new one at every tick must not flood the events.
_MOST_PER_PART = 20


def say(text: str) -> None:
    """Write one line to stderr, if it still takes one."""
    with suppress(OSError):
        sys.stderr.write(f"tidegauge: {text}\n")
        sys.stderr.flush()


class Problems:
    """Fail-open guard: a part that raises stops neither the others nor the loop; its problem is recorded once."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._keys: dict[str, set[str]] = {}

    @contextmanager
    def guard(self, part: str) -> Iterator[None]:
        """Run a block; an exception becomes an event, the first of its kind in this part."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the parts that still work must go on
            kind = type(error).__name__
            self.record(part, f"{kind}: {error}", key=kind)

    def record(self, part: str, text: str, *, key: str | None = None) -> None:
        """Write `collector-problem`, once per part and key; the key is the text itself by default."""
        keys = self._keys.setdefault(part, set())
        if (key or text) not in keys and len(keys) < _MOST_PER_PART:
            keys.add(key or text)
            self._events.append("collector-problem", part=part, error=text)
