"""Events of dumps of the Flight Recorder that two or three ranks wrote with gloo (tests/data/flight_recorder).

After an all_reduce, a broadcast and a send, rank 0 is in an all_reduce of train.py:20; rank 1 sleeps (`missing`) or
is in a barrier (`mismatch`). In `groups`, rank 0 waits for rank 1 in the group `pair`, and rank 2 for both.
"""

import json
from pathlib import Path

from collector.flight_recorder import dump_fields

FOLDER = Path(__file__).parents[2] / "data" / "flight_recorder"


def data(way, rank):
    return (FOLDER / f"{way}_{rank}").read_bytes()


def fields(contents, *, rank=0, waited_seconds=30.0):
    """Return the fields of the event of a dump that was written so long after its last collective was entered."""
    ages = dump_fields(contents, now_ns=0, since_ns=-(1 << 62))
    last = min((one["age_seconds"] for group in ages["groups"] for one in group["collectives"]), default=0.0)
    now_ns = round((waited_seconds - last) * 1e9)
    found = dump_fields(contents, now_ns=now_ns, since_ns=now_ns - (1 << 62))
    return json.loads(
        json.dumps({"path": f"/tmp/trace_{rank}", "of_rank": rank, "age_seconds": 0.0, "error": None, **found})
    )
