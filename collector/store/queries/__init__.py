"""Named queries over a snapshot of a run, one module per subject, and the words that they share."""

from collector.store.queries.collector_health import agent_summary, collector_lines, collector_memory
from collector.store.queries.gpu_memory import cache_flushes, cuda_errors, device_grid, device_lines, devices
from collector.store.queries.lines import Lines
from collector.store.queries.loading import (
    batch_waits,
    fetch_heat,
    loaders,
    queue_lines,
    starts,
    throughput,
    used_loaders,
    worker_split,
)
from collector.store.queries.moments import epoch_starts, events, step_clock, steps_elapsed
from collector.store.queries.process_memory import (
    MAIN_PLACE,
    host_limits,
    host_lines,
    last_alive,
    memory_by_role,
    open_files,
    process_lines,
    process_metric,
    processes,
    sum_processes,
    tightest_limit,
    training,
)
from collector.store.queries.spans import (
    PULSE_STREAMS,
    WINDOWS,
    Extent,
    Memo,
    Queryable,
    Span,
    Window,
    extent,
    origin_ns,
    span,
    wall_ns,
    whole,
)
from collector.store.queries.training_steps import rank_steps, step_samples, step_summary, steps
from collector.store.rollups.tables import EXACT_QUANTILE_ROWS, Reach
