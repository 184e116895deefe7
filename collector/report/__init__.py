"""Verdicts, comparisons and lists of runs, for the terminal and as JSON.

The app imports from here. Each name is looked up when it is first used: a command loads only what it prints with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collector.report.comparison import (
        Measure,
        baseline_words,
        change_ratio,
        differences,
        headings,
        measures,
        settings,
        words,
    )
    from collector.report.history import (
        TRENDS,
        FindingHistory,
        History,
        LevelChange,
        Trend,
        change_sentences,
        commands_of,
        commit_words,
        finding_histories,
        history_of,
        level_changes,
        place_words,
        trend_points,
        trend_unit,
    )
    from collector.report.html import finding_box, inline
    from collector.report.known import Command, change_known, known_files, with_known
    from collector.report.listing import ListEntry, list_entry
    from collector.report.stack_listing import frame_text, heading
    from collector.report.wording import (
        ago,
        check_words,
        context,
        decisive,
        earlier_workers,
        eta,
        evidence_rows,
        exit_record,
        finding_heading,
        grouped,
        line_words,
        part,
        samples,
        scope_words,
        since,
        site_words,
        slower_words,
        stall,
        start_words,
        subject,
        title,
        unexplained_end,
    )

_NAMES = {
    "comparison": "Measure baseline_words change_ratio differences headings measures settings words",
    "history": "FindingHistory History LevelChange TRENDS Trend change_sentences commands_of commit_words "
    "finding_histories history_of level_changes place_words trend_points trend_unit",
    "html": "finding_box inline",
    "known": "Command change_known known_files with_known",
    "listing": "ListEntry list_entry",
    "stack_listing": "frame_text heading",
    "wording": "ago check_words context decisive earlier_workers eta evidence_rows exit_record finding_heading "
    "grouped line_words part samples scope_words since site_words slower_words stall start_words subject title "
    "unexplained_end",
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _NAMES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
