"""Formats of the dashboard alone: byte scales of axes, the time of day, and text that is safe in Markdown."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo

GIB = 2**30
MIB = 2**20
#: Units of an age, and their lengths in seconds.
_AGES = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
#: Code, which stays as it is; an address, which becomes code, since Markdown makes it a link even if it is escaped;
#: or a sign with a meaning in Markdown or in Streamlit's directives, which is escaped.
_MARKUP = re.compile(
    r"(?<!`)`(?!`)[^`]+`(?!`)"
    r"|(?P<address>(?:https?://|www\.)[^\s`]+|[-.+\w]+@[-\w]+(?:\.[-\w]+)+)"
    r"|(?P<sign>[\\`*\[\]<$~&]|(?<![^\W_])_|_(?![^\W_])|:(?=[a-z]))",
    re.IGNORECASE,
)


def byte_axis(top_bytes: float) -> tuple[int, str]:
    """Return (bytes per unit, unit) for an axis up to `top_bytes`: GiB, or MiB below one GiB."""
    return (GIB, "GiB") if top_bytes >= GIB else (MIB, "MiB")


def clock(wall_ns: int, zone: tzinfo = UTC) -> str:
    """Return wall time as hh:mm:ss in a time zone."""
    return datetime.fromtimestamp(wall_ns / 1e9, zone).strftime("%H:%M:%S")


def date(wall_ns: int, zone: tzinfo = UTC) -> str:
    """Return wall time as date and time of day in a time zone."""
    return datetime.fromtimestamp(wall_ns / 1e9, zone).strftime("%Y-%m-%d %H:%M:%S")


def ago(seconds: float) -> str:
    """Return an age in whole numbers of its largest unit: `12 s ago`, `3 h ago`, `40 d ago`."""
    name, length = next(unit for unit in _AGES if seconds >= unit[1] or unit is _AGES[-1])
    return f"{max(seconds, 0) // length:.0f} {name} ago"


def first_line(error: BaseException) -> str:
    """Return the error as one clear line."""
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def plain(text: str) -> str:
    """Return a text from outside as Markdown without links, images or headings; `code` stays code."""

    def escape(match: re.Match[str]) -> str:
        if match["address"]:
            return f"`{match[0]}`"
        return f"\\{match[0]}" if match["sign"] else match[0]

    return _MARKUP.sub(escape, " ".join(text.split()))
