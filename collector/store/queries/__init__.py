"""Named queries over a snapshot of a run, one module per subject, and the words that they share."""

from collector.store.queries import (
    collector_health,
    gpu_memory,
    lines,
    loading,
    moments,
    process_memory,
    spans,
    training_steps,
)
from collector.store.queries.lines import Lines
from collector.store.queries.spans import WINDOWS, Extent, Memo, Queryable, Span, Window
from collector.store.rollups.tables import EXACT_QUANTILE_ROWS

__all__ = [
    "EXACT_QUANTILE_ROWS",
    "WINDOWS",
    "Extent",
    "Lines",
    "Memo",
    "Queryable",
    "Span",
    "Window",
    "collector_health",
    "gpu_memory",
    "lines",
    "loading",
    "moments",
    "process_memory",
    "spans",
    "training_steps",
]
