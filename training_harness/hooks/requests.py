"""What is asked of a running training (`tidegauge snapshot`): seen and answered at a step boundary.

A request is a file `<what>-<id>.json` in the run's `requests/`, put there whole and taken away by who asked. Every
training process of the run answers each one once, with a `snapshot` event; or those alone that are what it says
under `to`, which may be workers too. Between two looks at that folder a step pays for one comparison of integers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from training_harness import session
from training_harness.hooks.census import census
from training_harness.hooks.growth import Growth
from training_harness.hooks.patching import Hook
from training_harness.hooks.profiling import Profile
from training_harness.hooks.snapshots import save, save_allocator
from training_harness.layout import REQUESTS

LOOK_EVERY_NS = 500_000_000
_NEVER_NS = 2**63
_TRAINING = {"role": "main"}

_Maker = Callable[[session.Session], dict[str, Any] | None]


class Requests:
    """The requests to this process, and what else waits for the end of a step.

    Args:
        where: what this process is, beside its host, pid and rank: a training process by default.
        unit: what `serve` is called at the end of: `steps` or `batches`.

    Attributes:
        due_ns: `serve` wants to be called at the first step boundary after this time.
        has_history: whether the allocation history is recorded.
    """

    def __init__(self, where: Mapping[str, Any] | None = None, unit: str = "steps") -> None:
        self.due_ns = 0
        self.has_history = False
        self._where = where or _TRAINING
        self._unit = unit
        self._hook = Hook("requests")
        self._seen: set[str] = set()
        self._call: Callable[[session.Session, int], None] | None = None
        self._running: Profile | Growth | None = None
        self._running_name = ""

    def call(self, function: Callable[[session.Session, int], None]) -> None:
        """Have a function called at the end of this step; the last one that is given wins."""
        self._call = function
        if self._hook.active:
            self.due_ns = 0

    def serve(self, current: session.Session, step: int) -> int:
        """Do what waits, at the end of a step; returns the time when it was done (ns). Never raises."""
        try:
            function, self._call = self._call, None
            if function is not None:
                function(current, step)
            if self._running is not None:
                self._end_if(current, step, self._running, self._running.step_ended)
            for name in self._unseen(current.run_dir):
                self._answer(current, step, name, functools.partial(self._make, step=step, name=name))
            now_ns = time.monotonic_ns()
            self.due_ns = 0 if self._running is not None else now_ns + LOOK_EVERY_NS
        except Exception as error:
            self.due_ns = _NEVER_NS
            self.close()
            self._hook.fail(error)
        return time.monotonic_ns()

    def expire(self, current: session.Session, step: int) -> int:
        """Within a step that may be long, end what runs and whose time is up; returns when that was done (ns)."""
        if self._running is not None:
            self._end_if(current, step, self._running, self._running.expired)
        return time.monotonic_ns()

    def close(self) -> None:
        """Stop what still runs for a request; it gets no answer. Never raises."""
        running, self._running = self._running, None
        if running is not None:
            with contextlib.suppress(Exception):
                running.stop()

    def _end_if(
        self, current: session.Session, step: int, running: Profile | Growth, is_over: Callable[[], bool]
    ) -> None:
        """End what runs if it is over or has failed: it fails alone, what is asked later is answered."""
        make: _Maker = running.save
        try:
            if not is_over():
                return
        except Exception as error:
            self.close()
            make = functools.partial(_fail, error)
        self._running = None
        self._answer(current, step, self._running_name, make)

    def _unseen(self, run_dir: Path) -> list[str]:
        try:
            names = {name[:-5] for name in os.listdir(run_dir / REQUESTS) if name.endswith(".json")}
        except FileNotFoundError:  # nothing was ever asked
            return []
        fresh, self._seen = names - self._seen, names
        return sorted(fresh)

    def _answer(self, current: session.Session, step: int, name: str, make: _Maker) -> None:
        begun_ns = time.monotonic_ns()
        try:
            said = make(current)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        if said is not None:
            held_ns = time.monotonic_ns() - begun_ns
            what = name.partition("-")[0]
            current.events.append(
                "snapshot", request=name, what=what, step=step, held_ns=held_ns, **self._where, **said
            )

    def _make(self, current: session.Session, *, step: int, name: str) -> dict[str, Any] | None:
        """What the answer says; None if there is none, or if it follows in a later step."""
        try:
            request = json.loads((current.run_dir / REQUESTS / f"{name}.json").read_bytes())
        except FileNotFoundError:  # taken back in this moment
            return None
        identity = current.identity
        own = {"host": identity.host, "pid": identity.pid, "rank": identity.rank, **self._where}
        if request["expires_wall_ns"] < time.time_ns() or not request.get("to", _TRAINING).items() <= own.items():
            return None
        torch, what = sys.modules["torch"], request["what"]
        if what == "census":
            return save(current, what, {"step": step, **census(torch)})
        if what == "allocator":
            return save_allocator(current, torch, with_history=self.has_history)
        if what not in ("profile", "growth"):
            raise ValueError(f"nothing is known of {what!r} here; a newer Tidegauge asked")
        if self._running is not None:
            raise RuntimeError("another profile or growth is being taken; ask again when it is done")
        steps = int(request["steps"])
        self._running = Profile(torch, steps) if what == "profile" else Growth(torch, steps, self._unit)
        self._running_name = name
        return None


def _fail(error: Exception, _current: session.Session) -> NoReturn:
    raise error
