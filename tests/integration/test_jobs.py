"""The built-in jobs and the example, as ordinary programs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pytest
import torch

from collector.findings import KINDS
from tests.conftest import run_bare, wait_for
from training_harness.jobs import photographs
from training_harness.jobs.__main__ import main
from training_harness.jobs.accumulate import Choice, agreement
from training_harness.jobs.diabetes import Timing, explain
from training_harness.jobs.faults import FAULTS
from training_harness.jobs.faults.job import Job

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "cache"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )


class JobResult(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def job(capfd) -> Callable[..., JobResult]:
    """Runs a job in this process, which has torch already."""

    def run_job(*arguments: object) -> JobResult:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
        return JobResult(status, *capfd.readouterr())

    return run_job


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory) -> Path:
    """Two classes of eight small photographs."""
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("discs", "rings"):
        (folder / name).mkdir()
        for number in range(8):
            small = cv2.resize(photographs.compose(name, number), (320, 240))
            cv2.imwrite(str(folder / name / f"{number}.jpg"), small)
    return folder


@pytest.fixture
def pictures(picture_folder, tmp_path) -> Path:
    """A copy of the pictures."""
    return shutil.copytree(picture_folder, tmp_path / "pictures")


def test_photographs_are_large_varied_and_reproducible():
    first, again = photographs.compose("dunes", 3), photographs.compose("dunes", 3)
    other = photographs.compose("dunes", 4)
    assert first.shape == (1080, 1920, 3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    sizes_bytes = [
        len(cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 90])[1]) for picture in (first, other)
    ]
    assert all(250_000 < size < 650_000 for size in sizes_bytes)


def test_interrupted_making_of_photographs_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(photographs, "PER_CLASS", 1)
    folder = tmp_path / "photographs"
    photographs.ensure_photographs(folder)
    made = sorted(folder.glob("*/*.jpg"))
    assert len(made) == len(photographs.CLASSES)
    kept_mtime_ns = made[1].stat().st_mtime_ns
    made[0].rename(made[0].with_suffix(".part"))
    capsys.readouterr()
    photographs.ensure_photographs(folder)
    assert sorted(folder.glob("*/*.jpg")) == made
    assert "making 1 photographs" in capsys.readouterr().out
    assert made[1].stat().st_mtime_ns == kept_mtime_ns
    assert not list(folder.glob("*/*.part"))
    photographs.ensure_photographs(folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("loader", [["--num-workers", 0], ["--num-workers", 1, "--start-method", "spawn"]])
def test_images_job_trains_on_a_folder_of_classes(pictures, loader, job):
    options = ["--data", pictures, "--epochs", 2, "--batch-size", 4, "--limit", 8, "--log-every", 1]
    done = job("images", *options, *loader)
    assert done.returncode == 0, done.stderr
    assert "8 photographs in 2 classes" in done.stdout
    assert len(re.findall(r"loss \d+\.\d+  \d+ img/s", done.stdout)) == 4
    assert "done: 4 steps" in done.stdout


def test_diabetes_job_lowers_its_loss(job):
    done = job("diabetes", "--epochs", 20)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.03


def test_sweep_measures_and_explains_each_number_of_workers(job):
    done = job("diabetes", "--sweep", "0-1")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d)  +([\d.]+)  +([\d.]+)  +(\d+)$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    assert re.search(r"making a batch takes \d+ us .* from a worker takes \d+ us", done.stdout)
    assert "UserWarning" not in done.stderr


def test_sweep_claims_only_measured_settings():
    slow, fast = (
        Timing(num_workers=number, pass_seconds=took, first_batch_seconds=0.01)
        for number, took in ((0, 2.0), (2, 1.0))
    )
    said = explain([slow, fast], 24, 0.08, 0.001)
    assert "fastest: 2 workers, 1000.0 ms a pass" in said
    assert "0 workers is right" not in said


def test_killed_worker_ends_the_training_with_torchs_error():
    done = run_bare("-P", "-m", "training_harness.jobs", "fault", "worker-killed", "--at-batch", 5)
    assert done.returncode == 1
    # The last error depends on torch's timing: its signal handler, its check of workers, or a broken connection.
    assert re.search(r"is killed by signal: Killed|exited unexpectedly|Connection\w+Error|EOFError", done.stderr)


def test_crash_job_raises_an_exception_in_training(job):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        job("fault", "crash", "--at-batch", 3, "--num-workers", 0)


def test_shm_bus_error_job_kills_its_worker_with_a_bus_error(job):
    with pytest.raises(RuntimeError, match=r"killed by signal: Bus error|exited unexpectedly"):
        job("fault", "shm-bus-error", "--at-batch", 1)


def test_fault_list_names_every_fault_and_its_finding(job):
    listed = {line.split()[0]: line.split()[1] for line in job("fault", "--list").stdout.splitlines()}
    assert listed == {kind: fault.finding for kind, fault in FAULTS.items()}
    assert set(listed.values()) <= set(KINDS)


@pytest.fixture
def segments(monkeypatch) -> Callable[[], int]:
    """Counts the segments of shared memory that are made from now on, apart from those of other processes."""
    prefix = f"t{os.getpid()}_"
    monkeypatch.setattr(shared_memory, "_SHM_NAME_PREFIX", f"/{prefix}")

    def found() -> set[Path]:
        return set(Path("/dev/shm").glob(f"{prefix}*"))

    before = found()
    return lambda: len(found() - before)


@pytest.mark.parametrize("kind", [kind for kind, fault in FAULTS.items() if fault.ranks_count == 1])
def test_fault_job_and_its_fixed_twin_leave_nothing_behind(kind, job, segments):
    allowed = len(os.listdir("/proc/self/fd")) + 2
    for twin in ([], ["--fixed"]):
        done = job("fault", kind, "--steps", 3, *twin)
        if FAULTS[kind].needs_gpu and not torch.cuda.is_available():
            assert done.returncode == 2
            assert f"{kind} needs a GPU" in done.stderr
            continue
        assert done.returncode == 0, done.stderr
        assert "done: 3 steps" in done.stdout
        assert done.stderr == ""

    def descriptors_are_closed() -> bool:
        gc.collect()  # the job itself is a cycle
        multiprocessing.active_children()  # a worker that ended after torch gave up waiting for it
        return len(os.listdir("/proc/self/fd")) <= allowed

    wait_for(descriptors_are_closed, "the descriptors of before")
    assert segments() == 0


@pytest.mark.parametrize(
    ("kind", "count", "more"),
    [
        ("main-leak", lambda kept: sum(piece is not None for piece in kept), 4),
        ("loss-list", lambda kept: sum(torch.is_tensor(loss) and loss.grad_fn is not None for loss in kept), 4),
        ("activation-hook", lambda kept: sum(torch.is_tensor(output) for output in kept), 2),
        ("shm-leak", None, 4),
        ("fd-leak", lambda _kept: len(os.listdir("/proc/self/fd")), 8),
    ],
)
def test_leak_jobs_leak_up_to_their_limit(kind, count, more, job, segments, monkeypatch):
    """Eight steps that take 256 or 512 KiB, or a descriptor, with 1 MiB allowed."""
    counted = []

    def run_and_count(self, run=Job.run):
        spoiled = self.after_step

        def after_step(loss, batch):
            spoiled(loss, batch)
            if self.step == 8:
                counted.append(count(self.objects) if count else segments())

        self.after_step = after_step
        return run(self)

    monkeypatch.setattr(Job, "run", run_and_count)
    for twin in ([], ["--fixed"]):
        assert job("fault", kind, "--steps", 8, "--limit-mb", 1, "--num-workers", 0, *twin).returncode == 0
    assert counted[0] - counted[1] == more


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "unknown job none; choose one of images, diabetes, accumulate, dataparallel, ddp, fault"),
        (["nope"], "unknown job 'nope'; choose one of images, diabetes, accumulate, dataparallel, ddp, fault"),
        (["images", "--data", "/no/such"], "no folder /no/such"),
        (["images", "--epochs", "0"], "argument --epochs: 0 is below 1"),
        (["images", "--num-workers", "0", "--prefetch-factor", "2"], "--prefetch-factor has no effect"),
        (["diabetes", "--sweep", "8-0"], "'8-0' is not a range like 0-8"),
        (["diabetes", "--sweep", "0-999"], "from 0 up to 64"),
        (["diabetes", "--data", "/no/such.csv"], "cannot read /no/such.csv"),
        (["fault"], "give a KIND, or --list"),
        (["fault", "nope"], "unknown fault 'nope'; --list shows them"),
        (["fault", "crash", "--steps", "0"], "argument --steps: 0 is below 1"),
        (["accumulate", "--micro-batch", "24"], "--micro-batch 24 does not divide --effective-batch 256"),
        (["ddp", "--nproc", "99", "--backend", "nccl"], "--backend nccl needs a GPU for each of 99 ranks"),
        (["ddp", "--nproc", "0"], "argument --nproc: 0 is below 1"),
    ],
)
def test_bad_input_is_a_one_line_error_with_exit_status_2(pictures, arguments, said, job):
    if "--prefetch-factor" in arguments:
        arguments = [*arguments, "--data", pictures]
    done = job(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1,2,3,4,5,6,7,8", "line 3: 8 values where 8 features and a label are needed"),
        ("1,2,3,4,x,6,7,8,1", "line 3: 'x' is not a finite number"),
        ("1,2,3,4,nan,6,7,8,1", "line 3: 'nan' is not a finite number"),
        ("1,2,3,4,5,6,7,8,2", "line 3: the label is '2', it must be 0 or 1"),
    ],
)
def test_bad_row_is_reported_with_its_line_number(tmp_path, line, said, job):
    table = tmp_path / "table.csv"
    table.write_text(f"a,b,c,d,e,f,g,h,label\n1,2,3,4,5,6,7,8,0\n{line}\n")
    done = job("diabetes", "--data", table)
    assert done.returncode == 2
    assert done.stderr == f"tidegauge job diabetes: {table} {said}\n"


def test_invalid_image_is_named_even_from_a_worker(pictures, job):
    for path in (pictures / "discs").glob("*.jpg"):
        path.write_bytes(b"not an image")
    done = job("images", "--data", pictures, "--num-workers", 1)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"tidegauge job images: {pictures}/discs/")
    assert "is not an image that OpenCV can read" in last


def test_a_folder_without_classes_is_refused(tmp_path, job):
    (tmp_path / "1.jpg").write_bytes(b"")
    done = job("images", "--data", tmp_path)
    assert done.returncode == 2
    assert "it needs one subfolder per class" in done.stderr


def test_micro_batches_learn_the_same_and_show_their_memory(job):
    options = ["--effective-batch", 16, "--steps", 3, "--length", 8, "--depth", 1, "--num-workers", 0]
    done = job("accumulate", *options, "--micro-batch", 16, 4)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[0].isdigit()]
    assert [row[:2] for row in rows] == [["16", "1"], ["4", "4"]]
    assert all(float(row[3]) >= float(row[4]) > 50 for row in rows)  # MiB: peak, and before training
    assert rows[0][-2] == rows[1][-2]
    assert re.search(r"losses differ by at most \S+ over 3 steps .*: the same training", done.stdout)


def test_trainings_with_other_losses_are_not_called_the_same():
    one, other = (
        Choice(batch, 16 // batch, 0.1, {}, losses) for batch, losses in ((16, [7.0, 6.0]), (4, [7.0, 6.1]))
    )
    assert "losses differ by at most 1.0e-01" in agreement([one, other])
    assert "NOT the same training" in agreement([one, other])


def test_dataparallel_job_runs_on_the_cpu_without_a_gpu(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = job("dataparallel", "--batch-size", 4, "--steps", 5, "--length", 8, "--num-workers", 0)
    assert done.returncode == 0, done.stderr
    assert "no GPU is visible: nn.DataParallel runs on one device, the CPU" in done.stdout
    assert re.search(r"step 5  loss \d", done.stdout)
    assert "done: 5 steps" in done.stdout


def test_ddp_job_starts_its_ranks(home, run_attached):
    options = ("--nproc", "2", "--backend", "gloo", "--steps", "5", "--length", "8", "--batch-size", "4")
    run = run_attached("-P", "-m", "training_harness.jobs", "ddp", *options, "--num-workers", "0")
    assert run.done.returncode == 0, run.done.stderr
    assert "done: 5 steps in each of 2 ranks, gloo" in run.done.stdout
    assert run.table("step").groupby("rank")["step"].nunique().to_dict() == {0: 5, 1: 5}


def test_example_losses_do_not_depend_on_the_number_of_workers():
    options = (ROOT / "examples" / "plain_train.py", "--steps", 12, "--print-losses")
    runs = [run_bare(*options, "--num-workers", number) for number in (0, 2)]
    assert [done.returncode for done in runs] == [0, 0], runs[1].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.splitlines()) == 12


@pytest.mark.flaky(reruns=5)  # PyTorch aborts in the exit of some gloo ranks, after the group was destroyed
def test_example_trains_on_two_ranks():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*torchrun, "examples/plain_train.py", "--steps", 100, "--num-workers", 0)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"100 \d\.\d{4}\n", done.stdout)
