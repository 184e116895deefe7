"""The programs of the compatibility suite, and what Tidegauge may say about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A file of `programs/`, how it is started, and the findings above info that it calls for."""

    name: str
    file: str
    about: str
    packages: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29531")
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1")

PROGRAMS = (
    Program(
        "ultralytics", "ultralytics_yolo.py", "`YOLO.train` from a YAML model, with validation", ("ultralytics",)
    ),
    Program("timm", "timm_train.py", "`create_loader`, `create_model`, `create_optimizer_v2`", ("timm",)),
    Program("accelerate", "accelerate_cv.py", "`prepare`, gradient accumulation, validation", ("accelerate",)),
    Program("accelerate-launch", "accelerate_cv.py", "the same by `accelerate launch`", (), LAUNCH),
    Program("accelerate-ddp", "accelerate_cv.py", "the same by `torchrun`, 2 ranks", (), TORCHRUN),
    Program("lightning", "lightning_trainer.py", "`Trainer.fit` with validation, `Trainer.test`", ("lightning",)),
    Program("fabric", "lightning_fabric.py", "Lightning Fabric, a loop of one's own", ("lightning",)),
    Program("transformers", "transformers_trainer.py", "`Trainer`, a tiny GPT-2, evaluation", ("transformers",)),
    Program("transformers-ddp", "transformers_trainer.py", "the same by `torchrun`, 2 ranks", (), TORCHRUN),
    Program("diffusers", "diffusers_unet.py", "unconditional U-Net with EMA and Accelerate", ("diffusers",)),
    Program("torchdata", "torchdata_stateful.py", "`StatefulDataLoader`, resumed within an epoch", ("torchdata",)),
    Program("webdataset", "webdataset_shards.py", "tar shards through `WebLoader`", ("webdataset",)),
    Program("skorch", "skorch_net.py", "`NeuralNetClassifier.fit`, `predict_proba`", ("skorch",)),
    Program("geometric", "geometric_graphs.py", "`DataLoader` of graphs, GIN", ("torch-geometric",)),
    Program("ignite", "ignite_engine.py", "supervised trainer and evaluator", ("pytorch-ignite",)),
    Program("fastai", "fastai_learner.py", "`Learner.fit_one_cycle`, its own loaders", ("fastai",)),
    Program("monai", "monai_trainer.py", "`SupervisedTrainer`, `CacheDataset`, U-Net", ("monai",)),
    Program(
        "metric-learning", "metric_learning.py", "`MetricLossOnly`, two optimizers", ("pytorch-metric-learning",)
    ),
    Program("stable-baselines", "stable_baselines.py", "`PPO.learn`, no DataLoader", ("stable-baselines3",)),
    Program("mnist", "mnist.py", "training and validation loaders with workers"),
    Program("hogwild", "mnist_hogwild.py", "children train, the parent evaluates"),
    Program("ddp-spawn", "ddp_spawn.py", "DDP by `torch.multiprocessing.spawn`, 2 ranks, no RANK set"),
    Program("word-model", "word_language_model.py", "LSTM, weights updated by hand, no DataLoader"),
    Program("regression", "regression.py", "batches and updates made by hand"),
    Program("nanogpt", "nanogpt.py", "pieces of a memory map, gradient accumulation, no DataLoader"),
    Program("reinforce", "reinforce.py", "a policy learns in a toy world, one step per episode"),
    Program("gan", "gan.py", "two optimizers that take turns"),
    Program("inference", "inference_loader.py", "`model.eval()`, DataLoader, no optimizer"),
    Program("inference-forward", "inference_forward.py", "forward passes alone"),
)
