"""Names, tags, notes and pins of runs: each change keeps the others, also of another process."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from collector.errors import TidegaugeError
from collector.store import Edit, annotate
from collector.store.prune import delete_runs
from collector.store.runs.run import Run
from training_harness import layout


@pytest.fixture
def run(tmp_path):
    run = Run(layout.create_run(tmp_path, name="train", argv=["x"], tags={"lr": "0.1", "by": "me"}))
    layout.write_manifest(run.path, {**run.manifest, "end_time_ns": 1})
    return run


def test_a_run_begins_with_the_name_and_the_tags_of_its_manifest(run):
    assert (run.name, dict(run.tags)) == ("train", {"lr": "0.1", "by": "me"})
    annotate(run, Edit(name="baseline", add={"lr": "0.2"}, remove=frozenset({"by"})))
    assert (run.name, dict(run.tags)) == ("baseline", {"lr": "0.2"})
    annotate(run, Edit(name=""))
    assert (run.name, dict(run.tags)) == ("train", {"lr": "0.2"})


def test_two_editors_at_once_lose_nothing(run):
    with ThreadPoolExecutor(4) as pool:
        edits = [Edit(add={f"tag{number}": "x"}) for number in range(20)] + [
            Edit(note="text"),
            Edit(is_pinned=True),
        ]
        list(pool.map(lambda edit: annotate(run, edit), edits))
    assert set(run.tags) == {"lr", "by", *(f"tag{number}" for number in range(20))}
    assert (run.annotation.note, run.annotation.is_pinned) == ("text", True)


@pytest.mark.parametrize("text", ["{", "[1]", '{"name": 3, "tags": [], "note": null, "is_pinned": "yes"}'])
def test_a_damaged_annotation_counts_as_none(run, text):
    (run.path / "annotation.json").write_text(text)
    assert (run.name, dict(run.tags)) == ("train", {"lr": "0.1", "by": "me"})
    assert not run.annotation.is_pinned
    annotate(run, Edit(note="anew"))
    assert run.annotation.note == "anew"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written_is_one_line(run):
    run.path.chmod(0o500)
    with pytest.raises(TidegaugeError, match="make its folder writable"):
        annotate(run, Edit(note="x"))


def test_links_are_not_followed(run, tmp_path):
    (tmp_path / "other").write_text("kept")
    (run.path / "annotation.json").symlink_to(tmp_path / "other")
    annotate(run, Edit(note="x"))
    assert (tmp_path / "other").read_text() == "kept"
    assert run.annotation.note == "x"


def test_pinned_and_running_runs_are_not_deleted(run, tmp_path):
    living = Run(layout.create_run(tmp_path, name="living", argv=["x"]))
    annotate(run, Edit(is_pinned=True))
    assert delete_runs(tmp_path, [run, living]) == {run: "it is pinned", living: "it is about to begin"}
    annotate(run, Edit(is_pinned=False))
    assert delete_runs(tmp_path, [run]) == {}
    assert not run.path.exists()
