"""The card of a run in a notebook: a file in the run directory, which `training_harness.notebook` shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from collector.agent.live.prometheus import View, by_role
from collector.report.html import live_card
from collector.units import counted, percent, quantity
from training_harness.layout import CARD, FOR_TRAINING, replace_file

#: Seconds between two cards.
EVERY_SECONDS = 3.0


class NotebookCard:
    """The card of a run while it goes on."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._last: tuple[float, View] | None = None

    def tick(self, now_seconds: float, take_view: Callable[[], View | None]) -> None:
        """Write the card, if that is due.

        Raises:
            OSError: the run directory cannot be written.
        """
        if self._last is not None and now_seconds - self._last[0] < EVERY_SECONDS:
            return
        view = take_view()
        if view is None:
            return
        before, self._last = self._last, (now_seconds, view)
        speed = None if before is None else (view.steps - before[1].steps) / (now_seconds - before[0])
        judged = "No verdict yet: the first one comes after half a minute."
        if view.verdict_seconds is not None:
            judged = f"Verdict of {time.strftime('%H:%M:%S', time.localtime(view.verdict_seconds))}"
        card = live_card(
            run_id=view.run_id,
            name=view.name,
            values=values(view, speed),
            findings=view.findings,
            judged=judged,
        )
        replace_file(self._run_dir / CARD, card, FOR_TRAINING)


def values(view: View, steps_per_second: float | None) -> Iterator[tuple[str, str]]:
    """Yield label and value of what the card shows. Pure."""
    ranks = view.totals.sums.values() if view.totals is not None else ()
    if steps := view.steps:
        speed = "" if steps_per_second is None else f", {quantity(steps_per_second, 'steps/second')} now"
        yield "steps", f"{steps:,}{speed}"
    step_ns = sum(sums.get("step_ns", 0) for sums in ranks)
    if step_ns:
        yield "data wait", f"{percent(sum(sums.get('data_wait_ns', 0) for sums in ranks) / step_ns)} of step time"
    processes = by_role(view.samples.get("process", ())).values()
    if pss_bytes := sum(total["pss_bytes"] for total in processes):
        yield (
            "host memory",
            f"{quantity(pss_bytes, 'bytes')} in {counted(sum(one['count'] for one in processes), 'process')}",
        )
    for host in view.samples.get("host", ()):
        yield "available", f"{quantity(host['memory_available_bytes'], 'bytes')} on this machine"
    for (_, _, device), newest in (view.totals.allocator if view.totals is not None else {}).items():
        words = f"{quantity(newest['allocated_bytes'], 'bytes')} in tensors"
        yield f"device {device}", f"{quantity(newest['reserved_bytes'], 'bytes')} reserved, {words}"
