"""Accelerate: its computer vision example, reduced: prepare, accumulate, backward, gather_for_metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from generated import Digits, small_net, tell
from torch.utils.data import DataLoader

if __name__ == "__main__":
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)
    model, optimizer, training, checking, schedule = accelerator.prepare(
        model,
        optimizer,
        DataLoader(Digits(2048), batch_size=64, shuffle=True, num_workers=1),
        DataLoader(Digits(256), batch_size=64, num_workers=1),
        schedule,
    )
    for _ in range(2):
        model.train()
        for images, labels in training:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        tell(loss)
        model.eval()
        correct = 0
        for images, labels in checking:
            with torch.no_grad():
                guesses = model(images).argmax(-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            correct += int((guesses == labels).sum())
        tell(correct, "accuracy")
    accelerator.end_training()
