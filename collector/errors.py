"""The error that users see, and texts made safe for a terminal."""

from __future__ import annotations

#: Environment variable that, set to 1, shows the traceback of an unexpected error.
DEBUG_VARIABLE = "TIDEGAUGE_DEBUG"


class TidegaugeError(Exception):
    """An error to show without a traceback: the message names the value, the bound and the remedy."""

    exit_code = 2


def one_line(text: str) -> str:
    """Return a message as one line, for a terminal."""
    return printable(" ".join(text.split()))


def last_line(text: str) -> str:
    """Return the last line of what a program wrote, which mostly says why it failed; empty if it wrote nothing."""
    return (text.strip().splitlines() or [""])[-1]


def printable(text: str) -> str:
    """Return a text whose control characters are shown (ESC as ␛), not obeyed; line breaks stay."""
    return text if text.isprintable() else text.translate(_PICTURES)


#: Unicode's pictures of control characters; U+FFFD for those without one and for half a surrogate pair.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if code != ord("\n")},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD),
}
