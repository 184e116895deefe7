"""What is alive of what was allocated since `tracemalloc` began, by the stack that made it, and what grew of it.

The object that stands for a tensor in Python is traced like any other, so a tensor's line is known although its
bytes are not Python's. What autograd keeps in C++ alone has no such object: its bytes are the difference to what
the process grew by, and the tensors that hold it are those whose graphs have more nodes than before.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from training_harness.hooks.census import census
from training_harness.hooks.snapshots import stacked

#: Nodes of autograd's graphs that are looked at: of more, growth is not seen.
MAX_NODES = 50_000
_ROWS = 50
_WORDS_BEFORE_BYTES = 4 * ctypes.sizeof(ctypes.c_void_p)
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_JOBS = _OWN + "jobs" + os.sep
_DEFINITION = re.compile(r"(?:async\s+)?def\s+(\w+)")

_Stack = tuple[tuple[str, int], ...]


class _Row(NamedTuple):
    stack: _Stack
    device: str  # "" for what is no tensor
    made_by: str  # the name of a tensor's `grad_fn`; "" for one without a graph


class Mark(NamedTuple):
    """What was alive of what was allocated since the begin."""

    steps_count: int
    counts: Counter[_Row]
    bytes: Counter[_Row]
    nodes: Counter[_Row]
    held_bytes: dict[str, int]
    complete: bool


def look(torch: Any, steps_count: int, first_node: int) -> Mark:
    """What is alive now; only objects outside the garbage collector's permanent generation are looked at.

    Args:
        torch: the module.
        steps_count: since the begin.
        first_node: the sequence number of the first node of autograd's graphs since then.
    """
    python = tracemalloc.take_snapshot().statistics("traceback")  # first: what follows is traced too
    roots: list[tuple[_Row, Any]] = []
    plain, parameter, made_at = torch.Tensor, torch.nn.Parameter, _finder()

    def row_of(_kind: type, tensor: Any) -> _Row:
        graph = tensor.grad_fn
        row = _Row(made_at(tensor), str(tensor.device), "" if graph is None else graph.name())
        if graph is not None:
            roots.append((row, graph))
        return row

    # The census would allocate for each object that it looks at, and each allocation be traced.
    tensors = [item for item in gc.get_objects() if type(item) is plain or type(item) is parameter]
    found = census(torch, tensors, row_of=row_of, rows_count=None)
    del tensors
    mark = Mark(steps_count, Counter(), Counter(), Counter(), _held_bytes(torch), found["complete"])
    for row in found["rows"]:
        key = _Row(row["stack"], row["device"], row["made_by"])
        mark.counts[key], mark.bytes[key] = row["tensors_count"], row["storage_bytes"]
    seen: set[Any] = set()
    for row, root in roots:
        mark.nodes[row] += _new_nodes(root, first_node, seen)
    for group in python:
        key = _Row(_lines(group.traceback), "", "")
        mark.counts[key] += group.count
        mark.bytes[key] += group.size
    return mark


def _new_nodes(root: Any, first_node: int, seen: set[Any]) -> int:
    """How many nodes of a graph are new and were not seen before; they are then. An old one leads to older ones."""
    before, waiting = len(seen), [root]
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node is not None and node not in seen and node._sequence_nr() >= first_node:
            seen.add(node)
            waiting += [follower for follower, _ in node.next_functions]
    return len(seen) - before


class _Probe:
    """An object like a tensor: it has a dictionary of its own."""


def _finder() -> Callable[[Any], _Stack]:
    """What tells the stack in which an object of a class was made, () if it was not traced.

    Python 3.11 looks for its trace at another address than the one that was traced (the words before an object
    that has a dictionary are forgotten in Modules/_tracemalloc.c); there it is asked with the right one.
    """
    if tracemalloc.get_object_traceback(_Probe()) is not None:
        return lambda item: _lines(tracemalloc.get_object_traceback(item) or ())
    find = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_uint, ctypes.c_size_t)(
        ("_PyTraceMalloc_GetTraceback", ctypes.pythonapi)
    )
    return lambda item: find(0, id(item) - _WORDS_BEFORE_BYTES) or ()


def _lines(trace: Sequence[tracemalloc.Frame]) -> _Stack:
    """File and line of each frame, the innermost first."""
    return tuple((frame.filename, frame.lineno) for frame in reversed(trace))


def _held_bytes(torch: Any) -> dict[str, int]:
    """What the process has resident, and what the allocator of each device in use holds."""
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


def grown(first: Mark, last: Mark, unit: str) -> dict[str, Any]:
    """The rows that grew: those whose graphs did, then those in bytes, the largest first."""
    graphs = [row for row in last.nodes if last.nodes[row] > first.nodes[row]]
    graphs.sort(key=lambda row: (first.nodes[row] - last.nodes[row], row))
    others = [row for row in last.counts if last.counts[row] > first.counts[row] and not _is_ours(row.stack)]
    others.sort(key=lambda row: (first.bytes[row] - last.bytes[row], row))
    kept = list(dict.fromkeys([*graphs[:_ROWS], *others[:_ROWS]]))
    source = _Source()
    rows = [
        {
            "device": row.device,
            "made_by": row.made_by,
            "grown_count": last.counts[row] - first.counts[row],
            "grown_bytes": last.bytes[row] - first.bytes[row],
            "grown_nodes_count": last.nodes[row] - first.nodes[row],
            "frames": [
                {"filename": file, "line": line, "name": source.function(file, line)} for file, line in row.stack
            ],
        }
        for row in kept
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
        "rows_left_out_count": len({*graphs, *others}) - len(kept),
        **stacked(rows),
    }


def _is_ours(stack: _Stack) -> bool:
    """Whether this harness made it, with functions of the standard library at most; or nobody knows who."""
    for file, _ in stack:
        in_library = file.startswith("<frozen") or (
            file.startswith(_LIBRARY) and not file.startswith(_PACKAGES, len(_LIBRARY))
        )
        if not in_library:
            return file.startswith(_OWN) and not file.startswith(_JOBS)
    return not stack


class _Source:
    """The functions of source files, each of which is read once."""

    def __init__(self) -> None:
        self._files: dict[str, list[str]] = {}

    def function(self, file: str, line: int) -> str:
        """The function around a line, by its indentation; empty if there is none or the file cannot be read."""
        if file not in self._files:
            try:
                with open(file, encoding="utf-8", errors="replace") as stream:
                    self._files[file] = stream.read().splitlines()
            except OSError:
                self._files[file] = []
        indent = None
        for text in reversed(self._files[file][:line]):
            bare = text.lstrip()
            if not bare or bare[0] in "#)]}":
                continue
            outer = len(text) - len(bare)
            if indent is None or outer < indent:
                indent = outer
                if found := _DEFINITION.match(bare):
                    return found[1]
            if indent == 0:
                break
        return ""
