"""Values that NVML does not report are missing in the records and named in the report; they are never zero."""

from __future__ import annotations

import pytest

from collector.store.lake.reader import read
from collector.store.queries.gpu_memory import devices
from tests.cuda_sim.conftest import evidence

OFTEN = ("--interval", "0.2")
LEAK = ("growth.py", "tensors", "--bytes", str(1 << 20), "--steps", "200", "--seconds", "0.02")


def test_leak_is_judged_by_pytorchs_statistics_without_nvml(watched):
    run = watched(*LEAK, options=OFTEN, memory="700M", CUDA_SIM_NO_NVML="1")
    assert run.done.returncode == 0, run.done.stderr
    assert run.table("device").empty
    (risk,) = run.findings("gpu-oom-risk")
    assert "counting PyTorch alone because NVML reports nothing" in risk["summary"]
    assert risk["limit"]["value"] == 700 << 20
    assert "device_used_rise_bytes" not in evidence(risk)
    assert run.findings("gpu-tensor-leak")


def test_error_whose_message_pytorch_cannot_compose_is_out_of_memory(watched):
    """Without NVML the allocator fails while it writes its message."""
    run = watched("errors.py", "backward", CUDA_SIM_NO_NVML="1")
    assert "NVML_SUCCESS" in run.done.stderr
    (error,) = run.findings("cuda-oom")
    assert (error["severity"], error["locus"]["device"]) == ("critical", 0)
    assert "crashed" not in run.warned


def test_no_process_is_blamed_if_nvml_names_none(watched):
    run = watched("errors.py", "forward", options=OFTEN, CUDA_SIM_NO_PROCESSES="1")
    samples = run.table("device")
    assert samples["used_bytes"].max() > 0
    assert samples[["process_used_bytes", "other_used_bytes"]].isna().all(axis=None)
    (error,) = run.findings("cuda-oom")
    assert evidence(error)["unattributed_bytes"] > 0
    assert evidence(error).keys().isdisjoint({"outside_pytorch_bytes", "other_processes_bytes"})


@pytest.fixture
def lost_gpu_run(watched, tmp_path):
    """A finished run whose GPU fell off the bus in its middle."""
    marker, said = tmp_path / "lost", tmp_path / "said"
    said.mkdir()
    arguments = (str(said), "--use", "0", "--lose", str(marker))
    run = watched("devices.py", *arguments, options=OFTEN, CUDA_SIM_NVML_LOST=str(marker))
    assert run.done.returncode == 0, run.done.stderr
    return run


def test_samples_of_a_lost_gpu_are_missing_from_then_on(lost_gpu_run):
    samples = lost_gpu_run.table("device")
    gauges = ["used_bytes", "total_bytes", "process_used_bytes", "utilisation_ratio", "temperature_celsius"]
    known = samples[gauges].notna()
    assert known.iloc[0][["used_bytes", "total_bytes"]].all()
    assert not known.iloc[-1].any()
    assert known["used_bytes"].is_monotonic_decreasing, "once lost, it stays so"
    assert len(lost_gpu_run.table("device_memory")) == len(lost_gpu_run.table("step")), "PyTorch goes on telling"
    assert lost_gpu_run.report["run"]["status"] == "finished"


def test_report_has_a_finding_for_a_lost_gpu(lost_gpu_run):
    assert any("NVML" in each["summary"] for each in lost_gpu_run.report["findings"])
    with read(lost_gpu_run.run) as session:
        assert devices(session)["used_bytes"].isna().all()


def test_mig_instance_is_a_device(watched, tmp_path):
    part = "MIG-00000002-0000-0000-0000-000000000000"
    environ = {"CUDA_SIM_MIG": "1", "CUDA_VISIBLE_DEVICES": part}
    run = watched("devices.py", str(tmp_path), "--use", "0", options=OFTEN, memory="1G,2G", count=2, **environ)
    assert run.done.returncode == 0, run.done.stderr
    samples = run.table("device")
    assert set(samples["total_bytes"]) == {2 << 30}
    fullest = samples.loc[samples["process_used_bytes"].idxmax()]
    assert fullest["process_used_bytes"] == fullest["used_bytes"] - fullest["reserved_bytes"]
    assert fullest["process_used_bytes"] > run.table("device_memory")["reserved_bytes"].max()
