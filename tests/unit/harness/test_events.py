"""Events are declared: the kinds, their fields, and the types of these."""

import json
import tarfile
from typing import get_args

import pytest

from tests.recorded_runs import archives
from training_harness.events import EVENTS, IDENTITY, EventKind

TYPES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "object": dict}


def recorded_events(run):
    with tarfile.open(archives()[run]) as files:
        for member in files:
            if "/events/" in member.name and member.isfile():
                yield from map(json.loads, files.extractfile(member).read().splitlines())


def test_every_kind_is_declared_with_its_fields():
    assert set(get_args(EventKind)) == set(EVENTS)


@pytest.mark.parametrize("run", sorted(archives()))
def test_recorded_events_have_the_declared_fields(run):
    events = list(recorded_events(run))
    assert events
    for event in events:
        declared = {field.name: TYPES[field.kind] for field in (*IDENTITY, *EVENTS[event["kind"]].fields)}
        for name, value in event.items():
            assert name in declared, (event["kind"], name)
            assert (
                value is None or type(value) is declared[name] or (declared[name] is float and type(value) is int)
            )
