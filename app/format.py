"""What the dashboard alone needs: the scales of its axes, the time of day, and texts that Markdown leaves alone."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo

GIB = 2**30
MIB = 2**20
#: A piece of code, which stays one; an address, which becomes one, since Markdown makes it a link however it is
#: escaped; or what Markdown and Streamlit's directives make something of.
_MARKUP = re.compile(
    r"(?<!`)`(?!`)[^`]+`(?!`)"
    r"|(?P<address>(?:https?://|www\.)[^\s`]+|[-.+\w]+@[-\w]+(?:\.[-\w]+)+)"
    r"|(?P<sign>[\\`*\[\]<$~&]|(?<![^\W_])_|_(?![^\W_])|:(?=[a-z]))",
    re.IGNORECASE,
)


def byte_axis(top_bytes: float) -> tuple[int, str]:
    """Bytes per unit, and the unit, of an axis that reaches so far: GiB, or MiB below one GiB."""
    return (GIB, "GiB") if top_bytes >= GIB else (MIB, "MiB")


def clock(wall_ns: int, zone: tzinfo = UTC) -> str:
    """Wall time as hh:mm:ss in that time zone."""
    return datetime.fromtimestamp(wall_ns / 1e9, zone).strftime("%H:%M:%S")


def one_line(error: BaseException) -> str:
    """The error as one clear line."""
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def plain(text: str) -> str:
    """A text that others had a part in, for Markdown: no link, image or heading comes of it; `code` stays code."""

    def inert(found: re.Match[str]) -> str:
        if found["address"]:
            return f"`{found[0]}`"
        return f"\\{found[0]}" if found["sign"] else found[0]

    return _MARKUP.sub(inert, " ".join(text.split()))
