"""Train under conditions that a harness must survive, and print the outcome.

fail_open.py losses           the exact losses of a short training, inline and with a worker
fail_open.py odd              a process that does what processes seldom do; it ends in os._exit(3)
fail_open.py sabotage DIR     the training again and again, each time with another part of the harness, of torch
                              or of the system failing; one JSON line each, and a run directory each in DIR
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import random
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

#: Number of loaders, more than a run records.
LOADERS = 2_500
#: These stand in the place of a function of torch's or the user's and call it, or are a guard themselves: what they
#: call is made to fail instead of them.
STAND_INS = {
    "FetchRecorder.on_message",
    "FetchRecorder.on_result",
    "FetchRecorder.farewell",
    "Hook.__enter__",
    "Hook.__exit__",
    "Hook._restore",
    "Hook.attempt",
    "Hook.fail",
    "Hook.on_remove",
    "Hook.remove",
    "StepHook.after",
    "StepHook.before",
    "WorkerEntry.__call__",
    "_Call.__call__",
    "_Call.__get__",
    "_PickledAsNothing.__call__",
    "WorkerEntry.__reduce__",
    "_SpawnedEntry.__call__",
    "_DataQueue.__getattr__",
    "_DataQueue.put",
    "_IndexQueue.__getattr__",
    "_IndexQueue.get",
    "run_worker",
}


def train(workers: int, at_step: Callable[[int], None] = lambda step: None) -> str:
    torch.manual_seed(0)
    random.seed(0)
    rows = TensorDataset(torch.arange(64.0).reshape(16, 4), torch.arange(16) % 2)
    extra = {"multiprocessing_context": "fork"} if workers else {}
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    losses = []
    for step, (x, y) in enumerate(DataLoader(rows, batch_size=4, shuffle=True, num_workers=workers, **extra)):
        at_step(step)
        loss = (model(x.to("cpu")).squeeze(1) - y.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(f"{loss.item():.17g}")
    return " ".join(losses)


def losses() -> str:
    return f"{train(0)} | {train(1)}"


def odd() -> None:
    import app
    import collector

    print(app.whose, collector.whose, builtins.greeting)
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", "print('the child has exec-ed', flush=True)"])
    os.waitpid(child, 0)
    print(losses())
    total = 0
    for number in range(LOADERS):
        for (batch,) in DataLoader(TensorDataset(torch.full((2,), number)), batch_size=2):
            total += int(batch.sum())
    print(total)
    sums = [0, 0, 0]

    def load(at: int) -> None:
        for (batch,) in DataLoader(TensorDataset(torch.arange(40) + at), batch_size=4, num_workers=at % 2):
            sums[at] += int(batch.sum())

    threads = [threading.Thread(target=load, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sums)
    print(len(os.listdir("/proc/self/fd")) < 40, flush=True)
    os._exit(3)


def functions_of_the_harness() -> Iterator[tuple[str, types.FunctionType]]:
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(("training_harness.hooks.", "training_harness.session", "training_harness.journal")):
            continue
        owners = [module, *(each for each in vars(module).values() if isinstance(each, type))]
        for owner in owners:
            for value in vars(owner).values():
                value = getattr(value, "__wrapped__", getattr(value, "__func__", getattr(value, "fget", value)))
                if isinstance(value, types.FunctionType) and value.__module__ == name:
                    yield value.__qualname__, value


def raiser(*args: object, **kwargs: object) -> None:
    __import__("sys").modules["__main__"].raised += 1
    raise RuntimeError("sabotage")


raised = 0


@contextlib.contextmanager
def broken(function: types.FunctionType) -> Iterator[None]:
    kept, function.__code__ = function.__code__, raiser.__code__
    try:
        yield
    finally:
        function.__code__ = kept


@contextlib.contextmanager
def lacking(owner: object, name: str) -> Iterator[Callable[[], None]]:
    kept = getattr(owner, name)
    delattr(owner, name)
    yield lambda: setattr(owner, name, kept)


@contextlib.contextmanager
def clock(read: Callable[[], int]) -> Iterator[None]:
    kept, time.monotonic_ns = time.monotonic_ns, read
    try:
        yield
    finally:
        time.monotonic_ns = kept


def clocks() -> dict[str, Callable[[], int]]:
    now_ns, dice = [10**15], random.Random(1)

    def back() -> int:
        now_ns[0] -= 1_000_000
        return now_ns[0]

    return {
        "stands still": lambda: 10**15,
        "goes back": back,
        "jumps": lambda: 10**15 + dice.randrange(10**13),
        "is beyond all bounds": lambda: 2**70,
    }


def sabotage(folder: Path) -> None:
    import training_harness

    number = 0

    def attempt(name: str, context: contextlib.AbstractContextManager, work: Callable[[Path], str] | None = None):
        global raised
        nonlocal number
        number += 1
        run_dir = folder / f"{number:03}"
        for part in ("journal", "events"):
            (run_dir / part).mkdir(parents=True)
        raised, error, found = 0, None, ""
        try:
            with context as repair:
                training_harness.attach(run_dir)
                if repair is not None:
                    repair()
                found = losses() if work is None else work(run_dir)
                training_harness.detach()
        except BaseException as caught:  # noqa: BLE001 - whatever reaches the training is the finding
            error = repr(caught)
        training_harness.detach()
        line = {"name": name, "run": run_dir.name, "losses": found, "raised": raised, "error": error}
        print(json.dumps(line), flush=True)

    attempt("nothing", contextlib.nullcontext())
    for name, function in list(functions_of_the_harness()):
        if name not in STAND_INS and not name.endswith("__del__") and not function.__code__.co_freevars:
            attempt(name, broken(function))

    loader = sys.modules["torch.utils.data.dataloader"]
    base, parallel = loader._BaseDataLoaderIter, loader._MultiProcessingDataLoaderIter
    for owner, name in (
        (base, "__init__"),
        (base, "__next__"),
        (base, "_next_index"),
        (base, "_reset"),
        (parallel, "_get_data"),
        (parallel, "_shutdown_workers"),
        (sys.modules["torch.utils.data._utils.worker"], "_worker_loop"),
        (sys.modules["torch.optim.optimizer"], "register_optimizer_step_pre_hook"),
        (torch.autograd, "backward"),
        (torch.compiler, "is_compiling"),
    ):
        attempt(f"torch lacks {name}", lacking(owner, name))

    def losing(run_dir: Path, *, everything: bool) -> str:
        def at_step(step: int) -> None:
            if step == 2:
                shutil.rmtree(run_dir if everything else run_dir / "journal")

        return f"{train(0, at_step)} | {train(1)}"

    attempt("the journals are removed", contextlib.nullcontext(), lambda run: losing(run, everything=False))
    attempt("the run is removed", contextlib.nullcontext(), lambda run: losing(run, everything=True))
    for name, read in clocks().items():
        attempt(f"the clock {name}", clock(read))


if __name__ == "__main__":
    if sys.argv[1] == "sabotage":
        sabotage(Path(sys.argv[2]))
    elif sys.argv[1] == "odd":
        odd()
    else:
        print(losses())
