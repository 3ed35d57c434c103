# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks: Lightning's strategy on each engine. Writes what it found into OUT/results.json."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy

from counting import SmallNet
from lightning_deepspeed import SmallModule, batches, build_trainer, ds_config, main
from outcome import EXAMPLE, results_of
from whole import Record, Settings, compare, difference, in_fp32, state_of

SETTINGS = Settings(gas=2,
                    clip=0.1,
                    weight_decay=0.1,
                    betas=(0.9, 0.95),
                    eps=1e-10,
                    match_rms=False,
                    decay_vectors=True)
EPOCHS, SAVED = 2, 2
CASES = {f"zero{stage}": stage for stage in (1, 2, 3)}


class Whole(torch.nn.Module):
    """SmallNet under the names that it has in SmallModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.net(**batch)


class Recorder(Callback):

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.record = Record(trainer.strategy.deepspeed_engine)

    # Lightning takes the engine away after training.
    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.state = state_of(trainer.strategy.deepspeed_engine)


def fit(stage: int, out: Path, seed: int, **given: Any) -> Recorder:
    """An epoch is as long as a checkpoint is away: Lightning goes on with the same batches only where one ended."""
    # Of the order of the data, which has to be the same; the weights are not to be.
    seed_everything(0)
    torch.manual_seed(seed)
    recorder = Recorder()
    saving = ModelCheckpoint(dirpath=out, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    config = {**in_fp32(ds_config(stage)), "gradient_clipping": SETTINGS.clip}
    trainer = build_trainer(DeepSpeedStrategy(config=config),
                            out,
                            steps=-1,
                            max_epochs=EPOCHS,
                            devices=2,
                            limit_train_batches=SETTINGS.gas * SAVED,
                            callbacks=[recorder, saving],
                            enable_progress_bar=False,
                            enable_model_summary=False)
    trainer.fit(SmallModule(), batches(), **given)
    return recorder


def run(name: str, out: Path) -> dict[str, Any]:
    if name == EXAMPLE:
        return {"loss": main(["--stage", "3", "--out", str(out), "--devices", "2"])}
    straight = fit(CASES[name], out, seed=0)
    found = compare(Whole(), straight.record, SETTINGS)
    resumed = fit(CASES[name], out, seed=1, ckpt_path=str(out / f"step={SAVED}.ckpt"))
    found["resumed differs in"] = difference(resumed.state, straight.state)
    return found


if __name__ == "__main__":
    results_of([*CASES, EXAMPLE], run, Path(sys.argv[1]))
