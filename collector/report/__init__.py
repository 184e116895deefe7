"""Verdicts, comparisons and lists of runs, for the terminal and as JSON.

The app imports from here. Each name is looked up when it is first used: a command loads only what it prints with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collector.report.card import exit_words as exit_words
    from collector.report.comparison import (
        Measure as Measure,
        change_ratio as change_ratio,
        differences as differences,
        measures as measures,
        settings as settings,
        words as words,
    )
    from collector.report.stack_listing import frame_text as frame_text, heading as heading
    from collector.report.wording import (
        bytes_growth as bytes_growth,
        count_growth as count_growth,
        eta as eta,
        label as label,
        locus as locus,
        part as part,
        since as since,
        stall as stall,
        subject as subject,
        title as title,
    )

_MODULES = {
    "card": ("exit_words",),
    "comparison": ("Measure", "change_ratio", "differences", "measures", "settings", "words"),
    "stack_listing": ("frame_text", "heading"),
    "wording": (
        "bytes_growth",
        "count_growth",
        "eta",
        "label",
        "locus",
        "part",
        "since",
        "stall",
        "subject",
        "title",
    ),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
