"""Webdataset: tar shards written with `TarWriter`, read by two workers through `WebLoader`."""

import torch
import webdataset
from generated import Digits, seed, small_net, tell


def image_and_label(sample):
    """Return the tensors of a sample as tar members hold them."""
    return torch.from_numpy(sample["image.npy"]), int(sample["label.cls"])


if __name__ == "__main__":
    seed()
    digits = Digits()
    for shard in range(4):
        with webdataset.TarWriter(f"digits-{shard}.tar") as writer:
            for index in range(shard * 512, (shard + 1) * 512):
                image, label = digits[index]
                writer.write({"__key__": f"{index:06d}", "image.npy": image.numpy(), "label.cls": label})
    dataset = (
        webdataset.WebDataset("digits-{0..3}.tar", shardshuffle=False, nodesplitter=webdataset.split_by_node)
        .shuffle(100, seed=0)
        .decode()
        .map(image_and_label)
        .batched(32)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=2)
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        tell(loss)
