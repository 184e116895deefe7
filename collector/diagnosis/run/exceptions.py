"""The uncaught exceptions of a run: what was raised, in which process and at which line.

DataLoader and torch.multiprocessing.spawn pass on the exception of a child, with its traceback in the message
(torch/_utils.py, torch/multiprocessing/spawn.py). Such an exception counts as that of the child.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from collector.diagnosis.run.lifecycle import SPAWN_ERROR, Lifecycle
from collector.diagnosis.run.processes import message_lines
from collector.stacks import Frame
from collector.store import ProcessKey

_FROM_WORKER = "in DataLoader worker process"
#: Begin of the error of a DataLoader that has waited for a batch as long as its `timeout` allows.
LOADER_TIMEOUT = "DataLoader timed out"
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An uncaught exception.

    Attributes:
        process: the process that raised it; for a DataLoader worker, its training process.
        lines: lines of its message, at least one.
        site: ` at train.py:37, in main`; empty if it is not known.
        origin: how it came from a child, in words; empty if the process raised it itself.
    """

    process: ProcessKey
    kind: str
    lines: Sequence[str]
    site: str
    origin: str = ""

    @property
    def headline(self) -> str:
        """Its class, and the first line of its message."""
        return f"{self.kind}: {self.lines[0]}".rstrip(": ")

    @property
    def text(self) -> str:
        """Its class, its message, and how it came from a child."""
        text = f"{self.kind}: {' '.join(self.lines)}".rstrip(": ")
        return f"{text} ({self.origin})" if self.origin else text


def exception_of(life: Lifecycle, key: ProcessKey) -> Raised:
    """Return the uncaught exception of a process that has one."""
    event = life.exceptions[key]
    lines, raiser = message_lines(event), life.raiser(key)
    if _FROM_WORKER not in lines[0] and not SPAWN_ERROR.search(lines[0]):
        return raised_in(event, key)
    kind, message = _quoted(lines)
    site = _own_frame(str(event["message"])) or event.get("site")
    return Raised(process=raiser, kind=kind, lines=message, site=at_line(site), origin=lines[0].strip("-:. "))


def raised_in(event: Mapping[str, Any], key: ProcessKey) -> Raised:
    """Return the exception that an event of a process recorded: one of its own, or of one of its threads."""
    kind, lines = str(event.get("type")), message_lines(event)
    return Raised(process=key, kind=kind, lines=lines, site=at_line(event.get("site")))


def at_line(site: Any) -> str:
    """Return ` at train.py:37, in main` for the path and line of a call; empty if it is not known."""
    return f" at {os.path.basename(str(site))}" if site else ""


def _quoted(lines: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the exception at the end of a quoted traceback: its class, and the lines of its message."""
    frames = [number for number, line in enumerate(lines) if _FRAME.search(line)]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    first, *rest = list(dropwhile(lambda line: line.startswith(" "), after)) or lines[-1:]
    kind, _, message = first.partition(": ")
    return kind.rpartition(".")[2], [line for line in (message, *rest) if line] or [""]


def _own_frame(text: str) -> str | None:
    """Return the innermost frame of the user's own code in a quoted traceback."""
    quoted = (Frame(call, path, int(line)) for path, line, call in _FRAME.findall(text))
    own = [frame for frame in quoted if frame.is_own]
    return f"{own[-1].path}:{own[-1].line}, in {own[-1].function}" if own else None


def has_loader_timed_out(life: Lifecycle, key: ProcessKey) -> bool:
    """Return whether a process ended since it waited for a batch longer than its DataLoader's timeout."""
    return key in life.exceptions and message_lines(life.exceptions[key])[0].startswith(LOADER_TIMEOUT)
