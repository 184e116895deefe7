"""Values as people read them, the same in the terminal and in the dashboard."""

import math

import pandas as pd
import pytest

from collector import wording
from collector.comparison import Measure, words
from collector.diagnosis.findings import Eta, Locus


@pytest.mark.parametrize("missing", [None, math.nan, pd.NA, pd.NaT, math.inf])
@pytest.mark.parametrize("write", [wording.size, wording.number, wording.percent, wording.duration])
def test_missing_is_a_dash_and_never_zero(write, missing):
    assert write(missing) == "—"
    assert wording.quantity(missing, "bytes") == "—"


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1023, "bytes", "1023 B"),
        (2**30, "bytes", "1 GiB"),
        (1.5 * 2**30, "bytes", "1.5 GiB"),
        (1000 * 2**20, "bytes", "1000 MiB"),
        (-3 * 2**20, "bytes/step", "-3 MiB/step"),
        (0.0, "ratio", "0%"),
        (0.012, "ratio", "1.2%"),
        (2.9, "ratio", "2.9x"),
        (0.0000123, "seconds", "12.3 us"),
        (48, "seconds", "48 s"),
        (200, "s", "3 min 20 s"),
        (18720, "seconds", "5 h 12 min"),
        (86400 * 3 + 4 * 3600, "seconds", "3 d 4 h"),
        (12_345, "count", "12,345"),
        (19.63, "steps/second", "19.6 steps/s"),
        ("cpu", "text", "cpu"),
        (math.inf, "bytes", "—"),
        (None, "ratio", "—"),
    ],
)
def test_quantities_in_words(value, unit, words):
    assert wording.quantity(value, unit) == words


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (Locus(), ""),
        (Locus(worker=1, loader=0, rank=0), "worker 1 of loader 0, rank 0"),
        (Locus(worker=-1, role="main", loader=0), "training process, loader 0"),
        (Locus(role="worker", loader=2), "workers, loader 2"),
        (Locus(device=3, rank=1, host="n7"), "device 3, rank 1, host n7"),
    ],
)
def test_loci_in_words(where, words):
    assert wording.locus(where) == words


def test_percentages_keep_a_digit_where_it_matters():
    assert [wording.percent(x) for x in (0, 0.034, 0.31, 1.2)] == ["0%", "3.4%", "31%", "120%"]


def test_a_forecast_has_its_range():
    when = Eta(low_seconds=600, mid_seconds=720, high_seconds=840, low_steps=700, mid_steps=800, high_steps=900)
    assert wording.eta(when) == "in 12 min (10 min to 14 min), about 800 steps"


def test_no_change_is_never_a_negative_zero():
    def share(value):
        return Measure(label="Data wait", value=value, unit="ratio")

    assert words(share(0.3101), share(0.3103)) == "31% (+0.0 points)"
    assert words(share(0.28), share(0.31)) == "28% (-3.0 points)"
    steps = [Measure(label="Steps", value=value, unit="count") for value in (99_999, 100_000)]
    assert words(*steps) == "99,999 (+0.0%)"
