"""`--investigate`: when a leak is found, the process that leaks is asked once which lines make what stays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from collector.diagnosis.findings import ASKED_FOR_LINES, Finding, Locus
from collector.snapshot import put_request, request_path
from collector.store.runs import Run
from training_harness.layout import SNAPSHOT_STEPS

#: A process that comes to no step's end for so long is not asked any more.
LASTS_SECONDS = 600.0


class Investigator:
    """Asks, in one run, each process or worker that leaks once.

    Args:
        run: which run.

    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked: dict[str, Path] = {}
        self._closed = False

    def look_into(self, findings: Iterable[Finding]) -> None:
        """Ask for what these verdicts leave open.

        Raises:
            OSError: the request cannot be written.
        """
        for finding in findings:
            if (
                finding.kind not in ASKED_FOR_LINES
                or finding.locus.role == "other"
                or finding.held_by
                or self._closed
            ):
                continue
            to = _address(finding.locus)
            name = "growth-of-" + "-".join(str(part) for part in to.values())
            if name not in self._asked:
                self._asked[name] = path = request_path(self._run, name)
                put_request(path, "growth", steps=SNAPSHOT_STEPS["growth"], lasts_seconds=LASTS_SECONDS, to=to)

    def heard(self, event: Mapping[str, Any]) -> None:
        """What was answered, now or to a collector before this one, is not asked again."""
        name = event.get("request", "")
        if event["kind"] == "snapshot" and name.startswith("growth-of-"):
            self._asked.setdefault(name, request_path(self._run, name)).unlink(missing_ok=True)

    def close(self) -> None:
        """Take back what was not answered; nothing is asked any more."""
        self._closed = True
        for path in self._asked.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _address(locus: Locus) -> dict[str, Any]:
    """What the process that is asked must be: a training process by its pid, a worker by its number."""
    if locus.role == "worker":  # where several grow, one tells for all
        rank = {} if locus.rank is None else {"rank": locus.rank}
        return {"role": "worker", "host": locus.host, **rank, "loader": locus.loader, "worker": locus.worker or 0}
    return {"role": "main", "host": locus.host, "pid": locus.pid}
