"""Quantiles of Student's t, compared with SciPy's."""

import pytest
from scipy.special import stdtrit

from collector.diagnosis.statistics.student_t import student_t_quantile


@pytest.mark.parametrize("probability", [0.9, 0.95, 0.975, 0.99])
@pytest.mark.parametrize("freedom", [1, 1.7, 2, 5, 18.25, 99, 20_000])
def test_quantile_is_that_of_scipy(freedom, probability):
    assert student_t_quantile(freedom, probability) == pytest.approx(stdtrit(freedom, probability), rel=1e-6)
