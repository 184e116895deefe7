"""Verdicts, comparisons and lists of runs, for the terminal and as JSON.

The app imports from here. Each name is looked up when it is first used: a command loads only what it prints with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collector.report.comparison import (
        Measure as Measure,
        baseline_words as baseline_words,
        change_ratio as change_ratio,
        differences as differences,
        headings as headings,
        measures as measures,
        settings as settings,
        words as words,
    )
    from collector.report.history import (
        TRENDS as TRENDS,
        FindingHistory as FindingHistory,
        History as History,
        LevelChange as LevelChange,
        Trend as Trend,
        change_sentences as change_sentences,
        commands_of as commands_of,
        commit_words as commit_words,
        finding_histories as finding_histories,
        history_of as history_of,
        level_changes as level_changes,
        place_words as place_words,
        trend_points as trend_points,
        trend_unit as trend_unit,
    )
    from collector.report.html import finding_box as finding_box, inline as inline
    from collector.report.known import (
        Command as Command,
        change_known as change_known,
        home_of as home_of,
        known_files as known_files,
        known_findings as known_findings,
        with_known as with_known,
    )
    from collector.report.labels import label as label
    from collector.report.listing import ListEntry as ListEntry, list_entry as list_entry
    from collector.report.stack_listing import frame_text as frame_text, heading as heading
    from collector.report.wording import (
        ago as ago,
        bytes_growth as bytes_growth,
        check_words as check_words,
        context as context,
        count_growth as count_growth,
        decisive as decisive,
        earlier_workers as earlier_workers,
        eta as eta,
        evidence_rows as evidence_rows,
        exit_record as exit_record,
        exit_words as exit_words,
        finding_heading as finding_heading,
        grouped as grouped,
        line_words as line_words,
        locus as locus,
        part as part,
        samples as samples,
        scope_words as scope_words,
        since as since,
        site_words as site_words,
        slower_words as slower_words,
        stake as stake,
        stall as stall,
        subject as subject,
        title as title,
        unexplained_end as unexplained_end,
    )

_NAMES = {
    "comparison": "Measure baseline_words change_ratio differences headings measures settings words",
    "history": "FindingHistory History LevelChange TRENDS Trend change_sentences commands_of commit_words "
    "finding_histories history_of level_changes place_words trend_points trend_unit",
    "html": "finding_box inline",
    "known": "Command change_known home_of known_files known_findings with_known",
    "listing": "ListEntry list_entry",
    "labels": "label",
    "stack_listing": "frame_text heading",
    "wording": "ago bytes_growth check_words context count_growth decisive earlier_workers eta evidence_rows "
    "exit_record exit_words finding_heading grouped line_words locus part samples scope_words since site_words "
    "slower_words stake stall subject title unexplained_end",
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _NAMES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
