"""Budgets: limits for the figures of a training, declared once for `tidegauge check`, the pytest mark and the docs.

    Budget.of({"max_peak": "2 GiB", "max_growth": "0 B/step"})

Standard library alone: the plugin for pytest reads its marks here, in the process of the tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

BYTES, BYTES_PER_STEP, RATIO = "bytes", "bytes/step", "ratio"
#: Name in a budget of the run that `min_throughput` compares with.
BASELINE = "baseline"
_UNIT_WORDS = {BYTES: "bytes", BYTES_PER_STEP: "bytes per step", RATIO: "percent"}
_PREFIXES = "KMGT"
_SIZE = re.compile(rf"(\d{{1,18}}(?:\.\d{{1,18}})?) ?(?:([{_PREFIXES}])(i?))?B?", re.IGNORECASE)
_PERCENT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure that a budget limits: `max_` names the most, `min_` the least that it may be."""

    name: str
    title: str
    unit: str
    example: str
    meaning: str

    @property
    def is_floor(self) -> bool:
        """True if less than the limit is beyond the budget."""
        return self.name.startswith("min_")

    def parse(self, value: object) -> float:
        """Return a limit as its unit counts it: `2 GiB` in bytes, `10 %` as 0.1.

        Raises:
            ValueError: the value is not of this unit.
        """
        limit = _LIMITS[self.unit](value.strip()) if isinstance(value, str) else None
        if limit is None:
            raise ValueError(
                f'{self.name} is {value!r}; give it in {_UNIT_WORDS[self.unit]}, as in "{self.example}"'
            )
        return limit


def parse_size(text: str) -> int | None:
    """Return the bytes of `20GB` (powers of 1000), `20 GiB` (powers of 1024) or a bare number; None for others."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, prefix, binary = match.groups()
    power = _PREFIXES.index(prefix.upper()) + 1 if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _bytes(text: str) -> float | None:
    return parse_size(text) if text.upper().endswith("B") else None


def _bytes_per_step(text: str) -> float | None:
    size, _, per = text.rpartition("/")
    return _bytes(size.strip()) if per.strip() == "step" else None


def _ratio(text: str) -> float | None:
    match = _PERCENT.fullmatch(text)
    return float(match[1]) / 100 if match else None


#: Unit -> the function that reads a limit in it; None for a text of another unit.
_LIMITS = {BYTES: _bytes, BYTES_PER_STEP: _bytes_per_step, RATIO: _ratio}

_MEASURES = (
    Measure(
        name="max_peak",
        title="Peak host memory",
        unit=BYTES,
        example="2 GiB",
        meaning="highest memory (PSS) of the training's processes together, as sampled",
    ),
    Measure(
        name="max_gpu_peak",
        title="Peak GPU memory",
        unit=BYTES,
        example="10 GiB",
        meaning="most memory that PyTorch's allocator reserved on a device",
    ),
    Measure(
        name="max_growth",
        title="Growth",
        unit=BYTES_PER_STEP,
        example="0 B/step",
        meaning="memory that the largest leak takes per step: on the host, in workers, in /dev/shm or on a device",
    ),
    Measure(
        name="max_data_wait",
        title="Data wait",
        unit=RATIO,
        example="10 %",
        meaning="share of the steps' time that training waits for batches of its DataLoader, first ones included",
    ),
    Measure(
        name="min_throughput",
        title="Throughput",
        unit=RATIO,
        example="95 %",
        meaning="samples per second (without samples, steps), as a share of those of the run `baseline`",
    ),
)
#: Name in a budget -> its measure.
MEASURES = {measure.name: measure for measure in _MEASURES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of a training: name of a measure -> limit in its unit; and the run to compare with."""

    limits: Mapping[str, float]
    baseline: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, object], *, baseline: str | None = None) -> Budget:
        """Return the budget that these values describe; `baseline` replaces theirs.

        Raises:
            ValueError: a name is unknown, a value has another unit, or the baseline is missing.
        """
        unknown = [name for name in values if name not in MEASURES and name != BASELINE]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no measure of a budget; give some of {', '.join(MEASURES)}")
        run = baseline or values.get(BASELINE)
        limits = {name: measure.parse(values[name]) for name, measure in MEASURES.items() if name in values}
        if not limits:
            raise ValueError(f"the budget is empty; give some of {', '.join(MEASURES)}")
        if run is not None and not isinstance(run, str):
            raise ValueError(f"{BASELINE} is {run!r}; give a run as text")
        if run is None and "min_throughput" in limits:
            raise ValueError(f'min_throughput compares with a run; name it: {BASELINE} = "RUN"')
        return cls(limits=limits, baseline=run)
