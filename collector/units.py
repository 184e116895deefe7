"""Values in words: sizes, durations, ratios, counts; a dash for a missing value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TypeGuard

MISSING = "—"
_SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SPANS = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
_SMALL_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_BARE_UNITS = ("count", "status", "text", "id")
#: From this value on, three digits round to 1000, which Python would write as 1e+03.
_ROUNDS_UP = 999.5
#: From this share of a unit of bytes on, the next smaller unit would show 1024.
_ROUNDS_UP_TO_1024 = 1023.5 / 1024
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_TIME_UNITS = {"seconds": 1.0, "s": 1.0, "milliseconds": 1e-3, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def plain_text(text: str) -> str:
    """Return a text without the escape sequences that colour a terminal (ECMA-48)."""
    return _ESCAPES.sub("", text)


def is_known(value: float | None) -> TypeGuard[float]:
    """Return whether a value is finite: neither None, NaN, pandas' NA or NaT, nor infinite."""
    try:
        return value is not None and math.isfinite(value)
    except TypeError:
        return False


def quantity(value: float | str | None, unit: str) -> str:
    """Return a value with its unit: 2^30 bytes are `1 GiB`, 0.0123 seconds `12.3 ms`, ratios `2.9×` and `30%`."""
    if isinstance(value, str):
        return value
    if not is_known(value):
        return MISSING
    base, _, per = unit.partition("/")
    if base == "bytes":
        text = size(value)
    elif base == "bool":
        text = "yes" if value else "no"
    elif base in _TIME_UNITS:
        text = duration(value * _TIME_UNITS[base])
    elif base == "ratio":
        return percent(value) if abs(value) < 1.005 else f"{number(value)}×"
    else:
        text = f"{number(value)} {'' if base in _BARE_UNITS else base}".rstrip()
    return f"{text}/{'s' if per in ('second', 'seconds') else per}" if per else text


def number(value: float | None) -> str:
    """Return a number with three significant digits, a whole number with all; commas between thousands."""
    if not is_known(value):
        return MISSING
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= _ROUNDS_UP else f"{value:.3g}"


def count(value: float | None) -> str:
    """Return a count, rounded to a whole number; commas between thousands."""
    return f"{value:,.0f}" if is_known(value) else MISSING


def counted(value: float, thing: str) -> str:
    """Return a count with its noun: `1 sample`, `2,500 samples`, `3 batches`."""
    ending = "" if value == 1 else "es" if thing.endswith(("ss", "tch")) else "s"
    return f"{count(value)} {thing}{ending}"


def listed(items: Iterable[object]) -> str:
    """Return items as a list in a sentence: `0`, `0 and 1`, `0, 1 and 2`."""
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last


def after_steps(steps_count: float) -> str:
    """Return in words after how many steps something was: `after 120 steps`; after none, `in the first step`.

    Steps are numbered from 0, so this is also the number of the step that was going on.
    """
    if steps_count < 1:
        return "in the first step"
    return f"after {counted(steps_count, 'step')}"


def percent(ratio: float | None) -> str:
    """Return a ratio in percent: 0.31 is `31%`; one decimal below 10%."""
    if not is_known(ratio):
        return MISSING
    return f"{ratio:,.0%}" if abs(ratio) >= 0.0995 or ratio == 0 else f"{ratio:.1%}"


def size(value_bytes: float | None) -> str:
    """Return bytes in binary units with three significant digits: `24 GiB`, `1.23 MiB`, `900 B`."""
    if not is_known(value_bytes):
        return MISSING
    for unit, unit_bytes in _SIZES:
        if abs(value_bytes) >= unit_bytes * _ROUNDS_UP_TO_1024:
            scaled = value_bytes / unit_bytes
            return f"{scaled:.0f} {unit}" if abs(scaled) >= 100 else f"{scaled:.3g} {unit}"
    return f"{value_bytes:.0f} B"


def growth(bytes_per_second: float | None) -> str:
    """Return the rate at which memory grows or falls: `+1.5 MiB/s`."""
    if not is_known(bytes_per_second):
        return MISSING
    if abs(bytes_per_second) < 0.5:
        return "0 B/s"
    return f"{'+' if bytes_per_second > 0 else ''}{size(bytes_per_second)}/s"


def duration(seconds: float | None) -> str:
    """Return a duration: `640 µs`, `12.3 ms`, `48 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    if not is_known(seconds):
        return MISSING
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 10:
        return _small_time(seconds)
    whole = round(seconds)
    for unit, span, part, part_span in _SPANS:
        if whole >= max(span, 100):
            rest = whole % span // part_span
            return f"{whole // span} {unit} {rest} {part}" if rest else f"{whole // span} {unit}"
    return f"{whole} s"


def until(seconds: float) -> str:
    """Return the time until an event in words; `never` if it is infinite."""
    return "never" if seconds == math.inf else duration(seconds)


def _small_time(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    rounded = float(f"{seconds:.3g}")  # 0.9996 ms is 1 ms, not 1000 µs
    for unit, unit_seconds in _SMALL_TIMES:
        if rounded >= unit_seconds:
            return f"{rounded / unit_seconds:.3g} {unit}"
    return f"{seconds / 1e-9:.2g} ns"
