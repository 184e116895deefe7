"""What a user did or met, said in one line."""

from __future__ import annotations


class TidegaugeError(Exception):
    """An error to show without a traceback: the message names the value, the bound and the remedy."""

    exit_code = 2
