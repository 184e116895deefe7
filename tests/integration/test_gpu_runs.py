"""Runs recorded on simulated devices (tests/cuda_sim/record.py), and on a card (benchmarks/card), an H200.

PyTorch's real allocator wrote these journals.
"""

from __future__ import annotations

import pytest

from collector.diagnosis.run.cuda_message import message_figures
from collector.diagnosis.verdict import diagnose
from collector.store.allocator_snapshots import newest_allocator_snapshot
from collector.store.runs.run import Run
from tests.conftest import tidegauge
from tests.recorded_runs import recorded, unpack, unpacked

WARNED = {
    "tensor-leak": {"gpu-tensor-leak", "gpu-oom-risk"},
    "library-growth": {"gpu-non-pytorch-growth", "gpu-oom-risk"},
    "out-of-memory": {"cuda-oom"},
    "share-met": {"cuda-oom"},
    "two-devices": {"gpu-tensor-leak"},
    "uneven-batches": set(),
    "evaluation": set(),
    "late-optimizer": set(),
    "leak-to-the-end": {"cuda-oom", "gpu-tensor-leak"},
    "another-job": {"cuda-oom"},
    "caught-errors": set(),
    "malloc-async": {"cuda-oom"},
    "device-lost": {"gpu-tensor-leak", "cannot-tell"},
    "snapshots": set(),
    "investigated": {"gpu-tensor-leak", "gpu-oom-risk"},
    "card-pinned": {"pinned-cache-growth"},
    "card-forward-error": {"cuda-oom"},
    "card-optimizer-error": {"cuda-oom"},
    "card-two-ranks": {"gpu-tensor-leak"},
    "card-convolutions": set(),  # cuDNN's workspaces, for pictures of nine sizes
    "card-collectives": set(),  # NCCL's communicators
    "card-compiled": set(),  # pools of captured graphs
    "card-library": {"gpu-non-pytorch-growth"},
}
MIB = 1 << 20


@pytest.mark.parametrize("name", WARNED)
def test_verdict_names_the_cause_and_nothing_else(name):
    found = diagnose(recorded(name)).findings
    assert {each.kind for each in found if each.severity != "info"} == WARNED[name]


@pytest.mark.parametrize(
    "name", ["out-of-memory", "share-met", "another-job", "leak-to-the-end", "card-forward-error"]
)
def test_out_of_memory_finding_has_the_figures_of_pytorchs_message(name):
    run = recorded(name)
    [error] = [each for each in diagnose(run).findings if each.kind == "cuda-oom"]
    [event] = run.events_of("cuda-oom")
    said = message_figures(event["message"])
    for figure in ("requested_bytes", "free_bytes", "allocated_bytes"):
        assert error.value_of(figure) == pytest.approx(said[figure], rel=0.01)
    assert newest_allocator_snapshot(Run(unpacked(name))).segments["total_bytes"].sum() == pytest.approx(
        error.value_of("reserved_bytes"), rel=0.01
    )


def test_memory_in_pieces_is_advised_on_where_it_would_have_sufficed():
    """24.7 GiB were requested, 15.6 GiB were free, and 24.6 GiB lay unused in pieces of segments in use.

    The batches grew by 30 % each, which comes first: the next step would have needed more.
    """
    [error] = [each for each in diagnose(recorded("card-forward-error")).findings if each.kind == "cuda-oom"]
    assert error.advice[0].text.startswith("Bound what a step takes")
    assert "expandable_segments" in error.advice[1].text


def test_advice_names_no_leak_that_is_not_reported():
    """The batches grew by 30 % each; no tensor was kept."""
    found = diagnose(recorded("card-optimizer-error")).findings
    [error] = [each for each in found if each.kind == "cuda-oom"]
    assert not any("gpu-tensor-leak" in advice.text for advice in error.advice)


def test_process_share_that_was_met_is_the_limit():
    [error] = [each for each in diagnose(recorded("share-met")).findings if each.kind == "cuda-oom"]
    assert error.limit.value == pytest.approx(0.3 * 2048 * MIB, rel=0.05)


def test_each_of_two_devices_has_its_own_finding():
    leaks = [each for each in diagnose(recorded("two-devices")).findings if each.kind == "gpu-tensor-leak"]
    assert {each.locus.device for each in leaks} == {0, 1}


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("tensor-leak", ["What takes the memory of GPU 0?", "How near is GPU 0 to its limit?"]),
        ("out-of-memory", ["What takes the memory of GPU 0?", "How did the memory of GPU 0 run out?"]),
        ("two-devices", ["What takes the memory of GPU 1?", "How near is GPU 1 to its limit?"]),
    ],
)
def test_html_report_has_the_gpu_sections(tmp_path, name, titles):
    page = tmp_path / "report.html"
    done = tidegauge(tmp_path, "report", unpack(name, tmp_path), "--format", "html", "--output", page)
    assert done.returncode == 0, done.stderr
    html = page.read_text()
    assert [title for title in titles if f"<h3>{title}</h3>" not in html] == []
