"""Recorded runs with GPUs, altered: another gauge of the allocator, more memory at the driver, another job."""

from collector.diagnosis.memory.gpu_memory import find_device_growth, find_device_risk
from tests.recorded_runs import at_times, rise, with_columns
from training_harness.records import ROLE_MAIN

#: Each step keeps a tensor of 1 MiB, takes 1 MiB from the driver, or has one more pinned buffer of 256 KiB at once.
TENSORS, LIBRARY, PINNED = "tensor-leak", "library-growth", "pinned-cache"
HOLES = "gpu-fragmentation"
#: Columns that grow in the samples of a process whose heap grows.
HOST_GAUGES = ("rss_bytes", "data_bytes", "private_dirty_bytes", "pss_bytes")


def kinds(tables):
    return [finding.kind for finding in (*find_device_growth(tables), *find_device_risk(tables))]


def steps_per_second(tables):
    times = tables.streams["step"]["time_ns"]
    return 1e9 * (len(times) - 1) / (times.iloc[-1] - times.iloc[0])


def with_allocator(tables, **columns):
    """Return a run with other gauges of the allocator: values, or functions of its records."""
    return with_columns(
        tables, "device_memory", lambda rows: {n: v(rows) if callable(v) else v for n, v in columns.items()}
    )


def with_driver(tables, **columns):
    """Return the tables with changed samples of NVML."""
    return with_columns(
        tables, "device", lambda rows: {n: v(rows) if callable(v) else v for n, v in columns.items()}
    )


def flat(name):
    """Return a column as it was in the first record."""
    return lambda rows: rows[name].iloc[0]


def more(name, size):
    return lambda rows: rows[name] + size


def with_cache(tables, size):
    """Return a run whose allocator keeps `size` bytes more at each record; the driver counts them at once."""
    cache = tables.streams["device_memory"].assign(cache=size)

    def used(rows):
        return {
            name: rows[name] + at_times(rows["time_ns"], cache, "cache")
            for name in ("used_bytes", "process_used_bytes")
        }

    return with_columns(with_allocator(tables, reserved_bytes=more("reserved_bytes", size)), "device", used)


def with_other_job(tables, others):
    """Return a run with another job on its GPU, which holds `others` bytes in each sample."""
    return with_driver(
        tables,
        used_bytes=lambda rows: rows["used_bytes"] + others,
        other_used_bytes=lambda rows: rows["other_used_bytes"] + others,
    )


def as_another_job(tables):
    """Return a run in which another job takes what the run's processes took."""
    grown = rise(tables.streams["device"], "process_used_bytes").fillna(0)
    return with_driver(
        tables,
        process_used_bytes=lambda rows: rows["process_used_bytes"] - grown,
        other_used_bytes=lambda rows: rows["other_used_bytes"] + grown,
    )


def with_host_growth(tables, gauge, share):
    """Return a run whose training process takes a share of what a gauge of the allocator grew by, on the host."""
    records = tables.streams["device_memory"]
    grown = records.assign(grown=rise(records, gauge) * share)

    def taken(rows):
        return at_times(rows["time_ns"], grown, "grown")

    def in_process(rows):
        return {name: rows[name] + (rows["role"] == ROLE_MAIN) * taken(rows) for name in HOST_GAUGES}

    more = with_columns(tables, "process", in_process)
    return with_columns(
        more, "host", lambda rows: {"memory_available_bytes": rows["memory_available_bytes"] - taken(rows)}
    )


def with_steady_host(tables):
    """Return a run whose training process has the same resident memory at all times."""

    def last(rows):
        is_main = rows["role"] == ROLE_MAIN
        return {name: rows[name].mask(is_main, rows.loc[is_main, name].max()) for name in HOST_GAUGES}

    return with_columns(tables, "process", last)
