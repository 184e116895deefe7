"""Series of stacks of a training process and its workers at the same moments, read from outside by py-spy.

One `py-spy record` reads all processes within a millisecond at each moment and pauses none. Its trace says what
each thread does over time. Here it becomes one `stack-series` event: the stacks, each once, and the stack that the
main thread of each process had at each moment.
"""

from __future__ import annotations

import ast
import itertools
import json
import linecache
import os
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.stack_dumps import StackError, py_spy
from collector.errors import last_line, one_line
from collector.stacks import Frame, fetch_part, own_work, without_waiting

RATE_HZ = 20
_GRACE_SECONDS = 10
#: Stacks of a series that are recorded, the heaviest first.
_MOST_STACKS = 200
#: Frames of a stack that are recorded, half of them innermost.
_MOST_FRAMES = 100
_MOST_SOURCE = 120
_MOST_SOURCE_BYTES = 2**20
#: A longer pause within the trace begins a new moment; py-spy reads all threads faster than that.
_PAUSE_MICROSECONDS = 4_000
#: Share of the moments that the trace must show to count as complete.
_COMPLETE_RATIO = 0.9
_PROCESS = re.compile(r"process (\d+):")
_THREAD = re.compile(r"thread \((\d+)\)")

#: Frames of a main thread, innermost first; empty if it has none.
Frames = tuple[Frame, ...]


class Series(NamedTuple):
    """Stacks of the main threads at some moments.

    Attributes:
        times: the moments, in seconds since py-spy began.
        stacks: pid -> its stack at each moment, None where it has none.
    """

    times: list[float]
    stacks: dict[int, list[Frames | None]]


def record_series(
    main: LocalProcess,
    seconds: int,
    *,
    with_children: bool,
    on_begin: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
) -> dict[str, Any]:
    """Sample for some seconds; return the fields of a `stack-series` event. `on_begin` gets the process of py-spy.

    Raises:
        StackError: the stacks cannot be read.
    """
    program = py_spy()
    if program is None:
        raise StackError("py-spy is not installed, so no lines are named")
    with tempfile.TemporaryDirectory(prefix="tidegauge-") as folder:
        output = Path(folder) / "trace.json"
        options = ["--format", "chrometrace", "--idle", "--nonblocking", "--threads", "--full-filenames"]
        options += ["--subprocesses"] if with_children else []
        timing = ["--rate", str(RATE_HZ), "--duration", str(seconds), "--output", str(output)]
        begin_ns = time.monotonic_ns()
        cpu_seconds, failure = _run(
            [program, "record", *options, *timing, "--pid", str(main.pid)], seconds + _GRACE_SECONDS, on_begin
        )
        begin_cpu_ns = time.thread_time_ns()
        try:
            trace = json.loads(output.read_bytes())
        except (OSError, ValueError):
            raise StackError(failure or "py-spy wrote no trace") from None
    fields = series_fields(read_trace(trace, RATE_HZ * seconds), begin_ns)
    cpu_seconds += (time.thread_time_ns() - begin_cpu_ns) / 1e9
    return {"of_pid": main.pid, "of_start_ticks": main.start_ticks, **fields, "cpu_seconds": round(cpu_seconds, 4)}


def _run(
    command: Sequence[str], patience_seconds: float, on_begin: Callable[[subprocess.Popen[bytes]], None]
) -> tuple[float, str]:
    """Run py-spy; return its CPU time in seconds, and the last line of its messages."""
    with tempfile.TemporaryFile() as messages:
        # Its own session, since Ctrl-C is for the command alone.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, start_new_session=True
        )
        on_begin(child)
        timer = threading.Timer(patience_seconds, child.kill)
        timer.daemon = True
        timer.start()
        _, status, usage = os.wait4(child.pid, 0)
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        messages.seek(0)
        failure = one_line(last_line(messages.read().decode(errors="replace")))
    return usage.ru_utime + usage.ru_stime, failure


def read_trace(trace: Iterable[Mapping[str, Any]], moments_count: int) -> Series:
    """Return the stacks of the main threads at each moment of py-spy's trace.

    A thread is in the trace where its stack has changed. Forked processes share the ids of their threads, so each
    moment shows all of them. Other moments at which nothing changed do not show; if these are more than a few, the
    stacks are taken at regular times instead.
    """
    moments: list[tuple[float, dict[int, Frames]]] = []
    last, seen = -float("inf"), set[tuple[int, int]]()
    for microseconds, thread, pid, is_main, frames in _changes(trace):
        if microseconds - last > _PAUSE_MICROSECONDS or (pid, thread) in seen:
            moments.append((microseconds / 1e6, {}))
            seen.clear()
        last = microseconds
        seen.add((pid, thread))
        if is_main:
            moments[-1][1][pid] = frames
    times = [at for at, _ in moments]
    if len(moments) < _COMPLETE_RATIO * moments_count and moments:
        span = max(times[-1] - times[0], (moments_count - 1) / RATE_HZ)
        times = [times[0] + step / RATE_HZ for step in range(int(span * RATE_HZ) + 1)]
    stacks: dict[int, list[Frames | None]] = {pid: [] for _, changed in moments for pid in changed}
    now: dict[int, Frames] = {}
    coming = iter(moments)
    upcoming = next(coming, None)
    for at in times:
        while upcoming is not None and upcoming[0] <= at:
            now.update(upcoming[1])
            upcoming = next(coming, None)
        for pid, samples in stacks.items():
            samples.append(now.get(pid) or None)
    return Series(times, stacks)


def _changes(trace: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int, int, bool, Frames]]:
    """Yield each change of a thread's stack: microseconds, thread, pid, "is the main thread", frames."""
    open_frames: dict[int, list[Frame]] = {}
    for (microseconds, thread), events in itertools.groupby(trace, key=itemgetter("ts", "tid")):
        frames = open_frames.setdefault(thread, [])
        for event in events:
            if event["ph"] == "B":
                frames.append(Frame(event["name"], event["args"]["filename"], event["args"]["line"]))
            elif frames:
                frames.pop()
        if change := _change(frames):
            yield microseconds, thread, *change


def _change(frames: Sequence[Frame]) -> tuple[int, bool, Frames] | None:
    """Return pid, "is the main thread" and frames, innermost first, of what py-spy says of a thread.

    Outermost, py-spy names the process with its parents before it, and the thread.
    """
    pid, depth = None, 0
    while depth < len(frames) and (named := _PROCESS.match(frames[depth].function)):
        pid, depth = int(named[1]), depth + 1
    thread = _THREAD.match(frames[depth].function) if depth < len(frames) else None
    if pid is None or thread is None:
        return None
    return pid, int(thread[1]) == pid, own_work(reversed(frames[depth + 1 :]))


def series_fields(series: Series, begin_ns: int) -> dict[str, Any]:
    """Return the fields of an event: frames and stacks by number, with the source of the user's own frames."""
    short = {
        pid: [None if frames is None else _bounded(without_waiting(frames)) for frames in samples]
        for pid, samples in series.stacks.items()
    }
    counts = Counter(frames for samples in short.values() for frames in samples if frames)
    stacks = {frames: number for number, (frames, _) in enumerate(counts.most_common(_MOST_STACKS))}
    numbers: dict[Frame, int] = {}
    numbered = [[numbers.setdefault(frame, len(numbers)) for frame in frames] for frames in stacks]
    sources = Sources()
    return {
        "times_ns": [begin_ns + round(at * 1e9) for at in series.times],
        "frames": [[*frame, *sources.describe(frame)] for frame in numbers],
        "stacks": numbered,
        "processes": [
            {"pid": pid, "samples": [stacks.get(frames) if frames else None for frames in samples]}
            for pid, samples in short.items()
        ],
    }


def _bounded(frames: Frames) -> Frames:
    half = _MOST_FRAMES // 2
    return frames if len(frames) <= _MOST_FRAMES else frames[:half] + frames[-half:]


class Sources:
    """Source lines of frames, and the stages that they belong to, as far as the files can be read here."""

    def __init__(self) -> None:
        linecache.checkcache()
        self._stages: dict[str, list[tuple[int, int, str]]] = {}

    def describe(self, frame: Frame) -> tuple[str | None, str | None]:
        """Return (source line, stage) of a frame, None where not known; a library's frames have neither."""
        if not frame.is_own:
            part = fetch_part(frame, linecache.getline(frame.path, frame.line))
            return None, part
        source = linecache.getline(frame.path, frame.line).strip()[:_MOST_SOURCE]
        if frame.path not in self._stages:
            self._stages[frame.path] = named_stages(linecache.getlines(frame.path))
        around = [named for named in self._stages[frame.path] if named[0] <= frame.line <= named[1]]
        return source or None, max(around)[2] if around else None


def named_stages(lines: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return (first line, last line, name) of each `with stage("name"):` and `@stage("name")` in a source."""
    source = "".join(lines)
    if "stage(" not in source or len(source) > _MOST_SOURCE_BYTES:
        return []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in ast.walk(tree):
        calls: list[ast.expr] = []
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef):
            calls = node.decorator_list
        for name in filter(None, map(_stage_name, calls)):
            assert isinstance(node, ast.With | ast.FunctionDef)
            found.append((node.lineno, node.end_lineno or node.lineno, name))
    return found


def _stage_name(call: ast.expr) -> str | None:
    if not isinstance(call, ast.Call) or not call.args:
        return None
    function, name = call.func, call.args[0]
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    is_named = called == "stage" and isinstance(name, ast.Constant) and isinstance(name.value, str)
    return str(name.value) if is_named and isinstance(name, ast.Constant) else None
