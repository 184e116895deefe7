"""CUDA memory runs out: the finding has the figures of PyTorch's own message."""

from __future__ import annotations

import sys

import pytest

from collector.diagnosis.run.cuda_message import message_figures
from tests.cuda_sim.conftest import evidence

PLACES = ("forward", "backward", "optimizer", "temporaries", "evaluation")
CIRCUMSTANCES = {
    "alone": ((), {}),
    "expandable segments": ((), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "a share of the device": (("--fraction", "0.4"), {}),
    "another process": (("--other", str(600 << 20)), {}),
}
#: Rounding error of the message, which has GiB with two decimals.
ROUNDING_BYTES = 0.006 * 2**30


def same(value: float, said: float) -> bool:
    return value == pytest.approx(said, rel=0.03, abs=ROUNDING_BYTES)


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@pytest.mark.parametrize("place", PLACES)
def test_finding_has_the_figures_of_the_error_message(watched, place, circumstance):
    arguments, environ = CIRCUMSTANCES[circumstance]
    run = watched("errors.py", place, *arguments, **environ)
    (found,) = run.findings("cuda-oom")
    figures, said = evidence(found), message_figures(run.done.stderr)
    assert found["severity"] == "critical"
    assert same(figures["requested_bytes"], said["requested_bytes"])
    assert same(figures["allocated_bytes"], said["allocated_bytes"])
    unallocated = figures["reserved_bytes"] - figures["allocated_bytes"]
    assert same(unallocated, said["unallocated_bytes"])
    assert same(figures["outside_pytorch_bytes"] + figures["reserved_bytes"], said["process_used_bytes"])
    others = 600 << 20 if circumstance == "another process" else 0
    assert figures["other_processes_bytes"] == pytest.approx(others, abs=300 << 20 if others else 0)
    first = found["advice"][0]["text"]
    room = min(said["free_bytes"], figures["limit_bytes"] - figures["reserved_bytes"])
    would_fit = said["unallocated_bytes"] + room >= said["requested_bytes"]
    assert would_fit or "expandable_segments" not in first
    assert ("larger share" in first) == (circumstance == "a share of the device")
    assert run.report["summary"]["peak"]["device_reserved_bytes"] >= figures["reserved_bytes"]


def test_caught_error_has_the_figures_of_its_message(watched):
    run = watched("errors.py", "backward", "--catch")
    (found,) = run.findings("cuda-oom")
    figures, said = evidence(found), message_figures(run.done.stderr.rpartition("CUDA out of memory")[2])
    assert (run.done.returncode, found["severity"]) == (0, "info")
    assert same(figures["allocated_bytes"], said["allocated_bytes"])


def test_retry_in_the_handler_is_advised_against(watched):
    """The first error's traceback holds the tensors of the step that failed."""
    run = watched("errors.py", "forward", "--retry")
    (found,) = run.findings("cuda-oom")
    assert (found["severity"], evidence(found)["errors_count"]) == ("critical", 2)
    assert found["advice"][0]["text"].startswith("Retry after")


def test_error_before_the_first_step_has_the_account_of_its_moment(watched):
    too_large = "import torch; [torch.empty(300 << 20, dtype=torch.uint8, device='cuda') for _ in range(20)]"
    run = watched(sys.executable, "-c", too_large)
    (found,) = run.findings("cuda-oom")
    figures = evidence(found)
    assert figures["other_processes_bytes"] == 0
    assert run.report["summary"]["peak"]["device_reserved_bytes"] == figures["reserved_bytes"] > 1 << 30
    assert "if the model itself does not fit" in found["advice"][-1]["text"]


@pytest.mark.parametrize("is_released", [False, True])
def test_state_that_a_model_has_copied_is_named_if_it_is_still_on_the_device(watched, is_released):
    run = watched(
        sys.executable,
        "-c",
        "import torch\n"
        "model = torch.nn.Linear(8192, 8192, bias=False, device='cuda')\n"
        "state = {name: tensor.clone() for name, tensor in model.state_dict().items()}\n"
        "model.load_state_dict(state)\n"
        f"{'del state' if is_released else ''}\n"
        "pieces = [torch.empty(300 << 20, dtype=torch.uint8, device='cuda') for _ in range(20)]",
    )
    (found,) = run.findings("cuda-oom")
    first, said = found["advice"][0]["text"], message_figures(run.done.stderr)
    assert same(evidence(found)["allocated_bytes"], said["allocated_bytes"])
    assert evidence(found).get("loaded_state_bytes") == (None if is_released else 4 * 8192 * 8192)
    assert first.startswith("Load the checkpoint on the CPU") == (not is_released)
    assert run.failed_hooks == []


def test_figures_come_from_the_message_without_observers(watched):
    run = watched("errors.py", "forward", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    (found,) = run.findings("cuda-oom")
    said = message_figures(run.done.stderr)
    assert evidence(found)["allocated_bytes"] == said["allocated_bytes"]
    assert found["limit"]["value"] == 2 << 30
    assert (found["locus"]["device"], found["since_step"]) == (0, len(run.table("step")))
    assert run.report["summary"]["peak"]["device_allocated_bytes"] >= 0.99 * said["allocated_bytes"]
