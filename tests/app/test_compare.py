"""Compare: every run, its number of observations, and every slow step."""

import base64
import re
from dataclasses import replace

import make_run as runs
import numpy as np
import pytest
from dashboard_pages import figures, open_view, texts, trace_names
from make_records import MISSING_INT32, MS, Writers

from tests.recorded_runs import recorded, unpack

SHORT = replace(runs.HEALTHY, name="short", steps=60)
#: A run with more steps than points of the chart.
LONG = replace(runs.HEALTHY, name="long", steps=1700, step_ms=10.0)
#: Steps that take long, one in each hundred, as if a worker hung repeatedly.
HUNG = range(50, 1700, 100)


@pytest.fixture
def record(monkeypatch, tmp_path):
    """Writes a run into the same home; records have other values where `change` says so, or are left out (None)."""
    append = Writers.append

    def write(script, change=lambda stream, values: {}, *, batch_size=64):
        def changed(to, stream, **values):
            if (others := change(stream, values)) is not None:
                append(to, stream, **values | others)

        monkeypatch.setattr(Writers, "append", changed)
        run_dir = runs.make_run(tmp_path, script)
        for path in (run_dir / "events").iterdir():
            text = path.read_text()
            path.write_text(text.replace('"batch_size": 64', f'"batch_size": {batch_size}'))
        return run_dir.name

    return write


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Opens the page on a run and others."""

    def open_page(run, *others, **query):
        return open_view(monkeypatch, tmp_path, "compare", run=run, compare=list(others), **query)

    return open_page


def short(run_id):
    """Return the name of a run on the page, which lacks the time of its id."""
    return re.sub(r"^\d{8}-\d{6}-", "", run_id)


def samples(count):
    return lambda stream, values: {"samples_count": count} if stream in ("batch", "step") else {}


def slow(steps):
    def change(stream, values):
        return {"duration_ns": 1160 * MS} if stream == "step" and values["step"] in steps else {}

    return change


def values_of(trace, axis="y"):
    return np.frombuffer(base64.b64decode(trace[axis]["bdata"]), dtype=np.dtype(trace[axis]["dtype"]))


def answer(at):
    return next(text.value for text in at.markdown if "gainst" in text.value).replace("\\", "").strip("*")


def test_means_and_the_band_above_them_show_the_slow_steps_of_each_group(record, compare):
    calm, hung = record(LONG), record(LONG, slow(HUNG))
    at = compare(hung, calm)
    chart = figures(at)[0]
    names = short(calm), short(hung)
    assert trace_names(chart) == [each for name in names for each in (name, f"{name}, 95th percentile")]
    mean, upper = (values_of(trace) for trace in chart["data"][2:])
    assert (mean > 50).sum() == len(HUNG)
    assert (upper > 200).sum() == len(HUNG)
    said = texts(at)
    assert "slowest 1.16 s (n = 1,699)" in said
    assert "Line and band: mean and 95th percentile of up to 17 steps." in said


def test_caption_counts_points_above_the_axis_for_each_run(record, compare):
    calm, hung = record(LONG), record(LONG, slow((700, 1300)))
    at = compare(calm, hung)
    top = figures(at)[0]["layout"]["yaxis"]["range"][1]
    assert 16 < top < 50
    said = texts(at)
    assert re.search(
        rf"The axis is cut at {top:.3g} ms\. Above it: 2 of 100 points of {short(hung)} \(\d+ ms, after about ",
        said,
    )
    assert f"points of {short(calm)}" not in said


def test_first_steps_of_a_long_run_have_a_time(record, compare):
    steps = replace(LONG, steps=5000, step_ms=1.7)
    at = compare(record(steps), record(steps, slow((1,))))
    median, upper, *_ = figures(at)[0]["data"]
    assert np.isfinite(values_of(median, "x")).all()
    assert len(values_of(upper)) == len(values_of(median))


def test_answer_compares_samples_where_steps_differ_in_size(record, compare):
    large = record(replace(SHORT, step_ms=200.0), samples(64))
    small = record(SHORT, samples(4), batch_size=4)
    twin = record(replace(SHORT, step_ms=200.0, name="twin"), samples(64))
    quick = record(SHORT, samples(64))
    at = compare(small, large, quick, twin)
    of_small, of_quick, of_twin = answer(at).split("; ")
    assert of_small.startswith(
        f"Against the baseline {short(large)}, {short(small)} (4 samples per step, there 64) has "
    )
    assert "88% fewer samples per second" in of_small
    assert of_quick.startswith(f"{short(quick)} has 100% more samples per second, ")
    assert of_twin == f"{short(twin)} has as many samples per second, as much host memory."
    assert "per step," not in answer(at).replace("samples per step,", "")
    assert f"batches of {short(small)} have a different number of samples than" in texts(at).replace("\\", "")


def test_table_and_answer_have_the_same_baseline_and_sign(record, compare):
    slow_run, quick = record(replace(SHORT, step_ms=200.0), samples(64)), record(SHORT, samples(64))
    at = compare(quick, slow_run)
    assert answer(at).startswith(
        f"Against the baseline {short(slow_run)}, {short(quick)} has 100% more samples per second, "
    )
    table = at.dataframe[0].value.set_index("Figure")
    assert list(table.columns) == [f"{short(slow_run)} (baseline)", short(quick)]
    assert "(+100%, n = " in table.loc["Samples per second", short(quick)]
    assert "%" not in table.loc["Samples per second", f"{short(slow_run)} (baseline)"]
    at = compare(slow_run, quick)
    assert answer(at).startswith(
        f"Against the baseline {short(quick)}, {short(slow_run)} has 50% fewer samples per second, "
    )


def test_steps_of_several_batches_are_compared_by_samples(record, compare):
    once = record(SHORT)
    often = record(SHORT, lambda stream, values: {"samples_count": 256} if stream == "step" else {})
    at = compare(once, often)
    assert (
        f"baseline {short(often)}, {short(once)} (64 samples per step, there 256) has as many samples per second"
        in answer(at)
    )
    assert "compare samples per second, not steps" in texts(at)


def test_answer_mentions_another_batch_size_without_sample_counts(record, compare):
    four, other = record(SHORT, samples(MISSING_INT32), batch_size=4), record(SHORT, samples(MISSING_INT32))
    assert answer(compare(four, other)) == (
        f"Against the baseline {short(other)}, {short(four)} (with another batch size) has no samples per second "
        "to compare, as much host memory."
    )


def test_every_figure_shows_its_sample_count(record, compare, tmp_path):
    run, other = unpack("leak-to-the-end", tmp_path).name, record(SHORT)
    at = compare(run, other)
    table = at.dataframe[0].value.set_index("Figure")
    has_n = table.map(lambda cell: cell == "—" or "n = " in cell).all(axis=1)
    assert set(has_n.index[~has_n]) == {"Steps", "Duration"}  # each is one observation
    baseline = f"{short(other)} (baseline)"
    assert table.loc["Data wait", baseline].endswith("n = 59)")
    assert table.loc["Peak GPU allocated", short(run)].endswith(
        f"(n = {len(recorded(run).streams['device_memory'])})"
    )
    assert table.loc["Peak GPU allocated", baseline] == "—"
    # main and two workers each half a second
    assert table.loc["Peak host memory", baseline].endswith("n = 36)")
    assert table.loc["Peak /dev/shm (host)", baseline].endswith("n = 12)")


def test_data_wait_of_a_loop_without_steps_counts_its_batches(record, compare):
    evaluation = record(SHORT, lambda stream, values: None if stream == "step" else {})
    table = compare(record(SHORT), evaluation).dataframe[0].value.set_index("Figure")
    assert table.loc["Data wait", f"{short(evaluation)} (baseline)"].endswith("(n = 60)")


def test_a_run_is_compared_with_the_one_before_of_the_same_script(record, compare):
    first, _, again = record(SHORT), record(replace(SHORT, name="other")), record(SHORT)
    page = compare(again)
    assert page.multiselect(key="compare").value == [first]
