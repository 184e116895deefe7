"""MONAI: segmentation with a `CacheDataset`, its `SupervisedTrainer` and a U-Net."""

import torch
from generated import Digits, seed, tell
from monai.data import CacheDataset, DataLoader
from monai.engines import SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureTyped, RandFlipd, ScaleIntensityd

if __name__ == "__main__":
    seed()
    pictures = [Digits(256, side=32)[index][0] for index in range(256)]
    dataset = CacheDataset(
        [{"image": picture, "label": (picture > 1.0).float()} for picture in pictures],
        Compose(
            [
                EnsureTyped(["image", "label"]),
                ScaleIntensityd("image"),
                RandFlipd(["image", "label"], prob=0.5, spatial_axis=0),
            ]
        ),
        progress=False,
    )
    model = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(16, 32, 64), strides=(2, 2))
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=3,
        train_data_loader=DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2),
        network=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss_function=DiceLoss(sigmoid=True),
    )
    trainer.run()
    tell(trainer.state.output[0]["loss"])
