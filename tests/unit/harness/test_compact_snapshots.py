"""Snapshots of PyTorch's allocator in a compact form."""

import itertools

from tests.recorded_runs import allocator_state
from training_harness.hooks.on_request.snapshots import compact

SNAPSHOT = allocator_state()["snapshot"]
LARGEST_FIRST = sorted(SNAPSHOT["segments"], key=lambda segment: -segment["total_size"])
SIZES = [segment["total_size"] for segment in LARGEST_FIRST]


def stack_of(document, entry):
    """Return the frames of a block, or of an entry of the trace, in a compact document."""
    return [document["frames"][frame] for frame in document["stacks"][entry["stack"]]] if "stack" in entry else []


def frames_of(entry):
    return [(frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]]


def test_compact_snapshot_has_each_stack_once_and_every_block():
    small = compact(SNAPSHOT)
    assert [segment["total_size"] for segment in small["segments"]] == SIZES
    assert small["blocks_left_out_count"] == 0
    for segment, whole in zip(small["segments"], LARGEST_FIRST, strict=True):
        assert [stack_of(small, block) for block in segment["blocks"]] == [*map(frames_of, whole["blocks"])]
    for trace, whole in zip(small["device_traces"], SNAPSHOT["device_traces"], strict=True):
        assert [stack_of(small, entry) for entry in trace] == [*map(frames_of, whole)]
    for once in (small["stacks"], small["frames"]):
        assert len(once) == len(set(once)) > 1
    entries = [*itertools.chain(*(each["blocks"] for each in small["segments"]), *small["device_traces"])]
    assert sum("stack" in entry for entry in entries) > len(small["stacks"]), "several have the same one"


def test_compact_snapshot_keeps_blocks_of_the_largest_segments():
    counts = [len(segment["blocks"]) for segment in LARGEST_FIRST]
    small = compact(SNAPSHOT, max_blocks=counts[0] + 1)
    assert [segment["total_size"] for segment in small["segments"]] == SIZES
    assert [len(segment["blocks"]) for segment in small["segments"]] == [counts[0], 1, *[0] * (len(counts) - 2)]
    assert small["blocks_left_out_count"] == sum(counts) - counts[0] - 1
