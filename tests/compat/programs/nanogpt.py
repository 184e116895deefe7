"""GPT in the style of nanoGPT: random pieces of a memory map, gradient accumulation, no DataLoader."""

import numpy as np
import torch
from generated import Texts, seed, tell

WORDS, LENGTH, BATCH, ACCUMULATED, STEPS = 128, 64, 8, 4, 40


class Block(torch.nn.Module):
    """Attention and a feed-forward part, both residual."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.again = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=future, need_weights=False)[0]
        return x + self.feed(self.again(x))


class Gpt(torch.nn.Module):
    """Predicts the next word."""

    def __init__(self, width=96):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, width), torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.Sequential(Block(width), Block(width))
        self.head = torch.nn.Linear(width, WORDS)

    def forward(self, words, following):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        return torch.nn.functional.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), following.flatten())


def get_batch(data):
    """Return random pieces of the file and the words that follow."""
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,)).tolist()
    pieces = torch.stack([torch.from_numpy(data[start : start + LENGTH + 1].astype(np.int64)) for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def estimate(model, data):
    """Return the mean loss of a few batches."""
    model.eval()
    losses = [model(*get_batch(data)).item() for _ in range(5)]
    model.train()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    seed()
    Texts(400).tokens.flatten().numpy().astype(np.uint16).tofile("train.bin")
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        for _ in range(ACCUMULATED):
            loss = model(*get_batch(data)) / ACCUMULATED
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            tell(loss)
            tell(estimate(model, data))
