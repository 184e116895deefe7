"""Judge a run: from its tables to a verdict with findings. All functions are pure, except loading the tables."""

from collector.diagnosis.deaths.last_minute import LAST_MINUTE_SECONDS
from collector.diagnosis.ending import Ending, ExitRecord
from collector.diagnosis.memory.allocation_sites import rank_sites
from collector.diagnosis.memory.leak import negligible_bytes
from collector.diagnosis.run import DEVICE_PARTS, UNATTRIBUTED, RunTables, accounts, load_tables
from collector.diagnosis.run.tables import ROWS_PER_STREAM
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO
from collector.diagnosis.statistics import MIN_POINTS
from collector.diagnosis.summary import Machine, machine_of, memory_curve
from collector.diagnosis.throughput import Slowdown, ThroughputRatio, throughput_ratio
from collector.diagnosis.verdict import Verdict, command_words, diagnose
from collector.findings import Check

__all__ = [
    "DEVICE_PARTS",
    "LAST_MINUTE_SECONDS",
    "LEAST_LOST_RATIO",
    "MIN_POINTS",
    "ROWS_PER_STREAM",
    "UNATTRIBUTED",
    "Check",
    "Ending",
    "ExitRecord",
    "Machine",
    "RunTables",
    "Slowdown",
    "ThroughputRatio",
    "Verdict",
    "accounts",
    "command_words",
    "diagnose",
    "load_tables",
    "machine_of",
    "memory_curve",
    "negligible_bytes",
    "rank_sites",
    "throughput_ratio",
]
