"""What a user did or met, said in one line."""

from __future__ import annotations

#: Set to 1, an unexpected error shows its traceback.
DEBUG_VARIABLE = "TIDEGAUGE_DEBUG"


class TidegaugeError(Exception):
    """An error to show without a traceback: the message names the value, the bound and the remedy."""

    exit_code = 2


def one_line(text: str) -> str:
    """A message as one line, for a terminal."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """A text whose control characters are seen (ESC as ␛) and not obeyed; line breaks stay."""
    return text if text.isprintable() else text.translate(_SEEN)


#: Unicode's pictures of control characters; what has none, or is half a surrogate pair, is U+FFFD.
_SEEN = {
    **{code: 0x2400 + code for code in range(0x20) if code != ord("\n")},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD),
}
