"""Named queries over a snapshot of a run, one module per subject."""

from collector.store.queries.lines import Lines
from collector.store.queries.spans import Extent, Queryable, Span, Window
from collector.store.rollups.tables import EXACT_QUANTILE_ROWS

__all__ = [
    "EXACT_QUANTILE_ROWS",
    "Extent",
    "Lines",
    "Queryable",
    "Span",
    "Window",
]
