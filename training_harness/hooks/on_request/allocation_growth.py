"""Lines whose allocations stay alive: `tracemalloc` over a few steps, on request.

The Python object of a tensor is traced like any other, so a tensor's line is known although its bytes are not
Python's. Memory that autograd saves in C++ alone has no such object: its size is the difference to the growth of
the process, and the tensors that hold it are those whose graphs have more nodes than before.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from training_harness import session
from training_harness.hooks.on_request.snapshots import RefusedError, save, with_shared_stacks
from training_harness.hooks.on_request.tensor_census import census
from training_harness.session import Session

#: Number of stack frames that are traced: a model of some nested modules has about three frames for each of them.
FRAMES = 25
#: Time in ns and memory of the traces in bytes after which tracing ends, even before the requested steps do.
LIMIT_NS = 20_000_000_000
LIMIT_BYTES = 64 * 2**20

_tracing = _frozen = False
#: Number of nodes of autograd's graphs that are visited; growth beyond them is not seen.
MAX_NODES = 50_000
_ROWS = 50
_WORDS_BEFORE_BYTES = 4 * ctypes.sizeof(ctypes.c_void_p)
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_HARNESS = os.path.dirname(session.__file__) + os.sep
_JOBS = _HARNESS + "jobs" + os.sep
_DEFINITION = re.compile(r"(?:async\s+)?def\s+(\w+)")
_Stack = tuple[tuple[str, int], ...]


class Growth:
    """Trace of the allocations in the next steps of this process, two at least; it begins at once.

    Raises:
        RefusedError: the training uses `tracemalloc` itself.
    """

    def __init__(self, torch: Any, steps: int, unit: str = "steps") -> None:
        if tracemalloc.is_tracing():
            raise RefusedError("the training uses tracemalloc itself; try again when it has stopped")
        self._torch = torch
        self._steps = steps
        self._unit = unit
        self._steps_done = 0
        self._first: Mark | None = None
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._begun_ns = time.monotonic_ns()
        _trace(on=True)

    def end_step(self) -> bool:
        """Count a step; return True when it was the last one and `save` comes next."""
        self._steps_done += 1
        if self._first is not None:
            return self._used_ratio() >= 1
        if self._used_ratio() >= 0.5:
            self._first = self._take_mark()
        return False

    def is_expired(self) -> bool:
        """Return whether the allowed steps, time or memory are used up, after the first mark."""
        return self._first is not None and self._used_ratio() >= 1

    def stop(self) -> None:
        """End the trace and drop it."""
        _trace(on=False)

    def save(self, current: Session) -> dict[str, Any]:
        """End the trace; write the lines whose live memory grew between the marks."""
        assert self._first is not None
        try:
            first, last = self._first, self._take_mark()
        finally:
            self.stop()
        return save(current, "growth", growth_between(first, last, self._unit))

    def _used_ratio(self) -> float:
        """Return the used share of the steps, of the time or of the memory, the largest of the three."""
        return max(
            self._steps_done / self._steps,
            (time.monotonic_ns() - self._begun_ns) / LIMIT_NS,
            tracemalloc.get_tracemalloc_memory() / LIMIT_BYTES,
        )

    def _take_mark(self) -> Mark:
        collecting = gc.isenabled()
        gc.disable()  # the objects made here must not set off a collection
        try:
            return live_allocations(self._torch, self._steps_done, self._first_node)
        finally:
            if collecting:
                gc.enable()


def _trace(*, on: bool) -> None:
    """Start or stop tracing.

    Older objects are out of the garbage collector's lists meanwhile: visiting them would write to all of them, and
    so copy the memory that is shared with workers.
    """
    global _tracing, _frozen
    _tracing = on
    if on:
        _frozen = gc.get_freeze_count() == 0  # else the training itself has frozen them
        if _frozen:
            gc.freeze()
        tracemalloc.start(FRAMES)
    else:
        tracemalloc.stop()
        if _frozen:
            gc.unfreeze()


def _stop_in_child() -> None:
    """Stop tracing in a forked worker, where nothing else would end it."""
    if _tracing:
        _trace(on=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)


class _Row(NamedTuple):
    stack: _Stack
    device: str  # "" for an object that is no tensor
    made_by: str  # name of a tensor's `grad_fn`; "" for one without a graph
    in_traceback: bool = False  # a variable of a frame that ended with an exception, which is kept


class Mark(NamedTuple):
    """Live allocations, of those since the beginning of the trace."""

    steps_count: int
    counts: Counter[_Row]
    bytes: Counter[_Row]
    nodes: Counter[_Row]
    held_bytes: dict[str, int]
    complete: bool


def live_allocations(torch: Any, steps_count: int, first_node: int) -> Mark:
    """Return the traced allocations that are alive now, without the garbage collector's permanent generation.

    Nodes of autograd's graphs count from `first_node` on, their sequence number at the beginning of the trace.
    """
    python = tracemalloc.take_snapshot().statistics("traceback")  # first: the code below is traced too
    roots: list[tuple[_Row, Any]] = []
    plain, parameter, stack_of = torch.Tensor, torch.nn.Parameter, _stack_finder()

    def row_of(_kind: type, tensor: Any) -> _Row:
        graph = tensor.grad_fn
        made_by = "" if graph is None else graph.name()
        row = _Row(stack_of(tensor), str(tensor.device), made_by, id(tensor) in in_tracebacks)
        if graph is not None:
            roots.append((row, graph))
        return row

    # On all objects the census would allocate memory for each, and each of these allocations would be traced.
    objects = gc.get_objects()
    tensors = [item for item in objects if type(item) is plain or type(item) is parameter]
    frames = [item.tb_frame for item in objects if type(item) is TracebackType]
    # Those of running frames are not among the referents (CPython: Objects/frameobject.c, `frame_traverse`).
    in_tracebacks = {id(value) for value in gc.get_referents(*frames)}
    counted = census(torch, tensors, row_of=row_of, rows_count=None)
    del objects, tensors, frames
    mark = Mark(steps_count, Counter(), Counter(), Counter(), _held_bytes(torch), counted["complete"])
    for row in counted["rows"]:
        key = _Row(row["stack"], row["device"], row["made_by"], row["in_traceback"])
        mark.counts[key], mark.bytes[key] = row["tensors_count"], row["storage_bytes"]
    visited: set[Any] = set()
    for row, root in roots:
        mark.nodes[row] += _new_nodes(root, first_node, visited)
    for group in python:
        key = _Row(_lines(group.traceback), "", "")
        mark.counts[key] += group.count
        mark.bytes[key] += group.size
    return mark


def _new_nodes(root: Any, first_node: int, visited: set[Any]) -> int:
    """Visit the new nodes of a graph and count those not visited before. An old node leads only to older ones."""
    before, stack = len(visited), [root]
    while stack and len(visited) < MAX_NODES:
        node = stack.pop()
        if node is not None and node not in visited and node._sequence_nr() >= first_node:
            visited.add(node)
            stack += [follower for follower, _ in node.next_functions]
    return len(visited) - before


class _Probe:
    """Object with a dictionary of its own, like a tensor."""


def _stack_finder() -> Callable[[Any], _Stack]:
    """Return a function that gives the stack in which an object of a class was made, () if it was not traced.

    Python 3.11 looks for the trace at another address than the traced one: Modules/_tracemalloc.c forgets the words
    before an object that has a dictionary. There the function asks with the right address.
    """
    if tracemalloc.get_object_traceback(_Probe()) is not None:
        return lambda item: _lines(tracemalloc.get_object_traceback(item) or ())
    find = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_uint, ctypes.c_size_t)(
        ("_PyTraceMalloc_GetTraceback", ctypes.pythonapi)
    )
    return lambda item: find(0, id(item) - _WORDS_BEFORE_BYTES) or ()


def _lines(trace: Sequence[tracemalloc.Frame]) -> _Stack:
    """Return file and line of each frame, the innermost first."""
    return tuple((frame.filename, frame.lineno) for frame in reversed(trace))


def _held_bytes(torch: Any) -> dict[str, int]:
    """Return the resident bytes of the process, and the allocated bytes of each device in use."""
    held = {}
    try:
        with open("/proc/self/statm", "rb") as stream:
            held["cpu"] = int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        pass
    cuda = torch.cuda
    if cuda.is_initialized():
        for device in range(cuda.device_count()):
            stats = cuda.memory_stats_as_nested_dict(device)
            held[f"cuda:{device}"] = stats["allocated_bytes"]["all"]["current"]
    return held


def growth_between(first: Mark, last: Mark, unit: str) -> dict[str, Any]:
    """Return the rows that grew: first those with growing graphs, then the others by bytes, the largest first."""
    graphs = [row for row in last.nodes if last.nodes[row] > first.nodes[row]]
    graphs.sort(key=lambda row: (first.nodes[row] - last.nodes[row], row))
    others = [
        row for row in last.counts if last.counts[row] > first.counts[row] and not _is_harness_code(row.stack)
    ]
    others.sort(key=lambda row: (first.bytes[row] - last.bytes[row], row))
    selection = list(dict.fromkeys([*graphs[:_ROWS], *others[:_ROWS]]))
    function_at = _function_finder()
    rows = [
        {
            "device": row.device,
            "made_by": row.made_by,
            "in_traceback": row.in_traceback,
            "grown_count": last.counts[row] - first.counts[row],
            "grown_bytes": last.bytes[row] - first.bytes[row],
            "grown_nodes_count": last.nodes[row] - first.nodes[row],
            "frames": [
                {"filename": file, "line": line, "name": function_at(file, line)} for file, line in row.stack
            ],
        }
        for row in selection
    ]
    return {
        "unit": unit,
        "steps_count": last.steps_count - first.steps_count,
        "complete": first.complete and last.complete,
        "held_grown_bytes": {
            device: size - first.held_bytes[device]
            for device, size in last.held_bytes.items()
            if device in first.held_bytes
        },
        "rows_left_out_count": len({*graphs, *others}) - len(selection),
        **with_shared_stacks(rows),
    }


def _is_harness_code(stack: _Stack) -> bool:
    """Return whether this harness allocated it, perhaps through the standard library; True for an unknown stack."""
    for file, _ in stack:
        in_library = file.startswith("<frozen") or (
            file.startswith(_LIBRARY) and not file.startswith(_PACKAGES, len(_LIBRARY))
        )
        if not in_library:
            return file.startswith(_HARNESS) and not file.startswith(_JOBS)
    return not stack


def _function_finder() -> Callable[[str, int], str]:
    """Return a function that names the function around a line; it reads each file and looks up each line once.

    Readers of the snapshot cannot do this: the sources may have changed by then, or be on another machine.
    """
    read = functools.cache(_read_lines)
    return functools.cache(lambda file, line: _function_around(read(file)[:line]))


def _read_lines(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            return stream.read().splitlines()
    except OSError:
        return []


def _function_around(lines: Sequence[str]) -> str:
    """Return the function that the last of these lines is in, by its indentation; empty without one."""
    indent = None
    for text in reversed(lines):
        bare = text.lstrip()
        if not bare or bare[0] in "#)]}":
            continue
        outer = len(text) - len(bare)
        if indent is None or outer < indent:
            indent = outer
            if definition := _DEFINITION.match(bare):
                return definition[1]
        if indent == 0:
            break
    return ""
