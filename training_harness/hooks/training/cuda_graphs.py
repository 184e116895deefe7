"""Steps in CUDA graphs: a graph that holds an optimizer's step takes that step whenever it is replayed.

A capture runs the code of a step and computes nothing, a replay computes and runs no code (torch/cuda/graphs.py).
So the step hook notes the optimizers that step during a capture, and each replay reports them: once, however often
they step in the graph. A replay without any may be a forward pass (`ForwardHook.begin_replay`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from training_harness.hooks.patching import Hook
from training_harness.hooks.training.forward_passes import ForwardHook
from training_harness.hooks.training.steps import StepHook


def install(step_hook: StepHook, passes: ForwardHook | None) -> Hook:
    """Replace the methods of CUDA graphs that begin and end a capture, and that replay it."""
    optimizers_of: WeakKeyDictionary[Any, list[Callable[[], Any]]] = WeakKeyDictionary()

    def begin(original: Any) -> Any:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            if hook.active:
                step_hook.captured = {}
            return result

        return capture_begin

    def end(original: Any) -> Any:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            captured, step_hook.captured = step_hook.captured, None
            if captured is not None:
                hook.attempt(optimizers_of.__setitem__, graph, list(captured.values()))
            return original(graph, *args, **kwargs)

        return capture_end

    def make_replay(original: Any) -> Any:
        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            references = hook.attempt(optimizers_of.get, graph) or ()
            optimizers = [optimizer for reference in references if (optimizer := reference()) is not None]
            is_pass = passes is not None and not optimizers and passes.attempt(passes.begin_replay, graph)
            for optimizer in optimizers:
                step_hook.before(optimizer, (), {})
            result = original(graph, *args, **kwargs)
            if passes is not None and is_pass:
                passes.attempt(passes.end_replay)
            for optimizer in optimizers:
                step_hook.after(optimizer, (), {})
            return result

        return replay

    with Hook("cuda_graph") as hook:
        kind = sys.modules["torch.cuda.graphs"].CUDAGraph
        for name, make in (("capture_begin", begin), ("capture_end", end), ("replay", make_replay)):
            hook.replace(kind, name, make)
        return hook
