"""Dumps of the Flight Recorder: the rank that has not entered a collective, and files that are no dumps."""

import os
import pickle

import pytest
from recorded_dumps import data, fields

from collector.flight_recorder import DumpError, dump_fields, find_standstills, from_event, ranks_words


def dump(way, rank, **changes):
    return from_event({"time_ns": 10**12, **fields(data(way, rank), rank=rank), **changes})


def first(*dumps):
    return find_standstills(dumps)[0]


def test_the_missing_rank_is_named_with_the_collective_and_the_lines():
    found = first(dump("missing", 0), dump("missing", 1))
    assert found.words == (
        "rank 1 has not entered all_reduce number 3 of default_pg, in which rank 0 waits (train.py:20)"
    )
    assert found.missing[1].words == "broadcast number 2 (train.py:24)"
    assert not found.unknown


def test_different_collectives_under_one_number_are_named():
    found = first(dump("mismatch", 0), dump("mismatch", 1))
    assert found.is_mismatch
    each = "all_reduce in rank 0 (train.py:20) and barrier in rank 1 (train.py:35)"
    assert found.words == f"collective number 3 of default_pg is {each}"


def test_a_rank_that_waits_in_another_group_is_not_the_first_to_be_named():
    pair, default = find_standstills([dump("groups", rank) for rank in range(3)])
    assert pair.words == "rank 1 has not entered all_reduce number 2 of pair, in which rank 0 waits (train.py:33)"
    assert default.words == (
        "ranks 0 and 1 have not entered all_reduce number 3 of default_pg, in which rank 2 waits (train.py:20)"
    )


def test_a_rank_without_a_dump_is_unknown_and_never_missing():
    assert find_standstills([dump("missing", 0)]) == []
    alone = fields(data("missing", 0))
    alone["groups"][0]["ranks"] = [0, 1]  # as NCCL records them
    (found,) = find_standstills([from_event({"time_ns": 10**12, **alone})])
    assert (dict(found.missing), found.unknown) == ({}, (1,))
    assert found.words.endswith("no dump tells of rank 1")


def test_a_dump_from_before_the_others_entered_a_collective_tells_nothing_of_it():
    found = first(dump("missing", 0), dump("missing", 1, age_seconds=60.0))
    assert (dict(found.missing), found.unknown) == ({}, (1,))


def test_a_rank_that_has_entered_no_collective_is_missing_only_if_its_dump_is_whole():
    empty = {"time_ns": 10**12, **fields(pickle.dumps({"entries": []}, protocol=2), rank=1)}
    assert list(first(dump("missing", 0), dump("missing", 1)).missing) == [1]
    started = fields(data("missing", 0))
    group = started["groups"][0]
    group["collectives"] = [{**group["collectives"][-1], "number": 1}]
    begun = from_event({"time_ns": 10**12, **started})
    assert list(first(begun, from_event(empty)).missing) == [1]
    assert find_standstills([begun, from_event({**empty, "is_whole": False})]) == []


def test_ranks_that_have_entered_the_same_collectives_have_no_standstill():
    assert find_standstills([dump("missing", 0), dump("missing", 0, of_rank=1)]) == []


def test_ranks_in_words():
    assert [ranks_words(ranks) for ranks in ([1], [3, 1], [4, 0, 2], range(9))] == [
        "rank 1",
        "ranks 1 and 3",
        "ranks 0, 2 and 4",
        "9 ranks (0, 1, 2, 3, …)",
    ]


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_executes_nothing(tmp_path, protocol):
    contents = pickle.dumps({"version": "2.10", "entries": [Hostile(str(tmp_path / "made"))]}, protocol)
    with pytest.raises(DumpError):
        dump_fields(contents, now_ns=0, since_ns=0)
    assert not (tmp_path / "made").exists()
    pickle.loads(contents)
    assert (tmp_path / "made").exists()  # pickle itself would have executed it


def nested():
    value = ["x"]
    for _ in range(80):
        value = [value, value]  # 2**80 values, if they were ever listed
    return value


def endless():
    value = {}
    value["entries"] = [value]
    return value


NO_DUMPS = {
    "an empty file": b"",
    "the first half of a dump": data("missing", 0)[:700],
    "text": b"no pickle",
    "a memo that would fill the memory": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "an array that would fill the memory": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a number": pickle.dumps(3),
    "no entries": pickle.dumps({"version": "2.10"}),
    "entries of another form": pickle.dumps({"entries": [{"seq": 1}, {"seq": 2}]}),
    "an entry that is a number": pickle.dumps({"entries": [1]}),
    "values nested without end": pickle.dumps(endless()),
    "a version of too many values": pickle.dumps({"version": nested(), "entries": []}),
    "a name of too many values": pickle.dumps({"entries": [{"process_group": nested(), "profiling_name": "x:y"}]}),
}


@pytest.mark.parametrize("case", NO_DUMPS)
def test_a_file_that_is_no_dump_is_refused_with_a_reason(case):
    with pytest.raises(DumpError, match=r"^it"):
        dump_fields(NO_DUMPS[case], now_ns=0, since_ns=0)


def test_each_shortened_dump_is_refused():
    whole = data("groups", 0)
    for length in range(len(whole)):
        with pytest.raises(DumpError):
            dump_fields(whole[:length], now_ns=0, since_ns=0)


def test_a_dump_of_a_training_that_began_earlier_is_refused():
    with pytest.raises(DumpError, match="before this one"):
        dump_fields(data("missing", 0), now_ns=1 << 62, since_ns=(1 << 62) - 1)


@pytest.mark.parametrize("damage", [{"groups": 3}, {"groups": [{}]}, {"age_seconds": None}, {"error": "no file"}])
def test_a_damaged_event_holds_no_dump(damage):
    assert from_event({"time_ns": 10**12, **fields(data("missing", 0)), **damage}) is None


def test_an_event_holds_few_collectives_of_a_long_training():
    entries = [
        {
            "record_id": number,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[1000]],
            "state": "completed" if number < 1500 else "scheduled",
            "time_created_ns": number,
        }
        for number in range(1000, 3000)
    ]
    found = dump_fields(pickle.dumps({"entries": entries}, protocol=2), now_ns=10**4, since_ns=0)
    (group,) = found["groups"]
    numbers = [one["number"] for one in group["collectives"]]
    assert numbers == [*range(1492, 1508), 2999]
    assert not found["is_whole"]
