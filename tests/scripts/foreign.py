"""Programs as users write them, without a DataLoader or an optimizer, or with processes of their own.

python foreign.py NAME [ARGUMENTS]
"""

import contextlib
import os
import pickle
import subprocess
import sys
import time

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def written_by_hand(seconds, kept_kib):
    """Gradient descent without an optimizer on hand-made batches; keeps some memory in each iteration."""
    model, kept, end = torch.nn.Linear(64, 1), [], time.monotonic() + float(seconds)
    passes = 0
    while time.monotonic() < end:
        model.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
        kept.append(b"\1" * (int(kept_kib) << 10))
        passes += 1
        time.sleep(0.02)
    print(passes)


@case
def without_a_module(count):
    """Gradient descent on a tensor: no module, no optimizer and no DataLoader."""
    weights = torch.zeros(8, requires_grad=True)
    for _ in range(int(count)):
        (torch.randn(4, 8) @ weights - 1).square().mean().backward()
        with torch.no_grad():
            weights -= 0.01 * weights.grad
            weights.grad = None


class Nested(torch.nn.Module):
    """A model within which modules of other classes are called, among them one that led before."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

    def forward(self, x):
        return self.parts(self.parts(x))


@case
def passes_of_nested_modules(count):
    """The first module that is called alone is a part of the model that is called later."""
    alone, model = torch.nn.Linear(8, 8), Nested()
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(5):
            alone(x)
        for _ in range(int(count)):
            model(x)
            time.sleep(0.001)


@case
def compiled(count):
    """A compiled model, called with warnings as errors: nothing may change how torch compiles it."""
    import warnings

    warnings.simplefilter("error")
    model = torch.compile(Nested(), backend="eager")
    with torch.no_grad():
        for _ in range(int(count)):
            model(torch.randn(4, 8))
    counters = torch._dynamo.utils.counters
    print(counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


@case
def own_batches(steps):
    """An optimizer, and batches made by hand between forward and backward, as nanoGPT makes them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(4, 8)
    for _ in range(int(steps)):
        loss = model(x).square().mean()
        time.sleep(0.02)
        x = torch.randn(4, 8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{loss.item():.10f}")


@case
def only_batches(count):
    """A DataLoader alone: an optimizer would import most of torch."""
    print(sum(float(batch.sum()) for (batch,) in DataLoader(TensorDataset(torch.ones(int(count))))))


class Doubled(torch.nn.Module):
    """A class with a `__call__` of its own, behind the model's in the order of the classes."""

    def __call__(self, *args):
        return 2 * super().__call__(*args)


class Backbone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.part(x)


class Both(Backbone, Doubled):
    pass


@case
def odd_calls():
    """Prints what a class whose calls are counted does when it is inherited, traced and pickled by value."""
    torch.manual_seed(0)
    backbone, both, x = Backbone(), Both(), torch.ones(4, 8)
    for _ in range(10):
        backbone(x)
    print(both(x).sum().item(), (2 * Backbone.__call__(both, x)).sum().item())
    print([node.op for node in torch.fx.symbolic_trace(backbone).graph.nodes])
    called = vars(Backbone).get("__call__", torch.nn.Module.__call__)
    print(pickle.loads(pickle.dumps(called)) is torch.nn.Module.__call__)
    with torch.no_grad():
        print(torch.jit.script(backbone)(x).sum().item())


@case
def closes_descriptors(folder):
    """A daemon: it closes all descriptors, and its own files get their numbers."""
    own_batches(10)
    os.closerange(3, 256)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(f"{folder}/{number}", "w+b", buffering=0)) for number in range(12)]
        for file in files:
            file.write(b"mine")
        own_batches(30)
        for file in files:
            file.seek(0)
        print({file.read() for file in files})


class Fails(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 20:
            raise ValueError("row 20 is empty")
        return torch.ones(4)


@case
def raises_in_a_worker():
    train(0, DataLoader(Fails(), batch_size=4, num_workers=1))


class Costly(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 96

    def __getitem__(self, index):
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return torch.ones(4)


def train(number, loader):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in loader:
        batch = batch[0] if isinstance(batch, list) else batch
        model(batch).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)


def train_by_number(number):
    train(number, DataLoader(TensorDataset(torch.ones(320, 4)), batch_size=8))


@case
def children_train_and_the_parent_evaluates():
    """Train as Hogwild does: two processes of 40 steps each, then 12 batches of evaluation."""
    mp.spawn(train_by_number, nprocs=2)
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        for batch in DataLoader(Costly(0.002), batch_size=8):
            model(batch)


def train_as_rank(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    train(rank, DataLoader(TensorDataset(torch.ones(160, 4)), batch_size=8))
    torch.distributed.destroy_process_group()


@case
def ranks_without_environment(port):
    """A process group whose ranks come as arguments: RANK is not set."""
    mp.start_processes(train_as_rank, (port,), nprocs=2, start_method="fork")


class FromChildren(Dataset):
    """Each sample is computed by a child process that reads nothing."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        made = subprocess.run(
            ["awk", "BEGIN { for (i = 0; i < 2000000; i++) s += i; print s }"], capture_output=True, check=True
        )
        return torch.full((4,), float(len(made.stdout)))


@case
def samples_from_children():
    train(0, DataLoader(FromChildren(), batch_size=2, num_workers=1))


@case
def raises_in_colour():
    train_loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=8)
    for number, _ in enumerate(train_loader):
        if number == 3:
            raise RuntimeError("\x1b[31mthe loss is nan\x1b[0m")


class Longer(IterableDataset):
    """A stream with more samples than its length."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(torch.ones(3))


@case
def warned_by_torch():
    """Loaders that torch warns of, when an iterator is created and at a batch."""
    for num_workers in ("0", "1"):
        loader = DataLoader(Longer(), batch_size=None, num_workers=int(num_workers), pin_memory=True)
        print(len(loader))
        for batch in loader:
            print(batch)


@case
def detaches():
    import training_harness

    run = training_harness.attach(name="notebook")
    train(0, DataLoader(TensorDataset(torch.ones(160, 4)), batch_size=8))
    training_harness.detach()
    print(run, flush=True)
    sys.stdin.read()  # the kernel of a notebook goes on


if __name__ == "__main__":
    CASES[sys.argv[1]](*sys.argv[2:])
