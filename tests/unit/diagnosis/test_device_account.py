"""The parts of a device's memory add up to what is used, whatever is known of them."""

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from collector.diagnosis.run.device_account import DEVICE_PARTS, account, accounts
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
#: The same if two ranks had it.
DEVICE_OF_TWO = {
    "used_bytes": DEVICE["used_bytes"] + DEVICE["process_used_bytes"],
    "process_used_bytes": 2 * DEVICE["process_used_bytes"],
    "other_used_bytes": DEVICE["other_used_bytes"],
}
OF_DRIVER = int(SAMPLE["reserved_bytes"])


def test_every_part_is_named():
    found = account(DEVICE_OF_TWO, [RANK, RANK])

    unused = RANK["reserved_bytes"] - RANK["allocated_bytes"] - RANK["inactive_split_bytes"]
    assert found.parts == {
        "allocated": 2 * RANK["allocated_bytes"],
        "cached": 2 * unused,
        "fragmentation": 2 * RANK["inactive_split_bytes"],
        "non-PyTorch": 2 * CONTEXT,
        "other processes": DEVICE["other_used_bytes"],
    }
    assert min(found.parts.values()) > 0
    assert found.residual_bytes == OF_DRIVER
    assert found.residual_holds == ("unattributed",)


def test_in_a_container_the_residual_holds_what_the_driver_hides():
    found = account({"used_bytes": DEVICE["used_bytes"]}, [RANK])

    assert found.residual_bytes == DEVICE["used_bytes"] - RANK["reserved_bytes"]
    assert found.residual_holds == ("non-PyTorch", "other processes", "unattributed")


def test_a_rank_that_is_not_known_makes_no_sum_of_the_others():
    assert "allocated" in account(DEVICE, [RANK, {}]).residual_holds
    assert account(DEVICE, []).parts == {"other processes": DEVICE["other_used_bytes"]}


def test_without_the_drivers_figure_there_is_no_account():
    assert account({"used_bytes": None}, [RANK]) is None


known = st.none() | st.integers(0, 80 * GIB)


@given(
    device=st.fixed_dictionaries({"used_bytes": st.integers(0, 80 * GIB)} | dict.fromkeys(list(DEVICE)[1:], known)),
    ranks=st.lists(st.fixed_dictionaries(dict.fromkeys(RANK, known)), max_size=3),
)
def test_the_parts_and_the_residual_are_what_is_used(device, ranks):
    found = account(device, ranks)

    assert sum(found.parts.values()) + found.residual_bytes == pytest.approx(device["used_bytes"])
    assert {*found.parts, *found.residual_holds} == {*DEVICE_PARTS, "unattributed"}


def test_the_account_of_a_device_is_of_all_its_processes():
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
