"""Marks on the hooks' code that keep `torch.compile` from compiling the hooks.

After a graph break in a compiled function, at `loss.backward()` say, Dynamo watches each new Python frame. Torch's
own files are on Dynamo's skip list, the hooks are not: it would compile each of them, in vain, at some tenths of a
second apiece. Marked frames run as without Dynamo; functions that are inlined into a graph are not affected by the
mark (torch/_dynamo/eval_frame.py, `skip_code`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType

from training_harness.hooks.patching import Hook

_PACKAGE = "training_harness"


def install() -> Hook:
    """Mark every function of this package's imported modules."""
    skip: Callable[[CodeType], None] = sys.modules["torch._dynamo.eval_frame"].skip_code
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for code in _code_of(module):
                skip(code)
    return Hook("compiler")


def is_compiling() -> Callable[[], bool]:
    """Return torch's own test, which Dynamo treats as a constant; torch 2.2 has it in another module."""
    module = sys.modules["torch.compiler"]
    # `is_dynamo_compiling` calls no other test: it runs several times a step.
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
