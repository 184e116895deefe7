"""Records of GPUs, for runs that `make_run` makes."""

import socket

from make_records import GIB, MIB, NO_SUCH_PID, Writers

from training_harness import layout
from training_harness.journal import Identity

HERE = socket.gethostname()
SECOND_NS = 10**9
TOTAL, OTHER = 24 * GIB, 300 * MIB


def begin_ns(run_dir):
    """When the first step of a run began; its steps take 40 s."""
    return layout.read_manifest(run_dir)["anchors"][HERE]["time_ns"] + 2 * SECOND_NS


def train(
    run_dir, reserved, allocated=None, *, host=HERE, pid=0, rank=None, every=0.02, peaks=None, retries=(), ooms=()
):
    """An allocator's record for each step on GPU 0; `peaks` is what it counted at most, allocated and reserved.

    It gave its cache back in the steps `retries`, and ran out of memory in the steps `ooms`.
    """
    begin, process = begin_ns(run_dir), Writers(run_dir / "journal", Identity(host, NO_SUCH_PID + pid, 2000, rank))
    for step, held in enumerate(reserved):
        of_tensors = held - 2 * GIB if allocated is None else allocated[step]
        most = dict(zip(("allocated_peak_bytes", "reserved_peak_bytes"), peaks or (of_tensors, held), strict=True))
        process.append(
            "device_memory",
            time_ns=begin + int((step + 1) * every * SECOND_NS),
            step=step,
            device=0,
            allocated_bytes=int(of_tensors),
            reserved_bytes=int(held),
            inactive_split_bytes=0,
            alloc_retry_count=sum(each <= step for each in retries),
            oom_count=sum(each <= step for each in ooms),
            **most,
        )
    process.close()


def ask_driver(run_dir, used, *, host=HERE, every=0.5, since=0.2, names_processes=True):
    """Samples of GPU 0 from `since` seconds on, of which other processes have 300 MiB and nobody 100 MiB.

    The driver may name no process.
    """
    begin, agent = begin_ns(run_dir), Writers(run_dir / "journal", Identity(host, NO_SUCH_PID + 900, 900))
    for place, value in enumerate(used):
        of_processes = {"process_used_bytes": int(value) - OTHER - 100 * MIB, "other_used_bytes": OTHER}
        agent.append(
            "device",
            time_ns=begin + int((since + place * every) * SECOND_NS),
            device=0,
            used_bytes=int(value),
            total_bytes=TOTAL,
            **(of_processes if names_processes else {}),
        )
    agent.close()
