"""Values as people read them, the same in the terminal and in the dashboard."""

import math

import pandas as pd
import pytest

from collector import quantities


@pytest.mark.parametrize("missing", [None, math.nan, pd.NA, pd.NaT, math.inf])
@pytest.mark.parametrize("write", [quantities.size, quantities.number, quantities.percent, quantities.duration])
def test_missing_is_a_dash_and_never_zero(write, missing):
    assert write(missing) == "—"
    assert quantities.quantity(missing, "bytes") == "—"


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
    assert quantities.quantity(value, unit) == words


def test_percentages_keep_a_digit_where_it_matters():
    assert [quantities.percent(x) for x in (0, 0.034, 0.31, 1.2)] == ["0%", "3.4%", "31%", "120%"]


def test_what_may_never_come_has_no_length():
    assert quantities.until(math.inf) == "never"
    assert quantities.until(200) == "3 min 20 s"


def test_growth_says_its_direction():
    assert [quantities.growth(each * 2**20 / 60) for each in (1.5, 0, -2)] == [
        "+1.5 MiB/min",
        "0 B/min",
        "-2 MiB/min",
    ]
    assert quantities.growth(math.nan) == "—"
