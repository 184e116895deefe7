"""Word language model: an LSTM on batches cut from one long tensor, and weights updated by hand."""

import torch
from generated import Texts, seed, tell

WORDS, LENGTH, EPOCHS = 128, 20, 3


class Model(torch.nn.Module):
    """Predicts the next word."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 128)
        self.lstm = torch.nn.LSTM(128, 256, 2)
        self.head = torch.nn.Linear(256, WORDS)

    def forward(self, words, state):
        output, state = self.lstm(self.embed(words), state)
        return self.head(output), state


def pieces(words):
    """Yield pieces of the text and the words that follow."""
    for start in range(0, len(words) - 1 - LENGTH, LENGTH):
        yield words[start : start + LENGTH], words[start + 1 : start + 1 + LENGTH]


def loss_of(model, words, following, state):
    """Return the loss of a piece and the state after it."""
    state = None if state is None else tuple(part.detach() for part in state)
    output, state = model(words, state)
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), following.flatten()), state


if __name__ == "__main__":
    seed()
    text = Texts(16, 1000).tokens.T.contiguous()
    training, checking = text[:800], text[800:]
    model, rate = Model(), 5.0
    for _ in range(EPOCHS):
        model.train()
        state = None
        for words, following in pieces(training):
            model.zero_grad()
            loss, state = loss_of(model, words, following, state)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for weights in model.parameters():
                    weights.add_(weights.grad, alpha=-rate)
        model.eval()
        state = None
        with torch.no_grad():
            for words, following in pieces(checking):
                checked, state = loss_of(model, words, following, state)
        tell(loss)
        tell(checked)
