"""Census of the live tensors: their number and bytes by shape, dtype and device.

Only tensors with a Python object are found; memory that autograd saved in C++ alone shows as the difference to the
allocator's own sum. The walk runs no code of the user's: it reads each object's real type, and the properties of
tensors of exactly torch's own types, with torch functions switched off. Subclasses are counted by their name (most
wrap plain tensors, which are found by themselves).
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

WALK_NS = 2_000_000_000
ROWS = 1000
_CLOCK_EVERY = 4096


class _Row(NamedTuple):
    type: str
    shape: tuple[int, ...]
    dtype: str
    device: str


def _row_of(kind: type, tensor: Any) -> _Row:
    return _Row(kind.__name__, tuple(tensor.shape), str(tensor.dtype), str(tensor.device))


def census(
    torch: Any,
    objects: Iterable[Any] | None = None,
    *,
    row_of: Callable[[type, Any], Any] = _row_of,
    rows_count: int | None = ROWS,
    limit_ns: int = WALK_NS,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> dict[str, Any]:
    """Count the live tensors of this process.

    Args:
        torch: the module.
        objects: objects to search; all that the garbage collector tracks by default.
        row_of: function of type and tensor that gives the key, a named tuple, by which tensors are counted.
        rows_count: number of rows in the result; all if None.
        limit_ns: longest walk, in ns; a walk that ends so is marked as not complete.
        clock_ns: clock for that.

    Returns:
        `rows`, the largest first: `type`, `shape`, `dtype`, `device` (or the fields of `row_of`), `tensors_count`,
        and `storage_bytes`, where a storage that several tensors share counts once, for the largest of them; and
        counts of the tensors and rows left out.
    """
    counts: Counter[Any] = Counter()
    owners: dict[int, tuple[int, Any, int]] = {}
    subclasses: Counter[str] = Counter()
    is_tensor_type: dict[int, bool] = {}
    opaque_count, complete, end_ns = 0, True, clock_ns() + limit_ns
    collecting = gc.isenabled()
    gc.disable()  # the walk's own containers must not set off a collection
    try:
        with torch._C.DisableTorchFunction():
            for number, item in enumerate(gc.get_objects() if objects is None else objects):
                if number % _CLOCK_EVERY == _CLOCK_EVERY - 1 and clock_ns() > end_ns:
                    complete = False
                    break
                kind = type(item)
                is_tensor = is_tensor_type.get(id(kind))
                if is_tensor is None:
                    is_tensor = is_tensor_type[id(kind)] = issubclass(kind, torch.Tensor)
                if not is_tensor:
                    continue
                if kind is not torch.Tensor and kind is not torch.nn.Parameter:
                    subclasses[type.__dict__["__qualname__"].__get__(kind)] += 1
                    continue
                try:
                    row = row_of(kind, item)
                    counts[row] += 1
                    storage = item.untyped_storage()
                    tensor_bytes = item.numel() * item.element_size()
                except (RuntimeError, NotImplementedError):  # sparse and other layouts; a nested one has no shape
                    opaque_count += 1
                    continue
                owner = owners.get(storage._cdata)
                if owner is None or owner[0] < tensor_bytes:
                    owners[storage._cdata] = (tensor_bytes, row, storage.nbytes())
        bytes_of: Counter[Any] = Counter()
        devices: Counter[str] = Counter()
        for _, row, storage_bytes in owners.values():
            bytes_of[row] += storage_bytes
            devices[row.device] += storage_bytes
    finally:
        if collecting:
            gc.enable()
    rows = sorted(counts, key=lambda row: (-bytes_of[row], row))
    return {
        "complete": complete,
        "tensors_count": counts.total(),
        "storage_bytes": dict(devices),
        "rows": [
            {**row._asdict(), "tensors_count": counts[row], "storage_bytes": bytes_of[row]}
            for row in rows[:rows_count]
        ],
        "rows_left_out_count": len(rows[rows_count:]) if rows_count else 0,
        "without_storage_count": opaque_count,
        "subclasses": dict(subclasses.most_common(ROWS)),
    }
