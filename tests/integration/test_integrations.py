"""The programs of docs/integrations.md, with the real libraries: they run, and what they say is there."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from tests.conftest import REPOSITORY
from training_harness.hooks.patching import Hook
from training_harness.integrations import _short, fail_open

PAGE = (REPOSITORY / "docs" / "integrations.md").read_text()


@pytest.fixture
def run_example(run_attached, tmp_path, monkeypatch):
    """Runs the program of a section, without the shim; a changed one in a warm Python."""

    def run(section, *changes):
        script = tmp_path / "train.py"
        program = re.search(rf"^## {section}\n.*?^```python\n(.*?)^```", PAGE, re.M | re.S)[1]
        for old, new in changes:
            assert old in program
            program = program.replace(old, new)
        script.write_text(program)
        monkeypatch.chdir(tmp_path)
        environ = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        made = run_attached(script, environ=environ, in_new_python=not changes)
        assert made.done.returncode == 0, made.done.stderr
        return made

    return run


#: The request of the collector before a limit is met, in the midst of a training.
AT_RISK = (
    "if not hasattr(self, 'calls'): self.calls = 0\n"
    "        self.calls += 1\n"
    "        if self.calls == 5:\n"
    "            from training_harness import session\n"
    "            from training_harness.hooks.on_request import risk\n"
    "            risk.call(session.active, 5, {'kind': 'host-oom-risk'})\n"
    "        "
)


def events_of(run, kind):
    return [json.loads(body) for body in run.events(kind).body]


def phases(run):
    """The phases with their epoch and step; one that is recorded twice counts once."""
    found = [(event["phase"], event["epoch"], event["step"]) for event in events_of(run, "phase")]
    return [phase for place, phase in enumerate(found) if place == 0 or phase != found[place - 1]]


@pytest.mark.parametrize(("before_oom", "steps"), [("save", 16), ("stop", 5)])
def test_lightning_saves_a_checkpoint_before_memory_runs_out(run_example, tmp_path, before_oom, steps):
    run = run_example(
        "Lightning",
        ("callbacks=[TidegaugeCallback()]", f"callbacks=[TidegaugeCallback(before_oom={before_oom!r})]"),
        (
            "        return self.layer(batch[0]).square().mean()",
            f"        {AT_RISK}return self.layer(batch[0]).square().mean()",
        ),
    )
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["tidegauge-step=5.ckpt"]
    assert len(run.table("step")) == steps


@pytest.mark.parametrize(("before_oom", "last"), [("save", 8), ("stop", 3)])
def test_transformers_saves_a_checkpoint_before_memory_runs_out(run_example, tmp_path, before_oom, last):
    run = run_example(
        "transformers",
        ("callbacks=[TidegaugeCallback()]", f"callbacks=[TidegaugeCallback(before_oom={before_oom!r})]"),
        ("        return {", f"        {AT_RISK}return {{"),
    )
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert len(run.table("step")) == last


def test_lightning_callback_records_phases_and_parameters(run_example):
    run = run_example("Lightning")
    assert len(run.table("step")) == 16
    assert phases(run) == [
        ("validation", 0, 0),  # Lightning's sanity check
        ("train", 0, 0),
        ("validation", 0, 8),
        ("train", 0, 8),
        ("train", 1, 8),
        ("validation", 1, 16),
        ("train", 1, 16),
        ("done", 2, 16),
    ]
    [parameters] = events_of(run, "hyper-parameters")
    assert parameters["framework"] == "lightning"
    assert parameters["values"].items() >= {"lr": 0.1, "max_epochs": 2}.items()


def test_transformers_callback_records_phases_and_parameters(run_example):
    run = run_example("transformers")
    steps = run.table("step")
    assert len(steps) == 8
    # Micro-batches of one optimizer step; the Trainer takes one ahead, so that the first step has more.
    assert steps.batches_count.tolist()[:4] == [3, 2, 2, 1]
    assert phases(run) == [
        ("train", 0, 0),
        ("validation", 1, 4),
        ("train", 1, 4),
        ("validation", 2, 8),
        ("train", 2, 8),
        ("done", 2, 8),
    ]
    [parameters] = events_of(run, "hyper-parameters")
    assert parameters["values"].items() >= {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}.items()
    assert "learning_rate" not in parameters["values"], "a default"


def test_nested_hyper_parameters_are_shortened_to_their_type():
    given = [0.1, True, None, "adam", float("inf"), {"api_key": "hunter2"}, ["hunter2"], Hook("x")]
    assert list(map(_short, given)) == [0.1, True, None, "adam", "inf", "dict", "list", "Hook"]


def test_failing_callback_is_not_called_again():
    class Callback:
        reporter = SimpleNamespace(hook=Hook("framework"))
        calls = 0

        @fail_open
        def on_step(self):
            self.calls += 1
            raise RuntimeError("an attribute that is gone")

    callback = Callback()
    callback.on_step()
    callback.on_step()
    assert callback.calls == 1
