"""Growth of memory: leaks, and the limits that they run into."""

from collector.diagnosis.memory.allocation_sites import add_allocation_sites, rank_sites
from collector.diagnosis.memory.file_descriptors import find_descriptors
from collector.diagnosis.memory.gpu_growth import find_device_growth
from collector.diagnosis.memory.gpu_oom_risk import find_device_risk
from collector.diagnosis.memory.heap_leaks import find_leaks
from collector.diagnosis.memory.host_oom_risk import find_host_risk
from collector.diagnosis.memory.leak import negligible_bytes
from collector.diagnosis.memory.shared_memory import find_shared_memory

__all__ = [
    "add_allocation_sites",
    "find_descriptors",
    "find_device_growth",
    "find_device_risk",
    "find_host_risk",
    "find_leaks",
    "find_shared_memory",
    "negligible_bytes",
    "rank_sites",
]
