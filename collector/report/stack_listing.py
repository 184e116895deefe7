"""Stacks of a run's threads for the terminal: alike ones once, the user's own frames first."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from collector.report.wording import locus
from collector.stacks import Frame, Stack, StackGroup, folded
from collector.units import counted

#: Lines of source before and after the line that a thread executes.
_CONTEXT_LINES = 2
#: Longest name of a native function: those of C++ can fill a page.
_NAME_CHARACTERS = 80
#: Most threads of a group that are named.
_NAMES = 4


def stack_lines(groups: Sequence[StackGroup]) -> Iterator[Text]:
    """Yield the lines of the listing; threads without a frame of the user's own take one line each."""
    for alike in groups:
        yield Text(heading(alike), style="bold" if alike.has_own_frames else "")
        if alike.has_own_frames:
            yield from _frame_lines(alike.frames)
            yield Text()


def as_json(groups: Sequence[StackGroup]) -> list[dict[str, Any]]:
    """Return the groups as values for JSON; frames are innermost first."""
    return [
        {
            "threads": [
                {
                    "pid": stack.locus.pid,
                    "role": stack.locus.role,
                    "rank": stack.locus.rank,
                    "loader": stack.locus.loader,
                    "worker": stack.locus.worker,
                    "thread": stack.thread,
                }
                for stack in alike.stacks
            ],
            "waits": alike.stacks[0].waits,
            "activity": alike.stacks[0].activity,
            "frames": [{**frame._asdict(), "is_own": frame.is_own} for frame in alike.frames],
        }
        for alike in groups
    ]


def frame_text(alike: StackGroup) -> str:
    """Return the frames as lines of text, without the source, which may be another one by now."""
    return "\n".join(line.plain.strip() for line in _frame_lines(alike.frames, has_source=False))


def heading(alike: StackGroup) -> str:
    """Return a line with the threads, what they do and what they wait for."""
    first = alike.stacks[0]
    state = " · ".join(filter(None, (first.activity, first.waits)))
    innermost = "" if alike.has_own_frames or not first.frames else f" · {_place(first.frames[0])}"
    counts = Counter(map(_thread, alike.stacks))  # threads of one process may have one name
    names = [f"{count} × {name}" if count > 1 else name for name, count in [*counts.items()][:_NAMES]]
    names += [f"{more} more"] if (more := len(counts) - len(names)) else []
    return f"{'; '.join(names)}{f' · {state}' if state else ''}{innermost}"


def _thread(stack: Stack) -> str:
    name = "" if stack.thread == "MainThread" else f", thread {stack.thread}"
    return f"{locus(stack.locus)}{name}"


def _frame_lines(frames: Sequence[Frame], *, has_source: bool = True) -> Iterator[Text]:
    is_excerpted = False
    for entry in folded(frames):
        if isinstance(entry, int):
            yield Text(f"    … {counted(entry, 'library frame')}", style="dim")
            continue
        yield Text(f"    {_place(entry)}")
        if has_source and entry.is_own and not is_excerpted:
            is_excerpted = True
            yield from _excerpt(entry)


def _place(frame: Frame) -> str:
    if not frame.line:
        name = (
            frame.function if len(frame.function) <= _NAME_CHARACTERS else f"{frame.function[:_NAME_CHARACTERS]}…"
        )
        return f"{name}  {frame.path.rpartition('/')[2]}"
    path = frame.path if frame.is_own else "/".join(frame.path.rsplit("/", 2)[1:]) or frame.path
    return f"{frame.function}  {path}:{frame.line}"


def _excerpt(frame: Frame) -> Iterator[Text]:
    """Yield the lines around the one that is executed; none if the file cannot be read here."""
    for number in range(max(1, frame.line - _CONTEXT_LINES), frame.line + _CONTEXT_LINES + 1):
        if line := linecache.getline(frame.path, number).rstrip():
            is_executed = number == frame.line
            yield Text(
                f"      {'>' if is_executed else ' '} {number:>4}  {line}", style="bold" if is_executed else "dim"
            )
