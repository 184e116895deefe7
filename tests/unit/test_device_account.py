"""The parts of a device's memory add up to what is used, whatever is known of them."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.diagnosis.device_account import PARTS, account, accounts

GIB = 2**30
RANK = {"allocated_bytes": 10 * GIB, "reserved_bytes": 14 * GIB, "inactive_split_bytes": GIB}
DEVICE = {"used_bytes": 40 * GIB, "process_used_bytes": 30 * GIB, "other_used_bytes": 9 * GIB}


def test_every_part_is_named():
    found = account(DEVICE, [RANK, RANK])

    assert {name: value / GIB for name, value in found.parts.items()} == {
        "allocated": 20,
        "cached": 6,
        "fragmentation": 2,
        "non-PyTorch": 2,
        "other processes": 9,
    }
    assert found.residual_bytes == GIB
    assert found.residual_holds == ("unattributed",)


def test_in_a_container_the_residual_holds_what_the_driver_hides():
    found = account({"used_bytes": 40 * GIB}, [RANK])

    assert found.residual_bytes == 26 * GIB
    assert found.residual_holds == ("non-PyTorch", "other processes", "unattributed")


def test_a_rank_that_is_not_known_makes_no_sum_of_the_others():
    assert "allocated" in account(DEVICE, [RANK, {}]).residual_holds
    assert account(DEVICE, []).parts == {"other processes": 9 * GIB}


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
    assert {*found.parts, *found.residual_holds} == {*PARTS, "unattributed"}


def test_the_account_of_a_device_is_of_all_its_processes():
    driver = pd.DataFrame(
        {
            "gpu": 0,
            "bucket": [0, 1],
            "elapsed_seconds": [0.5, 1.0],
            "used_bytes": 10.0 * GIB,
            "process_used_bytes": 8.0 * GIB,
            "other_used_bytes": 1.0 * GIB,
        }
    )
    ranks = pd.DataFrame(
        {
            "gpu": 0,
            "bucket": [0, 0, 1, 1],
            "pid": [1, 2, 1, 2],
            "elapsed_seconds": [0.5, 0.5, 1.0, 1.0],
            "allocated_bytes": [1.0 * GIB, 2.0 * GIB, 3.0 * GIB, 2.0 * GIB],
            "reserved_bytes": [3.0 * GIB, 3.0 * GIB, 4.0 * GIB, 3.0 * GIB],
            "inactive_split_bytes": 0.0,
        }
    )
    parts = accounts(driver, ranks).set_index(["gpu", "elapsed_seconds"]) / GIB
    assert parts["allocated"].tolist() == [3.0, 5.0]
    assert parts["cached"].tolist() == [3.0, 2.0]
    assert parts["non-PyTorch"].tolist() == [2.0, 1.0]
    assert parts.sum(axis=1).tolist() == [10.0, 10.0]
    blind = accounts(driver[:0], ranks)
    assert blind["other processes"].isna().all()
    assert blind["allocated"].tolist() == [3.0 * GIB, 5.0 * GIB]
