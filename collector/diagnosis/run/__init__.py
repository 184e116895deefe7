"""One run as tables: its processes, how they ended, and what held its memory.

Rules read tables with the helpers of `columns`.
"""

from collector.diagnosis.run.device_account import DEVICE_PARTS, UNATTRIBUTED, accounts
from collector.diagnosis.run.lifecycle import Lifecycle, Status, lifecycle_of
from collector.diagnosis.run.tables import RunTables, load_tables

__all__ = [
    "DEVICE_PARTS",
    "UNATTRIBUTED",
    "Lifecycle",
    "RunTables",
    "Status",
    "accounts",
    "lifecycle_of",
    "load_tables",
]
