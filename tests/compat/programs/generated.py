"""Generated data, one seed for everything, and the line that a program prints for a loss."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


def seed(value: int = 0) -> None:
    """Seed every generator that a program may use."""
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def tell(loss: object, name: str = "loss") -> None:
    """Print a loss with all its digits, on a line that `run.py` compares, in one write: ranks share a pipe."""
    print(f"{name} {float(loss)!r}\n", end="", flush=True)


class Digits(Dataset):
    """Images of ten classes: a bright square whose place is the class, with noise."""

    def __init__(self, count: int = 2048, side: int = 28, channels: int = 1) -> None:
        self._count, self._side, self._channels = count, side, channels

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index >= self._count:
            raise IndexError(index)
        label = index % 10
        image = torch.rand(
            self._channels, self._side, self._side, generator=torch.Generator().manual_seed(int(index))
        )
        row, column = divmod(label, 5)
        image[:, 8 + 8 * row : 12 + 8 * row, 2 + 5 * column : 6 + 5 * column] += 1.0
        return image, int(label)


class Texts(Dataset):
    """Sequences of tokens in which each token follows from the one before, now and then at random."""

    def __init__(self, count: int = 256, length: int = 64, words: int = 128) -> None:
        generator = torch.Generator().manual_seed(7)
        noise = torch.randint(words, (count, length), generator=generator)
        is_noise = torch.rand(count, length, generator=generator) < 0.1
        self.tokens = noise.clone()
        for place in range(1, length):
            follows = (self.tokens[:, place - 1] * 5 + 3) % words
            self.tokens[:, place] = torch.where(is_noise[:, place], noise[:, place], follows)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def write_pictures(folder: Path, count: int, side: int) -> list[Path]:
    """Write pictures with one bright square each; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, paths = np.random.default_rng(3), []
    for number in range(count):
        pixels = generator.integers(0, 128, (side, side, 3), dtype=np.uint8)
        quarter = side // 4
        pixels[quarter : 3 * quarter, quarter : 3 * quarter, number % 3] = 255
        paths.append(folder / f"{number:04d}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def small_net(channels: int = 1, width: int = 16) -> torch.nn.Module:
    """Return a convolutional net for `Digits`."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, width, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(7),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * width * 49, 10),
    )
