# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Muon under Lightning: the strategy gets the ds_config, which names the optimizer and the schedule.

    python examples/libraries/lightning_deepspeed.py --devices 2 --stage 3
"""

import argparse
from pathlib import Path
from typing import Any, Optional

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy

from counting import Counting, SmallNet, load_ds_config


class SmallModule(LightningModule):
    """Its optimizer is the one of the ds_config; Lightning asks for configure_optimizers, but never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        # Here and not in __init__, so that under ZeRO-3 the model is made in slices.
        if self.net is None:
            self.net = SmallNet()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.net(**batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> None:
        return None


def build_trainer(strategy: DeepSpeedStrategy, out: Path, steps: int, **changes: Any) -> Trainer:
    """`changes` are arguments of Lightning's Trainer."""
    return Trainer(
        **{
            "strategy": strategy,
            "accelerator": "auto",
            "devices": 1,
            "max_steps": steps,
            "accumulate_grad_batches": 2,
            "default_root_dir": str(out),
            "callbacks": [ModelCheckpoint(dirpath=out, every_n_train_steps=10, save_top_k=-1)],
            "logger": False,
            **changes
        })


def batches() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Counting(512), batch_size=4)


def ds_config(stage: int) -> dict[str, Any]:
    config = load_ds_config("ds_config.json", stage)
    # Lightning sets it from accumulate_grad_batches and refuses it here.
    del config["gradient_accumulation_steps"]
    return config


def main(arguments: Optional[list[str]] = None) -> float:
    """The last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    args = parser.parse_args(arguments)
    seed_everything(0)
    trainer = build_trainer(DeepSpeedStrategy(config=ds_config(args.stage)),
                            args.out,
                            args.steps,
                            devices=args.devices)
    trainer.fit(SmallModule(), batches())
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    print(main())
