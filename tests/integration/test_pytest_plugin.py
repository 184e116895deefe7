"""The plugin for pytest from the wheel, and the example workflow: real trainings in real processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY, bare_environment

LOOP = """
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

kept = []


def train(kept_bytes, steps=250):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps // 50):
        for rows in DataLoader(TensorDataset(torch.ones(400, 8)), batch_size=8):
            optimizer.zero_grad()
            model(rows[0]).sum().backward()
            optimizer.step()
            kept.append(torch.ones(kept_bytes // 4))
            time.sleep(0.02)


if __name__ == "__main__":
    train(0, 800)
"""
MARKED = """
import pytest
from loop import train

@pytest.mark.tidegauge(max_growth="0 B/step", max_gpu_peak="1 GiB")
def test_keeps_tensors():
    train(1 << 19)

@pytest.mark.tidegauge(max_peak="64 GiB", max_gpu_peak="1 GiB")
def test_is_healthy():
    train(0)

@pytest.mark.tidegauge(max_gpu_peak="1 GiB")
def test_shows_nothing():
    train(0, 50)

@pytest.mark.tidegauge(max_peek="1 GiB")
def test_has_a_typo():
    raise AssertionError("nothing is run")

@pytest.mark.tidegauge(max_peak="64 GiB")
def test_fails_by_itself():
    assert kept is None

def test_is_plain():
    pass
"""
UNMARKED = """
import sys

def test_is_plain():
    assert not [name for name in sys.modules if name.startswith("training_harness")]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, unpacked into a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(REPOSITORY, folder / "source", ignore=shutil.ignore_patterns(".*", "tests", "docs"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, source], check=True)
    (packed,) = folder.glob("*.whl")
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def pytest_on(wheel, tmp_path):
    """Runs pytest on a file with the plugin of the wheel."""
    (tmp_path / "loop.py").write_text(LOOP)

    def run(text: str, **environ: str):
        (tmp_path / "test_it.py").write_text(text)
        paths = {"PYTHONPATH": str(wheel), "TIDEGAUGE_HOME": str(tmp_path / "home")}
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:rerunfailures",
                "-W",
                "error",
                ".",
            ],
            cwd=tmp_path,
            env=bare_environment() | paths | environ,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


def test_marked_tests_are_held_to_their_budget(pytest_on, tmp_path):
    done = pytest_on(MARKED)
    output = done.stdout
    assert "3 failed, 2 passed, 1 error" in output, output + done.stderr
    assert "more than the 0 B/step that max_growth allows." in output
    assert "main-heap-leak: The training process" in output
    assert "test_keeps_tensors: max_gpu_peak was not judged: no memory of a GPU was recorded" in output
    assert "test_is_healthy: max_gpu_peak was not judged" in output
    assert "shows no figure of the budget: max_gpu_peak was not judged" in output
    assert "the mark of test_has_a_typo: 'max_peek' is no measure of a budget" in output
    assert "NameError: name 'kept' is not defined" in output
    runs = sorted(path.name for path in (tmp_path / "home" / "runs").iterdir())
    assert len(runs) == 4  # the typo made none


def test_unmarked_tests_load_nothing_of_tidegauge(pytest_on, tmp_path):
    done = pytest_on(UNMARKED)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("TIDEGAUGE_DISABLED", "1", "TIDEGAUGE_DISABLED=1"),
        ("TIDEGAUGE_RUN_DIR", "/none/outer", "this process is part of the run outer already"),
    ],
)
def test_what_cannot_be_observed_alone_is_not_judged(pytest_on, tmp_path, variable, value, reason):
    (tmp_path / "loop.py").write_text("def train(kept_bytes): pass\n")
    done = pytest_on(MARKED.split("@pytest.mark.tidegauge(max_gpu")[0], **{variable: value})
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout
    assert f"test_is_healthy: {reason}" in done.stdout
    assert not (tmp_path / "home").exists()


def test_example_workflow_trains_checks_and_writes_the_summary(tmp_path):
    example = REPOSITORY / "examples" / "ci"
    shutil.copy(example / "budget.toml", tmp_path)
    (tmp_path / "train.py").write_text(LOOP)
    workflow = yaml.safe_load((example / "workflow.yaml").read_text())
    steps = {step["name"]: step["run"] for step in workflow["jobs"]["budget"]["steps"] if "name" in step}
    summary, folder = tmp_path / "summary.md", Path(sys.executable).parent
    ours = bare_environment()
    environ = {
        "TIDEGAUGE_HOME": str(tmp_path / "home"),
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": f"{folder}:{ours['PATH']}",
    }
    for name in ("train", "check"):
        done = subprocess.run(
            ["bash", "-e", "-c", steps[name]],
            cwd=tmp_path,
            env=ours | environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "| Growth | at most 0 B/step | none found" in summary.read_text()
