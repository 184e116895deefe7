"""Lightning: `Trainer.fit` with validation after each epoch, then `Trainer.test`."""

import lightning
import torch
from generated import Digits, small_net, tell
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """Classifies digits."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch, index):
        self.log("test", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_train_epoch_end(self):
        tell(self.trainer.callback_metrics["train"])


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    training = DataLoader(Digits(), batch_size=32, shuffle=True, num_workers=1)
    checking = DataLoader(Digits(256), batch_size=32, num_workers=1)
    model = Classifier()
    trainer.fit(model, training, checking)
    tell(trainer.callback_metrics["validation"])
    (scores,) = trainer.test(model, checking, verbose=False)
    tell(scores["test"])
