"""Stages of real pipelines: recognised without an edit, the same results, off with one option."""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from collector.diagnosis.loading.wait_breakdown import UNKNOWN, cost_per_stage, recent_loops
from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.store.lake.reader import read
from collector.store.runs.run import Run
from tests.conftest import REPOSITORY

SCRIPT = """
import pickle, sys, threading
import cv2, numpy as np, torch
from cv2 import flip
from PIL import Image
from torch.utils.data import DataLoader, Dataset
import training_harness

FOLDER, *METHODS = sys.argv[1:]

class Turn:
    def __call__(self, picture):
        return cv2.rotate(picture, cv2.ROTATE_180)

class Pictures(Dataset):
    def __init__(self):
        from albumentations.core.composition import Compose
        self.transform = Compose([Turn(), flip_it])
        self.reader = cv2.imread

    def __len__(self):
        return 8

    def __getitem__(self, index):
        picture = cv2.resize(self.reader(f"{FOLDER}/{index}.jpg"), (32, 24))
        with training_harness.stage("shake"):
            picture = cv2.cvtColor(flip(picture, 1), cv2.COLOR_BGR2RGB)
        thread = threading.Thread(target=np.load, args=(f"{FOLDER}/mask.npy",))
        thread.start()
        thread.join()
        grey = Image.open(f"{FOLDER}/{index}.jpg").convert("L").crop((0, 0, 32, 24))
        return torch.from_numpy(self.transform(picture)), torch.from_numpy(np.array(grey))

def flip_it(picture):
    return flip(picture, 0)

if __name__ == "__main__":
    total = 0
    for method in METHODS:
        workers = {"inline": 0, "fork": 2, "spawn": 1}[method]
        context = method if workers else None
        loader = DataLoader(Pictures(), batch_size=4, num_workers=workers, multiprocessing_context=context)
        for colours, greys in loader:
            with training_harness.stage("loss"):
                total = (total * 31 + int(colours.sum()) * 7 + int(greys.sum())) % 2**31
        print(method, total)
    named = pickle.dumps([cv2.imread, Image.Image.resize, torch.Tensor.to])
    print("names of ours:", b"training_harness" in named)
"""

STAND_IN = """
class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, picture):
        for transform in self.transforms:
            picture = transform(picture)
        return picture
"""


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Eight photographs in one class, a mask, and a library of transforms with the shape of albumentations."""
    folder = tmp_path / "pictures" / "all"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    for number in range(8):
        cv2.imwrite(str(folder / f"{number}.jpg"), noise.integers(0, 255, (300, 400, 3), np.uint8))
    np.save(folder / "mask.npy", np.zeros(4))
    package = tmp_path / "library" / "albumentations" / "core"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "composition.py").write_text(STAND_IN)
    (tmp_path / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def run(home, under_tidegauge, monkeypatch):
    """Run a command under Tidegauge, which finds the library."""
    monkeypatch.chdir(REPOSITORY)
    return lambda library, *words: under_tidegauge(home, "run", *words, PYTHONPATH=str(library))


def test_pipeline_calls_are_counted_per_batch_in_any_loading_mode(home, tmp_path, pictures, run):
    script, library = [sys.executable, tmp_path / "script.py", pictures], tmp_path / "library"
    done = run(library, "--name", "with", "--", *script, "inline", "fork", "spawn")
    assert done.returncode == 0, done.stderr
    without = run(library, "--name", "without", "--no-stages", "--", *script, "inline", "fork")
    assert without.returncode == 0, without.stderr
    same, names = done.stdout.splitlines()[:2], done.stdout.splitlines()[-1]
    assert same == without.stdout.splitlines()[:2], "the same results"
    assert names == "names of ours: False"

    plain, staged = sorted((home / "runs").iterdir(), key=lambda path: "without" not in path.name)
    with read(Run(plain)) as snapshot:
        assert snapshot.query("SELECT count(*) n FROM stage")["n"][0] == 0
        assert len(snapshot.query('SELECT * FROM "fetch"')) == 4
    with read(Run(staged)) as snapshot:
        counted = snapshot.query(
            "SELECT loader, worker, stage, list(DISTINCT calls_count) calls, list(index ORDER BY index) indices, "
            "min(duration_ns) shortest_ns FROM stage WHERE index IS NOT NULL GROUP BY ALL"
        )
        assert snapshot.query("SELECT * FROM event WHERE kind = 'hook-disabled'").empty
    fetched = counted[counted["worker"].notna()]
    # Four pictures per batch; cv2 and Pillow convert each once. A function in a Compose has no class of its own, so
    # what it calls is recorded by itself; NumPy and Pillow read once each.
    expected = {"read+decode": 4, "resize": 4, "shake": 4, "augment": 8, "convert": 8, "read": 8, "decode": 4,
                "crop": 4, "Turn": 4}  # fmt: skip
    for loader, worker, indices in ((0, -1, [0, 1]), (1, 0, [0]), (1, 1, [1]), (2, 0, [0, 1])):
        rows = fetched[(fetched["loader"] == loader) & (fetched["worker"] == worker)]
        assert {row.stage: list(row.calls) for row in rows.itertuples()} == {k: [n] for k, n in expected.items()}
        assert all(list(row.indices) == indices for row in rows.itertuples())
    assert (counted["shortest_ns"] > 0).all()
    loop = counted[counted["worker"].isna()]
    assert {(row.loader, row.stage, *row.indices) for row in loop.itertuples()} == {
        (loader, "loss", 0, 1) for loader in range(3)
    }


def test_images_job_has_a_stage_table_without_an_edit(home, tmp_path, pictures, run):
    job = (sys.executable, "-m", "training_harness.jobs", "images", "--data", pictures.parent, "--epochs", 2,
           "--batch-size", 4, "--num-workers", 1)  # fmt: skip
    done = run(tmp_path, "--", *job)
    assert done.returncode == 0, done.stderr
    (recorded,) = map(Run, (home / "runs").iterdir())
    with read(recorded) as snapshot:
        (waited,) = snapshot.query("SELECT sum(wait_ns) / 1e9 AS seconds FROM batch")["seconds"]
        (fetched,) = snapshot.query('SELECT sum(getitem_ns + collate_ns) / 1e9 AS seconds FROM "fetch"')["seconds"]
    tables = load_tables(recorded)
    (loop,) = recent_loops(tables)
    table = cost_per_stage(loop).set_index("stage")
    named = ["read", "decode", "resize", "crop", "augment", "normalise", "convert", "collate"]
    assert {*named, "other"} == set(table.index)
    assert table["in_fetch"].all()
    assert table.loc[named, "calls_per_batch"].tolist() == [4, 4, 4, 4, 4, 4, 8, 1]
    assert table["fetch_ratio"].sum() == pytest.approx(1)
    assert table["total_seconds"].sum() == pytest.approx(fetched)
    assert table["batch_ms"].sum() == pytest.approx(fetched * 1e3 / 4)
    assert table.loc["decode", "cpu_ratio"] <= 1
    assert np.isnan(table.loc["other", "cpu_ratio"])
    (stall,) = diagnose(tables).summary["exposed_stall"]
    seconds = {each["stage"]: each["seconds"] for each in stall["stages"]}
    assert stall["wait_seconds"] == pytest.approx(waited)
    assert sum(seconds.values()) - seconds.get(UNKNOWN, 0) == pytest.approx(waited, rel=0.03)
    assert seconds["decode"] + seconds["resize"] > 0
