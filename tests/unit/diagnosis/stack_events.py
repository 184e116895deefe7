"""Recorded stacks of a run's processes, as the collector writes them: series of three dumps."""

from __future__ import annotations

from simulated_runs import MAIN, START_SECONDS

LIBRARY = "/opt/lib/python3.12"
TORCH = f"{LIBRARY}/site-packages/torch"
FOR_A_BATCH = [
    ["select", f"{LIBRARY}/selectors.py", 1],
    ["_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH}/utils/data/dataloader.py", 1],
    ["main", "/home/me/train.py", 20],
]
FOR_AN_INDEX = [
    ["Queue.get", f"{LIBRARY}/multiprocessing/queues.py", 1],
    ["_worker_loop", f"{TORCH}/utils/data/_utils/worker.py", 1],
]
IN_A_SAMPLE = [
    ["Files.__getitem__", "/home/me/dataset.py", 41],
    ["_MapDatasetFetcher.fetch", f"{TORCH}/utils/data/_utils/fetch.py", 1],
    ["_worker_loop", f"{TORCH}/utils/data/_utils/worker.py", 1],
]
IN_BACKWARD = [["_engine_run_backward", f"{TORCH}/autograd/graph.py", 1], ["main", "/home/me/train.py", 30]]
IN_MAIN = [["save", "/home/me/train.py", 35], ["main", "/home/me/train.py", 31]]
LOCK = "blocked on a lock (futex)"
POLL = "waiting for a pipe or socket"
WORKERS = (("node", 1000, 7000), ("node", 1001, 7001))
AGENT = ("node", 90, 4900)


def process(key, frames, waits, *, used_seconds=0.0, moves=False, parent=1, **since):
    """Return a process of the dumps: its main thread's stack, and its CPU time from the first dump to the last."""
    return {
        "key": key,
        "frames": frames,
        "waits": waits,
        "used_seconds": used_seconds,
        "moves": moves,
        "parent": parent,
        "since": since,
    }


def add_stacks(
    script, *processes, silent=(), idle_seconds=None, budgets=1.1, helpers_seconds=0.0, helpers_runnable=0
):
    """Add a series of three dumps: after a silence of `budgets` times 30 s, or `idle_seconds` without CPU time."""
    for number in range(3):
        script.event(
            START_SECONDS + 50 + number,
            "stacks",
            AGENT,
            is_last=number == 2,
            helpers_cpu_seconds=helpers_seconds * number / 2,
            helpers_runnable_count=helpers_runnable,
            idle_seconds=idle_seconds,
            silent=[
                {
                    "pid": key[1],
                    "start_ticks": key[2],
                    "silent_seconds": 30.0 * budgets + number - 2,
                    "longest_seconds": 1.0,
                    "budget_seconds": 30.0,
                }
                for key in silent
            ],
            processes=[_at(one, number) for one in processes],
        )
    return script


def _at(one, number):
    frames = [list(frame) for frame in one["frames"]]
    frames[0][2] += number if one["moves"] else 0
    return {
        "pid": one["key"][1],
        "start_ticks": one["key"][2],
        "parent_pid": one["parent"],
        "cpu_seconds": 5.0 + one["used_seconds"] * number / 2,
        **one["since"],
        **_read(one, frames),
    }


def _read(one, frames):
    if waits := one.get("unread"):
        return {"threads": [], "waits": waits, "error": "py-spy is not installed"}
    threads = [{"thread": "MainThread", "waits": one["waits"], "frames": frames}]
    return {"threads": threads, "waits": None, "error": None}


#: A training process that waits for a batch, and a worker that waits for an index.
WAITING = process(MAIN, FOR_A_BATCH, POLL)
IDLE = process(WORKERS[0], FOR_AN_INDEX, POLL)
