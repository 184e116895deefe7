"""A few steps of a model of a common kind on the GPU.

models.py mlp|cnn|unet|lstm|encoder|gpt [--batch-size N] [--steps N] [--fraction RATIO]
"""

import argparse
import itertools

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--fraction", type=float, help="share of the device that it may use")
options = parser.parse_args()


class Unet(nn.Module):
    """Halve the picture three times, then double it again and join it with the earlier one."""

    def __init__(self):
        super().__init__()
        sizes = (3, 16, 32, 64)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        seen = []
        for layer in self.down:
            seen.append(x)
            x = functional.max_pool2d(functional.relu(layer(x)), 2)
        for layer, before in zip(reversed(self.up), reversed(seen), strict=True):
            x = functional.relu(layer(torch.cat([functional.interpolate(x, scale_factor=2), before], 1)))
        return x.mean((2, 3))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(64, 256, num_layers=2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


class Transformer(nn.Module):
    """An encoder, or a GPT with a causal mask and a head over its vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.causal, self.read = vocabulary > 10, nn.Linear(64, 256)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, vocabulary)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device) if self.causal else None
        y = self.head(self.layers(self.read(x), mask=mask, is_causal=self.causal))
        return y if self.causal else y.mean(1)


MODELS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
        ),
        (1024,),
    ),
    "cnn": (
        lambda: nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in ((3, 32), (32, 64), (64, 128))
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        ),
        (3, 64, 64),
    ),
    "unet": (Unet, (3, 64, 64)),
    "lstm": (Lstm, (64, 64)),
    "encoder": (lambda: Transformer(10), (128, 64)),
    "gpt": (lambda: Transformer(4096), (128, 64)),
}
if options.fraction:
    torch.cuda.set_per_process_memory_fraction(options.fraction)
make, shape = MODELS[options.kind]
model = make().cuda()
optimizer = torch.optim.AdamW(model.parameters())
rows = TensorDataset(torch.zeros(1, *shape).expand(1 << 20, *shape))
for step, (x,) in enumerate(DataLoader(rows, batch_size=options.batch_size)):
    loss = model(x.cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step + 1 == options.steps:
        break
print("done")
