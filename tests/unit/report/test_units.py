"""Values as people read them, the same in the terminal and in the dashboard."""

import math

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from collector import units as quantities


@pytest.mark.parametrize(
    ("items", "words"), [([3], "3"), ([0, 1], "0 and 1"), (range(3), "0, 1 and 2")], ids=["one", "two", "three"]
)
def test_several_things_are_listed_as_in_a_sentence(items, words):
    assert quantities.listed(items) == words


@pytest.mark.parametrize(
    ("value", "thing", "words"),
    [(0, "run", "0 runs"), (1, "batch", "1 batch"), (2500, "batch", "2,500 batches"), (2, "epoch", "2 epochs")],
)
def test_counted_things_have_their_plural(value, thing, words):
    assert quantities.counted(value, thing) == words


@pytest.mark.parametrize("missing", [None, math.nan, pd.NA, pd.NaT, math.inf])
@pytest.mark.parametrize("write", [quantities.size, quantities.number, quantities.percent, quantities.duration])
def test_missing_value_is_a_dash_not_zero(write, missing):
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
        (2.9, "ratio", "2.9×"),
        (0.0000123, "seconds", "12.3 µs"),
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
def test_quantities_have_fitting_units(value, unit, words):
    assert quantities.quantity(value, unit) == words


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (999.6, "ms", "1 s"),
        (0.9996, "ms", "1 ms"),
        (0.9994, "ms", "999 µs"),
        (999.7, "steps", "1,000 steps"),
        (999.4, "steps", "999 steps"),
        (1023.7 * 2**20, "bytes", "1 GiB"),
        (1023.4 * 2**20, "bytes", "1023 MiB"),
        (1023.7, "bytes", "1 KiB"),
        (1234.5, "ratio", "1,234×"),
        (0.0996, "ratio", "10%"),
    ],
)
def test_a_value_is_rounded_before_its_unit_is_chosen(value, unit, words):
    assert quantities.quantity(value, unit) == words


def _magnitudes(least, most):
    """Draw as many small numbers as large ones, and those that are about to be rounded up."""
    exponents = st.floats(math.log10(least), math.log10(most)).map(lambda exponent: 10**exponent)
    units = [1e-6, 1e-3, 1.0, 1e3, 2**10, 2**20, 2**30, 2**40]
    edges = st.tuples(st.floats(0.9990, 1.0005), st.sampled_from(units))
    return st.one_of(exponents, edges.map(math.prod)).filter(lambda value: least <= value <= most)


@given(_magnitudes(1e-9, 9.99))
def test_a_short_time_has_the_unit_that_fits(seconds):
    mantissa, unit = quantities.duration(seconds).split()
    seconds_of = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert "e" not in mantissa
    assert 1 <= float(mantissa) < 1000
    assert float(mantissa) * seconds_of == pytest.approx(seconds, rel=0.00501)


@given(_magnitudes(1.0, 1e14), st.sampled_from([1, -1]))
def test_a_size_has_the_unit_that_fits(value_bytes, sign):
    mantissa, unit = quantities.size(sign * value_bytes).split()
    bytes_of = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert "e" not in mantissa
    assert 1 <= sign * float(mantissa) < 1024
    smallest = 0.5 if unit == "B" else 0.0  # there are no parts of a byte
    assert sign * float(mantissa) * bytes_of == pytest.approx(value_bytes, rel=0.00501, abs=smallest)


@given(_magnitudes(1e-3, 1e14), st.sampled_from(["count", "ratio", "ms", "seconds", "bytes", "steps/second"]))
def test_no_large_value_has_an_exponent(value, unit):
    assert "e+" not in quantities.quantity(value, unit)
    assert float(quantities.number(value).replace(",", "")) == pytest.approx(value, rel=0.00501)


def test_small_percentages_keep_a_digit():
    assert [quantities.percent(x) for x in (0, 0.034, 0.31, 44.15)] == ["0%", "3.4%", "31%", "4,415%"]


def test_infinite_time_is_never():
    assert quantities.until(math.inf) == "never"
    assert quantities.until(200) == "3 min 20 s"


def test_growth_has_a_sign():
    assert [quantities.growth(each * 2**20) for each in (1.5, 0, -1e-9, -2)] == [
        "+1.5 MiB/s",
        "0 B/s",
        "0 B/s",
        "-2 MiB/s",
    ]
    assert quantities.growth(math.nan) == "—"
