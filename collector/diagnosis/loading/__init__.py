"""Loading loops: what their workers did, and what the training waited for."""

from collector.diagnosis.loading.loaders import Loop as Loop, loops as loops
from collector.diagnosis.loading.recent_batches import (
    BATCHES as BATCHES,
    longest_waiting_rank as longest_waiting_rank,
    recent_loading as recent_loading,
)
from collector.diagnosis.loading.wait_breakdown import (
    WAIT_PARTS as WAIT_PARTS,
    WaitBreakdown as WaitBreakdown,
    break_down_waits as break_down_waits,
    cost_per_stage as cost_per_stage,
    recent_loops as recent_loops,
)
from collector.diagnosis.loading.waiting_lines import (
    AwaitedTime as AwaitedTime,
    SourceFrame as SourceFrame,
    stage_of as stage_of,
)
from collector.diagnosis.loading.worker_lanes import (
    Lanes as Lanes,
    lanes as lanes,
    waits_by_worker as waits_by_worker,
)
from collector.diagnosis.loading.worker_limit import cores_of_other_programs as cores_of_other_programs
