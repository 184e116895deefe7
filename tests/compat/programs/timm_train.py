"""Timm: its dataset, loader, model, optimizer, scheduler and averages, as its train.py puts them together."""

from pathlib import Path

import vision  # noqa: F401
from generated import seed, tell, write_pictures
from timm import create_model
from timm.data import create_dataset, create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter

EPOCHS = 2

if __name__ == "__main__":
    seed()
    for part in range(3):
        write_pictures(Path("pictures") / "train" / str(part), 64, 72)
    dataset = create_dataset("", root="pictures", split="train", is_training=True)
    loader = create_loader(
        dataset, (3, 64, 64), batch_size=16, is_training=True, num_workers=2, use_prefetcher=False
    )
    model = create_model("resnet18", num_classes=3)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=EPOCHS)
    loss_of = LabelSmoothingCrossEntropy()
    model.train()
    for epoch in range(EPOCHS):
        average = AverageMeter()
        for images, labels in loader:
            loss = loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(loss.item(), images.size(0))
        scheduler.step(epoch + 1)
        tell(average.avg)
