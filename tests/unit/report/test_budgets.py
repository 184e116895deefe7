"""Budgets: their values, the judgement of recorded runs, and `tidegauge check`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from collector.budget import figures
from collector.budget.figures import ExaminedRun, figures_of
from collector.budget.judgement import judge_budget
from collector.diagnosis import diagnose, load_tables
from collector.diagnosis.statistics.rates import rate_ratio
from collector.store import find_run
from tests.conftest import REPOSITORY, tidegauge
from tests.recorded_runs import unpack
from training_harness.budget import MEASURES, Budget


def examined(home: Path, name: str) -> ExaminedRun:
    tables = load_tables(find_run(home, name))
    return ExaminedRun(run_id=name, tables=tables, verdict=diagnose(tables))


def check(home: Path, run: str, budget: str, *options: str):
    path = home / "budget.toml"
    path.write_text(budget)
    return tidegauge(home, "check", run, "--budget", path, *options)


def test_one_table_is_that_of_the_figures_and_of_the_docs():
    assert list(figures.FIGURES) == list(MEASURES)
    text = (REPOSITORY / "docs" / "ci.md").read_text()
    for measure in MEASURES.values():
        assert f'| `{measure.name}` | `"{measure.example}"` | {measure.meaning} |' in text
        measure.parse(measure.example)


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("max_peak", "2 GiB", 2 * 1024**3),
        ("max_peak", "20GB", 20 * 1000**3),
        ("max_growth", "0 B/step", 0),
        ("max_growth", "1.5 KiB / step", 1536),
        ("max_data_wait", "10 %", 0.1),
        ("max_data_wait", "7.5%", 0.075),
    ],
)
def test_values_have_units(name, text, limit):
    assert Budget.of({name: text}).limits == {name: limit}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_peak": 3}, 'max_peak is 3; give it in bytes, as in "2 GiB"'),
        ({"max_peak": "3"}, "give it in bytes"),
        ({"max_peak": "9" * 400 + " GiB"}, "give it in bytes"),
        ({"max_data_wait": "9" * 400 + " %"}, "give it in percent"),
        ({"max_peak": "3 B/step"}, "give it in bytes"),
        ({"max_growth": "3 MiB/s"}, 'give it in bytes per step, as in "0 B/step"'),
        ({"max_growth": "-3 B/step"}, 'as in "0 B/step"'),
        ({"max_data_wait": "0.1"}, 'give it in percent, as in "10 %"'),
        ({"max_peek": "3 GiB"}, "'max_peek' is no measure of a budget; give some of max_peak"),
        ({}, "the budget is empty"),
        ({"min_throughput": "95 %"}, 'name it: baseline = "RUN"'),
        ({"min_throughput": "95 %", "baseline": 3}, "give a run as text"),
    ],
)
def test_bad_budgets_are_refused_with_value_and_remedy(values, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Budget.of(values)


def test_a_leak_is_beyond_a_budget_without_growth(tmp_path):
    unpack("main-leak", tmp_path)
    done = check(tmp_path, "main-leak", 'max_growth = "0 B/step"\nmax_gpu_peak = "1 GiB"\n')
    assert done.returncode == 1
    assert "more than the 0 B/step that max_growth allows." in done.stdout
    assert "main-heap-leak: The training process" in done.stdout
    assert "max_gpu_peak was not judged: no memory of a GPU was recorded" in done.stdout
    body = json.loads(check(tmp_path, "main-leak", 'max_growth = "0 B/step"', "--format", "json").stdout)
    (growth,) = body["measures"]
    assert (body["status"], growth["status"], growth["finding"]["kind"]) == ("beyond", "beyond", "main-heap-leak")
    assert 0 < growth["low"] <= growth["value"] <= growth["high"]
    assert check(tmp_path, "main-leak", 'max_growth = "1 MiB/step"').returncode == 0


def test_a_device_leak_counts_and_a_healthy_run_says_what_would_show(tmp_path):
    unpack("tensor-leak", tmp_path)
    done = check(tmp_path, "tensor-leak", 'max_growth = "0 B/step"')
    assert (done.returncode, "gpu-tensor-leak: Live tensors on GPU 0" in done.stdout) == (1, True)
    unpack("ddp", tmp_path)
    done = check(tmp_path, "ddp", 'max_growth = "0 B/step"', "--format", "json")
    (growth,) = json.loads(done.stdout)["measures"]
    assert (done.returncode, growth["status"], growth["value"]) == (0, "within", None)


def test_an_unknown_figure_is_never_within(tmp_path):
    unpack("diabetes", tmp_path)
    budget = Budget.of({"max_growth": "0 B/step", "max_gpu_peak": "1 GiB", "max_peak": "1 TiB"})
    run = examined(tmp_path, "diabetes")
    status = {one.measure.name: one.status for one in judge_budget(budget, figures_of(run, None, budget.limits))}
    assert status == {"max_growth": "not judged", "max_gpu_peak": "not judged", "max_peak": "within"}
    done = check(tmp_path, "diabetes", 'max_gpu_peak = "1 GiB"')
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "diabetes shows no figure of the budget: max_gpu_peak was not judged" in done.stderr


def test_throughput_is_compared_with_a_baseline(tmp_path):
    for name in ("workers-too-slow", "cpu-bound", "ddp"):
        unpack(name, tmp_path)
    budget = 'min_throughput = "95 %"\nbaseline = "cpu-bound"\n'
    assert check(tmp_path, "workers-too-slow", budget).returncode == 0
    slow = check(tmp_path, "cpu-bound", budget, "--baseline", "workers-too-slow", "--format", "json")
    (throughput,) = json.loads(slow.stdout)["measures"]
    assert (slow.returncode, throughput["status"]) == (1, "beyond")
    assert throughput["high"] < throughput["limit"]
    assert "is the baseline itself" in check(tmp_path, "cpu-bound", budget).stderr
    assert "2 training processes, 1 in the baseline" in check(tmp_path, "ddp", budget).stderr


def test_an_estimate_whose_interval_has_the_limit_is_not_judged():
    budget = Budget.of({"min_throughput": "95 %"}, baseline="x")
    cases = {(0.9, 0.85, 0.94): "beyond", (0.9, 0.8, 1.0): "not judged", (0.96, 0.8, 1.1): "within"}
    for (value, low, high), status in cases.items():
        figure = figures.Figure(value=value, low=low, high=high)
        assert judge_budget(budget, {"min_throughput": figure})[0].status == status


def test_a_share_just_beyond_its_limit_is_not_rounded_to_it():
    (judged,) = judge_budget(Budget.of({"max_data_wait": "10 %"}), {"max_data_wait": figures.Figure(value=0.1034)})
    assert judged.sentence == "Data wait is 10.34%, more than the 10% that max_data_wait allows."


def test_interval_of_a_ratio_covers_the_truth():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        first, second = (rate * np.exp(generator.normal(0, 0.1, 20)) for rate in (90.0, 100.0))
        _, low, high = rate_ratio(first, second)
        covered += low <= 0.9 <= high
    assert covered >= 0.9 * 400


def test_bad_input_is_one_line(tmp_path):
    unpack("main-leak", tmp_path)
    for budget, said in (("max_peak = ", "budget.toml: Invalid value"), ("", "the budget is empty")):
        done = check(tmp_path, "main-leak", budget)
        assert (done.returncode, done.stderr.count("\n"), said in done.stderr) == (2, 1, True)
    done = tidegauge(tmp_path, "check", "main-leak", "--budget", tmp_path / "none.toml")
    assert (done.returncode, "No such file or directory" in done.stderr) == (2, True)


def test_a_finding_that_explains_two_figures_is_told_once(tmp_path):
    unpack("slow-worker", tmp_path)
    unpack("diabetes", tmp_path)
    said = check(
        tmp_path, "slow-worker", 'max_data_wait = "1%"\nmin_throughput = "1000%"\nbaseline = "diabetes"'
    ).stdout
    assert said.count("holds up the training") == 1
    assert said.count("slow-worker: as above") == 1


def test_markdown_tables_hold_foreign_text(tmp_path):
    for name in ("main-leak", "loss-list"):
        unpack(name, tmp_path)
    done = check(tmp_path, "main-leak", 'max_growth = "0 B/step"', "--format", "markdown")
    assert done.stdout.startswith("### Tidegauge: main-leak\n\n|  | budget | measured | result |\n| --- ")
    assert "\n**Growth is " in done.stdout
    assert "\n- main-heap-leak: " in done.stdout
    assert "max_growth allows" in done.stderr
    table = tidegauge(tmp_path, "compare", "main-leak", "loss-list", "--format", "markdown").stdout.splitlines()
    assert table[0] == "|  | main-leak (baseline) | loss-list |"
    gap = table.index("")
    assert ({line.count("|") for line in table[:gap]}, table[gap + 1]) == ({4}, "| setting | run | value |")
    card = tidegauge(tmp_path, "report", "main-leak", "--format", "markdown").stdout
    assert card.startswith("```text\nTidegauge: main-leak")
    assert card.endswith("```\n")
