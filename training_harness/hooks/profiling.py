"""`torch.profiler` with memory over a few steps, because somebody asked for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from training_harness.hooks.snapshots import save, write
from training_harness.session import Session

#: A trace beyond this is thrown away; the summary stays.
MAX_TRACE_BYTES = 256 * 2**20
#: The profiler keeps every operator in memory: it ends after so long even if the steps asked for have not.
LIMIT_NS = 60_000_000_000
_OPERATORS = 50


class Profile:
    """A profile of the next steps of this process, for a minute at most; it begins at once.

    Raises:
        RuntimeError: the training profiles itself, and there can be one profiler only.
    """

    def __init__(self, torch: Any, steps: int) -> None:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("the training runs a profiler of its own; ask again when that has ended")
        profiler = torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # else the profiler would initialise it
            activities.append(profiler.ProfilerActivity.CUDA)
        self._steps = self._left = steps
        self._thread = threading.get_ident()
        self._end_ns = time.monotonic_ns() + LIMIT_NS
        self._profile = profiler.profile(activities=activities, profile_memory=True)
        self._profile.start()

    def step_ended(self) -> bool:
        """Count a step; True when it was the last one: `save` comes next."""
        self._left -= 1
        return self._left == 0 or self.expired()

    def expired(self) -> bool:
        """Whether the time is up, in the thread that began it: no other can end it."""
        return time.monotonic_ns() >= self._end_ns and threading.get_ident() == self._thread

    def stop(self) -> None:
        """End the profile; nothing is kept."""
        self._profile.stop()

    def save(self, current: Session) -> dict[str, Any]:
        """End the profile; write the trace and the operators that allocated most.

        Raises:
            OSError: they cannot be written.
        """
        self._profile.stop()
        operators = top_operators(self._profile.key_averages())
        said = save(current, "profile", {"steps_count": self._steps - self._left, "operators": operators})
        try:
            return {**said, "trace": write(current, "trace.json.gz", self._export)["path"]}
        except ValueError as error:
            return {**said, "trace_error": str(error)}

    def _export(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))
        size = path.stat().st_size
        if size > MAX_TRACE_BYTES:
            raise ValueError(f"a trace of {size} bytes is over the bound of {MAX_TRACE_BYTES}: ask for fewer steps")


def top_operators(averages: Any) -> list[dict[str, Any]]:
    """What each operator itself allocated less what it freed, the largest first.

    Args:
        averages: of `torch.profiler`, one entry per operator.
    """
    first = next(iter(averages), None)
    name = "self_device_memory_usage" if hasattr(first, "self_device_memory_usage") else "self_cuda_memory_usage"
    rows = [
        {
            "operator": entry.key,
            "calls_count": entry.count,
            "cpu_bytes": entry.self_cpu_memory_usage,
            "device_bytes": getattr(entry, name),
        }
        for entry in averages
    ]
    rows = [row for row in rows if max(row["cpu_bytes"], row["device_bytes"]) > 0]
    rows.sort(key=lambda row: -max(row["cpu_bytes"], row["device_bytes"]))
    return rows[:_OPERATORS]
