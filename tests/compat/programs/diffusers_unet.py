"""Diffusers: its unconditional example, reduced: a small U-Net learns noise, with EMA and Accelerate."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from generated import Digits, seed, tell
from torch.utils.data import DataLoader

if __name__ == "__main__":
    seed()
    accelerator = Accelerator(cpu=True)
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    averaged, noising = EMAModel(model.parameters()), DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, 64)
    loader = DataLoader(Digits(512, side=28), batch_size=16, shuffle=True, num_workers=1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(2):
        for images, _ in loader:
            noise, times = torch.randn_like(images), torch.randint(100, (len(images),))
            guess = model(noising.add_noise(images, noise, times), times, return_dict=False)[0]
            loss = torch.nn.functional.mse_loss(guess, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            averaged.step(model.parameters())
        tell(loss)
