"""Lightning Fabric: `setup`, `setup_dataloaders` and `backward` in a loop of one's own."""

import torch
from generated import Digits, small_net, tell
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    model = small_net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(Digits(), batch_size=64, shuffle=True, num_workers=2))
    for _ in range(3):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
        tell(loss)
