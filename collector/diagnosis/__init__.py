"""Judge a run: from its tables to a verdict with findings. All functions are pure, except loading the tables."""

from collector.diagnosis.deaths.last_minute import LAST_MINUTE_SECONDS as LAST_MINUTE_SECONDS
from collector.diagnosis.ending import Ending as Ending, ExitRecord as ExitRecord
from collector.diagnosis.memory.allocation_sites import rank_sites as rank_sites
from collector.diagnosis.memory.leak import negligible_bytes as negligible_bytes
from collector.diagnosis.run.device_account import (
    DEVICE_PARTS as DEVICE_PARTS,
    UNATTRIBUTED as UNATTRIBUTED,
    accounts as accounts,
)
from collector.diagnosis.run.tables import (
    ROWS_PER_STREAM as ROWS_PER_STREAM,
    RunTables as RunTables,
    load_tables as load_tables,
)
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO as LEAST_LOST_RATIO
from collector.diagnosis.statistics.growth import MIN_POINTS as MIN_POINTS
from collector.diagnosis.statistics.student_t import student_t_quantile as student_t_quantile
from collector.diagnosis.summary import Machine as Machine, machine_of as machine_of, memory_curve as memory_curve
from collector.diagnosis.throughput import (
    Slowdown as Slowdown,
    ThroughputRatio as ThroughputRatio,
    throughput_ratio as throughput_ratio,
)
from collector.diagnosis.verdict import Verdict as Verdict, command_words as command_words, diagnose as diagnose
from collector.findings import Check as Check
