"""Judge a run: from its tables to a verdict with findings. All functions are pure, except loading the tables."""

from collector.diagnosis.deaths.last_minute import LAST_MINUTE_SECONDS
from collector.diagnosis.ending import ExitRecord
from collector.diagnosis.memory.allocation_sites import rank_sites
from collector.diagnosis.memory.leak import negligible_bytes
from collector.diagnosis.run.device_account import DEVICE_PARTS, UNATTRIBUTED, accounts
from collector.diagnosis.run.tables import ROWS_PER_STREAM, RunTables, load_tables
from collector.diagnosis.stalls.cost import LEAST_LOST_RATIO
from collector.diagnosis.statistics.growth import MIN_POINTS
from collector.diagnosis.statistics.student_t import student_t_quantile
from collector.diagnosis.summary import Machine, machine_of, memory_curve
from collector.diagnosis.throughput import Slowdown, throughput_ratio
from collector.diagnosis.verdict import Verdict, command_words, diagnose
from collector.findings import Check
