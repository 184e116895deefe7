"""Transformers: `Trainer` on a tiny GPT-2 with random weights, with evaluation; alone and under torchrun."""

import os

from generated import Texts, tell
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

if __name__ == "__main__":
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir="trained",
        use_cpu=True,
        max_steps=60,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        dataloader_num_workers=1,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(512), eval_dataset=Texts(64))
    trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        for entry in trainer.state.log_history:
            for name in ("loss", "eval_loss", "train_loss"):
                if name in entry:
                    tell(entry[name])
