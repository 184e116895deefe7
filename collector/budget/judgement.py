"""The judgement of a figure: within its limit, beyond it, or not judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from collector.budget.figures import Figure
from collector.units import MISSING, is_known, percent, quantity
from training_harness.budget import MEASURES, RATIO, Budget, Measure

Status = Literal["within", "beyond", "not judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A figure held to its limit; `reason` says why it was not judged."""

    measure: Measure
    limit: float
    figure: Figure
    status: Status
    reason: str = ""

    @property
    def limit_words(self) -> str:
        """The limit in words: `2 GiB`."""
        return _words(self.limit, self.measure)

    @property
    def measured_words(self) -> str:
        """The figure in words: `1.2 MiB/step (1.1 MiB/step to 1.3 MiB/step, n = 60)`."""
        figure = self.figure
        if not is_known(figure.value):
            return figure.note or MISSING
        details = []
        if is_known(figure.low) and is_known(figure.high):
            details.append(f"{_words(figure.low, self.measure)} to {_words(figure.high, self.measure)}")
        details += [f"n = {figure.n:,}"] if figure.n is not None else []
        text = _words(figure.value, self.measure)
        if text == self.limit_words and self.measure.unit == RATIO:  # "10%, more than the 10%" would say nothing
            text = f"{figure.value:.2%}"
        return f"{text} ({', '.join(details)})" if details else text

    @property
    def sentence(self) -> str:
        """The judgement in one sentence."""
        name, title = self.measure.name, self.measure.title
        if self.status == "not judged":
            return f"{name} was not judged: {self.reason}"
        of_baseline = " of the baseline's" if self.measure.unit == RATIO and self.measure.is_floor else ""
        if self.status == "beyond":
            than = "less" if self.measure.is_floor else "more"
            words = f"{self.measured_words}, {than} than the {self.limit_words}{of_baseline}"
            return f"{title} is {words} that {name} allows."
        return f"{title} is within the {self.limit_words}{of_baseline} that {name} allows: {self.measured_words}."


def judge_budget(budget: Budget, figures: Mapping[str, Figure]) -> list[Judgement]:
    """Return the judgement of each figure that a budget limits."""
    return [_judge(MEASURES[name], limit, figures[name]) for name, limit in budget.limits.items()]


def _judge(measure: Measure, limit: float, figure: Figure) -> Judgement:
    """Judge one figure: an estimate is beyond its limit only with its whole interval."""
    status: Status = "within"
    reason = figure.reason
    if reason:
        status = "not judged"
    elif is_known(figure.value):
        sign = -1.0 if measure.is_floor else 1.0
        nearest = figure.high if measure.is_floor else figure.low
        if sign * (figure.value if nearest is None else nearest) > sign * limit:
            status = "beyond"
        elif sign * figure.value > sign * limit:
            status = "not judged"
            reason = f"the limit of {_words(limit, measure)} lies in its interval; a longer run narrows that"
    return Judgement(measure=measure, limit=limit, figure=figure, status=status, reason=reason)


def _words(value: float, measure: Measure) -> str:
    return percent(value) if measure.unit == RATIO else quantity(value, measure.unit)
