"""Functions of the training that are called when memory, or another limit, runs out.

They run on the training's own thread at the end of a step, and only if the script registered them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from training_harness import session

#: A function that gets a finding, as in the JSON report (docs/report.md).
RiskFunction = Callable[[dict[str, Any]], object]
_Function = TypeVar("_Function", bound=RiskFunction)

_functions: list[tuple[RiskFunction, float]] = []
#: Number of functions that an event of this process has announced.
_announced_count = 0


def on_risk(function: _Function, *, lead_seconds: float = 60.0) -> _Function:
    """Have a function called at the end of a step, once for each limit that is about to be met.

    It gets the finding (`kind`, `summary`, `limit`, `eta` and more, docs/report.md), and can save a checkpoint or
    set a flag that ends the training. An exception in it is recorded, and the training goes on. Without a collector
    nothing is called.

    Args:
        function: the function; it is returned, so this is a decorator too.
        lead_seconds: time before the limit, by the lower end of the forecast, at which it is called.
    """
    _functions.append((function, float(lead_seconds)))
    current = session.start()
    if current is not None:
        announce(current)
    return function


def announce(current: session.Session) -> None:
    """Tell the collector of the functions that it does not know of yet."""
    global _announced_count
    new, _announced_count = _functions[_announced_count:], len(_functions)
    for _, lead_seconds in new:
        current.events.append("risk-listener", lead_seconds=lead_seconds)


def call(current: session.Session, step: int, finding: dict[str, Any]) -> None:
    """Call the functions with a finding, and record it; without a function do nothing."""
    if not _functions:
        return
    begun_ns = time.monotonic_ns()
    errors = []
    for function, _ in _functions:
        try:
            function(finding)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    held_ns = time.monotonic_ns() - begun_ns
    current.events.append("risk-call", risk=finding["kind"], step=step, held_ns=held_ns, errors=errors)
