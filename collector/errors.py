"""What a user did or met, said in one line."""

from __future__ import annotations

#: Set to 1, an unexpected error shows its traceback.
DEBUG_VARIABLE = "TIDEGAUGE_DEBUG"


class TidegaugeError(Exception):
    """An error to show without a traceback: the message names the value, the bound and the remedy."""

    exit_code = 2


def one_line(text: str) -> str:
    """A message as one line."""
    return " ".join(text.split())
