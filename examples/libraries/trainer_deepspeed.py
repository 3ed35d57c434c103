# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Muon under the Trainer of transformers: the ds_config names it, and "auto" takes values from TrainingArguments.

    torchrun --standalone --nproc-per-node 2 examples/libraries/trainer_deepspeed.py --stage 3

With `"adjust_lr_fn": "match_rms_adamw"` the learning rate is the one of AdamW, for both halves.
"""

import argparse
import os
from pathlib import Path
from typing import Any, Optional

# The model is made from a config; without this transformers may ask the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from accelerate.utils import DummyOptim  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed  # noqa: E402

from counting import SEQUENCE_LENGTH, VOCAB_SIZE, Counting, load_ds_config  # noqa: E402


class GroupedTrainer(Trainer):
    """Leaves norms and biases without weight decay, which the Trainer does for its own optimizers only."""

    def create_optimizer(self, model: Any = None) -> Any:
        # The Trainer puts a DummyOptim in the optimizer's place when the ds_config has one.
        if isinstance(self.optimizer, DummyOptim):
            decayed = set(self.get_decay_parameter_names(self.model))
            named = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
            self.optimizer.params = [
                {
                    "params": [param for name, param in named if name in decayed]
                },
                {
                    "params": [param for name, param in named if name not in decayed],
                    "weight_decay": 0.0
                },
            ]
        return super().create_optimizer(model)


def build_trainer(ds_config: dict[str, Any], out: Path, **changes: Any) -> GroupedTrainer:
    """A trainer of a tiny Llama. `changes` are fields of TrainingArguments."""
    # First, so that under ZeRO-3 the model is made in slices.
    arguments = TrainingArguments(
        **{
            "output_dir": str(out),
            "deepspeed": ds_config,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 3e-3,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            "warmup_steps": 2,
            "max_steps": 20,
            "eval_strategy": "steps",
            "eval_steps": 10,
            "save_steps": 10,
            "logging_steps": 1,
            "report_to": "none",
            **changes,
        })
    set_seed(arguments.seed)
    config = LlamaConfig(vocab_size=VOCAB_SIZE,
                         hidden_size=32,
                         intermediate_size=48,
                         num_hidden_layers=2,
                         num_attention_heads=4,
                         num_key_value_heads=2,
                         max_position_embeddings=SEQUENCE_LENGTH,
                         bos_token_id=None,
                         eos_token_id=None)
    return GroupedTrainer(model=AutoModelForCausalLM.from_config(config),
                          args=arguments,
                          train_dataset=Counting(512),
                          eval_dataset=Counting(64, first=1000))


def main(arguments: Optional[list[str]] = None) -> float:
    """The last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    args = parser.parse_args(arguments)
    trainer = build_trainer(load_ds_config("ds_config_auto.json", args.stage), args.out, bf16=args.bf16)
    trainer.train(resume_from_checkpoint=args.resume or None)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(metrics)
    return metrics["eval_loss"]


if __name__ == "__main__":
    main()
