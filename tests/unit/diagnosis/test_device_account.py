"""The parts of a device's memory add up to what is used, however many of them are known."""

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from collector.diagnosis.run.device_account import DEVICE_PARTS, accounts
from tests.recorded_runs import recorded

GIB = 2**30
#: Bytes of a process's context on a simulated device.
CONTEXT = 256 << 20
RUN = recorded("uneven-batches")


def plain(row, *names):
    return {name: int(row[name]) for name in names}


#: The last record of a training, and the driver's sample then of its GPU, which another job uses too.
RANK = plain(RUN.streams["device_memory"].iloc[-1], "allocated_bytes", "reserved_bytes", "inactive_split_bytes")
SAMPLE = RUN.streams["device"].dropna(subset="process_used_bytes").iloc[-1]
DEVICE = plain(SAMPLE, "used_bytes", "process_used_bytes", "other_used_bytes")
#: The same sample for two such ranks.
DEVICE_OF_TWO = {
    "used_bytes": DEVICE["used_bytes"] + DEVICE["process_used_bytes"],
    "process_used_bytes": 2 * DEVICE["process_used_bytes"],
    "other_used_bytes": DEVICE["other_used_bytes"],
}
DRIVER_RESERVED = int(SAMPLE["reserved_bytes"])


def account(device, ranks):
    """Return the known parts of a device at one moment."""
    moment = {"gpu": 0, "bucket": 0, "elapsed_seconds": 0.5}
    driver = pd.DataFrame([{**moment, **dict.fromkeys(DEVICE), **device}]).astype(float)
    allocators = pd.DataFrame(
        [{**moment, **dict.fromkeys(RANK), **rank} for rank in ranks], columns=[*moment, *RANK]
    )
    parts = accounts(driver, allocators.astype(float))[[*DEVICE_PARTS, "unattributed"]]
    return parts.iloc[0].dropna().to_dict()


def test_account_names_every_part():
    unused = RANK["reserved_bytes"] - RANK["allocated_bytes"] - RANK["inactive_split_bytes"]
    assert min(RANK["allocated_bytes"], unused, RANK["inactive_split_bytes"], CONTEXT, DRIVER_RESERVED) > 0
    assert account(DEVICE_OF_TWO, [RANK, RANK]) == {
        "allocated": 2 * RANK["allocated_bytes"],
        "cached": 2 * unused,
        "fragmentation": 2 * RANK["inactive_split_bytes"],
        "non-PyTorch": 2 * CONTEXT,
        "other processes": DEVICE["other_used_bytes"],
        "unattributed": DRIVER_RESERVED,
    }


def test_hidden_process_memory_is_unattributed():
    found = account({"used_bytes": DEVICE["used_bytes"]}, [RANK])

    assert found["unattributed"] == DEVICE["used_bytes"] - RANK["reserved_bytes"]
    assert set(DEVICE_PARTS) - set(found) == {"non-PyTorch", "other processes"}


def test_no_sum_is_made_if_a_rank_is_unknown():
    assert "allocated" not in account(DEVICE, [RANK, {}])
    others = DEVICE["other_used_bytes"]
    assert account(DEVICE, []) == {"other processes": others, "unattributed": DEVICE["used_bytes"] - others}


part = st.integers(0, 80 * GIB)


@given(
    ranks=st.lists(st.tuples(part, part, part), min_size=1, max_size=3),
    outside=part,
    others=part,
    rest=part,
    hidden=st.sets(st.sampled_from(["process_used_bytes", "other_used_bytes"])),
)
def test_parts_and_unattributed_add_up_to_used(ranks, outside, others, rest, hidden):
    records = [
        dict(zip(RANK, (tensors, tensors + cached + holes, holes), strict=True)) for tensors, cached, holes in ranks
    ]
    run = sum(map(sum, ranks)) + outside
    device = {"used_bytes": run + others + rest, "process_used_bytes": run, "other_used_bytes": others}
    found = account({name: value for name, value in device.items() if name not in hidden}, records)

    assert sum(found.values()) == pytest.approx(device["used_bytes"])
    assert [found["allocated"], found["cached"], found["fragmentation"]] == [
        sum(column) for column in zip(*ranks, strict=True)
    ]
    assert found.get("non-PyTorch", outside) == outside
    assert len(found) == len(DEVICE_PARTS) + 1 - len(hidden)


def test_account_of_a_device_sums_all_its_processes():
    """One rank has the first record of a run and then the last one, the other the last one both times."""
    rows = RUN.streams["device_memory"]
    first, second = plain(rows.iloc[0], *RANK), RANK
    assert first["reserved_bytes"] < second["reserved_bytes"]
    driver = pd.DataFrame({"gpu": 0, "bucket": [0, 1], "elapsed_seconds": [0.5, 1.0], **DEVICE_OF_TWO})
    ranks = pd.DataFrame(
        [
            {"gpu": 0, "bucket": bucket, "pid": pid, "elapsed_seconds": 0.5 + 0.5 * bucket, **record}
            for bucket, records in enumerate(((first, second), (second, second)))
            for pid, record in enumerate(records)
        ]
    )
    parts = accounts(driver, ranks).set_index(["gpu", "elapsed_seconds"])
    both = {name: [first[name] + second[name], 2 * second[name]] for name in RANK}
    assert parts["allocated"].tolist() == both["allocated_bytes"]
    cached_and_holes = (parts["cached"] + parts["fragmentation"]).tolist()
    assert cached_and_holes == [r - a for r, a in zip(both["reserved_bytes"], both["allocated_bytes"], strict=True)]
    own = DEVICE_OF_TWO["process_used_bytes"]
    assert parts["non-PyTorch"].tolist() == [own - reserved for reserved in both["reserved_bytes"]]
    assert parts.sum(axis=1).tolist() == [DEVICE_OF_TWO["used_bytes"]] * 2
    blind = accounts(driver[:0], ranks)
    assert blind["other processes"].isna().all()
    assert blind["allocated"].tolist() == both["allocated_bytes"]
