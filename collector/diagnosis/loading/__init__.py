"""Loading loops: what their workers did, and what the training waited for."""

from collector.diagnosis.loading.loaders import Loop, loops
from collector.diagnosis.loading.recent_batches import BATCHES, longest_waiting_rank, recent_loading
from collector.diagnosis.loading.wait_breakdown import (
    WAIT_PARTS,
    WaitBreakdown,
    break_down_waits,
    cost_per_stage,
    recent_loops,
)
from collector.diagnosis.loading.waiting_lines import AwaitedTime, SourceFrame, stage_of
from collector.diagnosis.loading.worker_lanes import Lanes, lanes, waits_by_worker
from collector.diagnosis.loading.worker_limit import cores_of_other_programs
