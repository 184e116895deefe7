"""Keeps `torch.compile` from compiling the hooks themselves.

A compiled function that breaks its graph, at `loss.backward()` say, calls what follows with Dynamo watching each
new Python frame. Torch's own files are on Dynamo's list of what to leave alone, the hooks are not: each would be
compiled, in vain, at some tenths of a second apiece. Frames that are marked run as without Dynamo; functions that
are inlined into a graph are not affected by the mark (torch/_dynamo/eval_frame.py, `skip_code`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType

from training_harness.hooks.patching import Hook

_PACKAGE = "training_harness"


def install() -> Hook:
    """Mark every function of the package that is imported by now.

    Raises:
        AttributeError: this torch cannot mark code.
    """
    skip: Callable[[CodeType], None] = sys.modules["torch._dynamo.eval_frame"].skip_code
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for code in _code_of(module):
                skip(code)
    return Hook("compiler")


def is_compiling() -> Callable[[], bool]:
    """Torch's own test, which Dynamo takes for a constant; torch 2.2 has it elsewhere.

    Raises:
        AttributeError: this torch has none.
        KeyError: `torch.compiler` is not imported yet.
    """
    module = sys.modules["torch.compiler"]  # the first one calls no other: it is asked several times per step
    test: Callable[[], bool] | None = getattr(module, "is_dynamo_compiling", getattr(module, "is_compiling", None))
    return test or sys.modules["torch._utils"].is_compiling


def _code_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
