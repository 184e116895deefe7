"""Read journals: segments and event logs."""

from collector.store.journals.growing_files import GrowingFiles
from collector.store.journals.segments import (
    EVENT_LOG_SUFFIX,
    JournalError,
    list_event_logs,
    read_events,
    size_bytes,
)

__all__ = [
    "EVENT_LOG_SUFFIX",
    "GrowingFiles",
    "JournalError",
    "list_event_logs",
    "read_events",
    "size_bytes",
]
