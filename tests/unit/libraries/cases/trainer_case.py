# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks: the Trainer on each engine. Writes what it found into OUT/results.json."""

import sys
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, TrainerCallback

from counting import load_ds_config
from outcome import EXAMPLE, results_of
from trainer_deepspeed import build_trainer, main
from whole import Record, Settings, compare, difference, in_fp32, state_of

STEPS, SAVED, CLIP = 4, 2, 0.1


class Recorder(TrainerCallback):
    """Starts the record when the engine is there and nothing is trained yet."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.record: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.record = Record(self.trainer.deepspeed)


def auto(stage: int) -> dict[str, Any]:
    return in_fp32(load_ds_config("ds_config_auto.json", stage))


def two_rates(stage: int) -> dict[str, Any]:
    """The two halves' own rates, under the Trainer's own schedule."""
    config = auto(stage)
    del config["scheduler"]
    params = config["optimizer"]["params"]
    del params["lr"], params["adjust_lr_fn"]
    params.update(muon_lr=0.02, adam_lr=0.003)
    return config


def bf16_optimizer() -> dict[str, Any]:
    return {**auto(1), "data_types": {"grad_accum_dtype": "fp32"}}


# name: (ds_config, whether it is in bf16)
CASES = {
    "zero1": (auto(1), False),
    "zero2": (auto(2), False),
    "zero3": (auto(3), False),
    "bf16": (bf16_optimizer(), True),
    "two rates": (two_rates(2), False),
}


def run(name: str, out: Path) -> dict[str, Any]:
    if name == EXAMPLE:
        return {"loss": main(["--stage", "3", "--out", str(out)])}
    config, bf16 = CASES[name]
    changes = {
        "max_steps": STEPS,
        "save_steps": SAVED,
        "eval_steps": SAVED,
        "max_grad_norm": CLIP,
        "bf16": bf16,
        "disable_tqdm": True
    }
    trainer = build_trainer(config, out, **changes)
    recorder = Recorder(trainer)
    trainer.add_callback(recorder)
    trainer.train()
    straight = state_of(trainer.deepspeed)
    settings = Settings(gas=2,
                        clip=CLIP,
                        weight_decay=0.1,
                        betas=(0.9, 0.95),
                        eps=1e-8,
                        match_rms=name != "two rates",
                        decay_vectors=False)
    found = compare(LlamaForCausalLM(trainer.model.config), recorder.record, settings)
    found["optimizer"] = type(trainer.deepspeed.optimizer).__name__
    found["evaluation"] = trainer.evaluate()["eval_loss"]
    resumed = build_trainer(config, out, **changes)
    resumed.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED}"))
    found["resumed differs in"] = difference(state_of(resumed.deepspeed), straight)
    found["resumed at step"] = resumed.state.global_step
    return found


if __name__ == "__main__":
    results_of([*CASES, EXAMPLE], run, Path(sys.argv[1]))
