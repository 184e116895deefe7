"""A small language model, a generated text and their training loop: a network with memory worth measuring."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from training_harness.jobs.common import add_loader_options, loader_arguments, positive

VOCABULARY_COUNT = 2048
_END_OF_DOCUMENT = 0
_DOCUMENT_TOKENS = 150
_HEADS_COUNT = 4
_WIDTH = 128

Window = tuple[torch.Tensor, torch.Tensor]


class Text(Dataset[Window]):
    """Windows of a generated text with the statistics of a real one.

    Token frequencies follow Zipf's law, half of the tokens follow from the one before, and
    documents of lognormal length are packed one after the other. Items are two (length,) int64
    tensors: the tokens, and the ones that come next.
    """

    def __init__(self, windows_count: int, length: int, *, seed: int) -> None:
        random = np.random.default_rng(seed)
        count = windows_count * length + 1
        tokens = 1 + random.zipf(1.2, count) % (VOCABULARY_COUNT - 1)
        follower = 1 + random.permutation(VOCABULARY_COUNT) % (VOCABULARY_COUNT - 1)
        tokens[1:] = np.where(random.random(count - 1) < 0.5, follower[tokens[:-1]], tokens[1:])
        lengths = random.lognormal(np.log(_DOCUMENT_TOKENS), 1.0, 1 + count // _DOCUMENT_TOKENS)
        ends = np.cumsum(1 + lengths.astype(np.int64))
        tokens[ends[ends < count]] = _END_OF_DOCUMENT
        self.tokens = torch.from_numpy(tokens)
        self.windows_count = windows_count
        self.length = length

    def __len__(self) -> int:
        return self.windows_count

    def __getitem__(self, index: int) -> Window:
        window = self.tokens[index * self.length : (index + 1) * self.length + 1]
        return window[:-1], window[1:]


class LanguageModel(nn.Module):
    """A causal transformer without dropout, so that its loss does not depend on how a batch is split."""

    def __init__(self, length: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_COUNT, _WIDTH)
        self.places = nn.Embedding(length, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS_COUNT, 4 * _WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, VOCABULARY_COUNT)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next token, (batch, length, vocabulary)."""
        hidden = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


class Step(NamedTuple):
    """Duration of one optimizer step, and the mean loss of its batch."""

    seconds: float
    loss: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, of its training loop and of its DataLoader."""
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="optimizer steps")
    parser.add_argument("--length", type=positive, default=32, metavar="N", help="tokens per window")
    parser.add_argument("--depth", type=positive, default=2, metavar="N", help="layers of the model")
    add_loader_options(parser, num_workers=1)


def make_loader(
    options: argparse.Namespace,
    windows_per_step: int,
    batch_size: int,
    make_sampler: Callable[[Text], Sampler[int]] | None = None,
) -> DataLoader[Window]:
    """Make a loader of the windows of all steps."""
    text = Text(options.steps * windows_per_step, options.length, seed=options.seed)
    sampler = None if make_sampler is None else make_sampler(text)
    return DataLoader(text, batch_size=batch_size, sampler=sampler, **loader_arguments(options))


def make_model(options: argparse.Namespace) -> LanguageModel:
    """Make the model that the options describe; the same one for the same seed."""
    torch.manual_seed(options.seed)
    return LanguageModel(options.length, options.depth)


def train(
    model: nn.Module, batches: Iterable[Window], device: torch.device, *, accumulation: int = 1, log: bool = True
) -> list[Step]:
    """Train on all batches, `accumulation` of them per step; `log` prints the loss of every fifth step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps: list[Step] = []
    loss_sum, step_start = 0.0, time.monotonic()
    for number, (tokens, following) in enumerate(batches, start=1):
        scores = model(tokens.to(device)).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, following.to(device).flatten()) / accumulation
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.item()
        if number % accumulation:
            continue
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        steps.append(Step(now - step_start, loss_sum))
        if log and len(steps) % 5 == 0:
            print(f"step {len(steps)}  loss {loss_sum:.4f}  {(now - step_start) * 1e3:.0f} ms", flush=True)
        loss_sum, step_start = 0.0, now
    return steps


def best_device() -> torch.device:
    """Return the first GPU, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
