"""Named queries over a snapshot of a run, one module per subject, and the words that they share."""

from collector.store.queries.collector_health import (
    agent_summary as agent_summary,
    collector_lines as collector_lines,
    collector_memory as collector_memory,
)
from collector.store.queries.gpu_memory import (
    cache_flushes as cache_flushes,
    cuda_errors as cuda_errors,
    device_grid as device_grid,
    device_lines as device_lines,
    devices as devices,
)
from collector.store.queries.lines import Lines as Lines
from collector.store.queries.loading import (
    batch_waits as batch_waits,
    fetch_heat as fetch_heat,
    loaders as loaders,
    queue_lines as queue_lines,
    starts as starts,
    throughput as throughput,
    used_loaders as used_loaders,
    worker_split as worker_split,
)
from collector.store.queries.moments import (
    epoch_starts as epoch_starts,
    events as events,
    step_clock as step_clock,
    steps_elapsed as steps_elapsed,
)
from collector.store.queries.process_memory import (
    MAIN_PLACE as MAIN_PLACE,
    host_limits as host_limits,
    host_lines as host_lines,
    last_alive as last_alive,
    memory_by_role as memory_by_role,
    open_files as open_files,
    process_lines as process_lines,
    process_metric as process_metric,
    processes as processes,
    sum_processes as sum_processes,
    tightest_limit as tightest_limit,
    training as training,
)
from collector.store.queries.spans import (
    PULSE_STREAMS as PULSE_STREAMS,
    WINDOWS as WINDOWS,
    Extent as Extent,
    Memo as Memo,
    Queryable as Queryable,
    Span as Span,
    Window as Window,
    extent as extent,
    origin_ns as origin_ns,
    span as span,
    wall_ns as wall_ns,
    whole as whole,
)
from collector.store.queries.training_steps import (
    rank_steps as rank_steps,
    step_samples as step_samples,
    step_summary as step_summary,
    steps as steps,
)
from collector.store.rollups.tables import EXACT_QUANTILE_ROWS as EXACT_QUANTILE_ROWS, Reach as Reach
