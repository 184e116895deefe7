"""The trainings of the benchmark: what runs, and which findings are right."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cuda_sim import simulator
from training_harness.jobs.faults import FAULTS

_PROGRAMS = Path(simulator.__file__).parent / "programs"
_KIB, _MIB = 1 << 10, 1 << 20
#: Share of the device that a training may use, so that several fit side by side.
SHARE = 0.03
_PLACES = ("forward", "backward", "optimizer", "temporaries", "evaluation")
_FINDINGS = {"tensors": "gpu-tensor-leak", "library": "gpu-non-pytorch-growth", "pinned": "pinned-cache-growth"}
_HEALTHY_GROWTH = ("variable", "evaluation", "filling", "outputs", "late_optimizer", "graphs", "nothing")
_LIBRARIES = ("convolutions", "collectives", "compiled", "loader", "checkpoints", "streams", "attention", "clock")


HEALTHY, SICK, ALONE = "healthy", "sick", "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training.

    Attributes:
        words: the command.
        kind: the finding that is right; None where none is.
        consequences: kinds of findings that are right besides.
        options: of `tidegauge run`.
        environ: further variables of its environment.
        group: trainings of one group run side by side: the healthy ones next to none that takes ever more memory.
    """

    name: str
    words: tuple[str, ...]
    kind: str | None = None
    consequences: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    group: str = SICK


def trainings() -> list[Training]:
    """Return all trainings, the long ones of each group first."""
    return [*_leaks(), *_faults(), *_healthy(), *_others(), *_errors()]


def _program(name: str, *words: object) -> tuple[str, ...]:
    return (sys.executable, str(_PROGRAMS / name), *map(str, words))


def _leaks() -> Iterator[Training]:
    variants = {"": (), "-noise": ("--noise",), "-uneven": ("--pace", "uneven"), "-late": ("--onset", 0.3)}
    for variant, words in variants.items():
        yield Training(
            name=f"to-the-limit{variant}",
            words=_program(
                "growth.py", "tensors", "--bytes", 2 * _MIB, "--steps", 4000, "--fraction", SHARE, *words
            ),
            kind="gpu-tensor-leak",
            consequences=("gpu-oom-risk", "cuda-oom", "crashed"),
        )
    for kind, finding in _FINDINGS.items():
        for size in (256 * _KIB, _MIB):
            name, words = f"{kind}-{size // _KIB}k", ("growth.py", kind, "--bytes", size)
            yield Training(name=name, words=_program(*words), kind=finding, consequences=("gpu-oom-risk",))
            yield Training(name=f"{name}-fixed", words=_program(*words, "--fixed"), group=HEALTHY)


def _faults() -> Iterator[Training]:
    for name in sorted(name for name, fault in FAULTS.items() if fault.needs_gpu):
        words = (sys.executable, "-P", "-m", "training_harness.jobs", "fault", name)
        yield Training(
            name=name,
            words=words,
            kind=FAULTS[name].finding,
            consequences=("gpu-oom-risk", "gpu-tensor-leak", "crashed"),
        )
        yield Training(name=f"{name}-fixed", words=(*words, "--fixed"), group=HEALTHY)


def _healthy() -> Iterator[Training]:
    program = str(Path(__file__).with_name("libraries.py"))
    for kind in _LIBRARIES:
        yield Training(name=kind, words=(sys.executable, program, kind), group=HEALTHY)
    for kind in _HEALTHY_GROWTH:
        words = _program("growth.py", kind, "--noise", "--seed", 1)
        yield Training(name=f"growth-{kind}", words=words, group=HEALTHY)
    yield Training(name="captured-graph", words=_program("graph.py", "graph.json"), group=HEALTHY)


def _others() -> Iterator[Training]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    ranks = _program("devices.py", ".", "--distributed", "--use", "0", "--use", "0")[1:]
    often = ("--interval", "0.25")
    yield Training(name="two-ranks", words=(*launcher, *ranks), kind="gpu-tensor-leak", options=often)
    yield Training(name="gauges", words=_program("gauges.py", "gauges.json"), kind="cuda-oom")


def _errors() -> Iterator[Training]:
    share = ("--fraction", SHARE)
    circumstances: dict[str, tuple[tuple[object, ...], dict[str, str]]] = {
        "share": (share, {}),
        "expandable": (share, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        "caught": ((*share, "--catch"), {}),
        "whole": ((), {}),
        "another": (("--other", 8 << 30), {}),
    }
    for circumstance, (words, environ) in circumstances.items():
        for place in _PLACES:
            yield Training(
                name=f"error-{place}-{circumstance}",
                words=_program("errors.py", place, *words),
                kind="cuda-oom",
                consequences=("crashed", "gpu-oom-risk", "gpu-tensor-leak", "gpu-fragmentation"),
                options=("--memory-history", "200") if place == "forward" else (),
                environ=environ,
                group=ALONE if circumstance in ("whole", "another") else SICK,
            )
