"""Ultralytics: `YOLO.train` from a YAML model on pictures with one box each, with validation."""

import os
from pathlib import Path

os.environ |= {"YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(Path.cwd()), "YOLO_AUTOINSTALL": "false"}

import vision  # noqa: F401
from generated import seed, tell, write_pictures
from ultralytics import YOLO

if __name__ == "__main__":
    seed()
    data = Path.cwd() / "data"
    for part, count in (("train", 48), ("val", 16)):
        for path in write_pictures(data / "images" / part, count, 96):
            label = data / "labels" / part / f"{path.stem}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text(f"{int(path.stem) % 3} 0.5 0.5 0.5 0.5\n")
    yaml = data / "data.yaml"
    yaml.write_text(f"path: {data}\ntrain: images/train\nval: images/val\nnames: [red, green, blue]\n")
    model = YOLO("yolo11n.yaml")
    model.add_callback("on_train_epoch_end", lambda trainer: [tell(part) for part in trainer.tloss.values()])
    model.train(
        data=str(yaml),
        imgsz=96,
        epochs=2,
        batch=8,
        nbs=8,
        workers=2,
        device="cpu",
        seed=0,
        plots=False,
        project=str(data),
    )
