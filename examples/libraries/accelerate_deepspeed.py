# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Muon under accelerate: the ds_config names the optimizer and the schedule, Dummy objects stand for them in the loop.

    torchrun --standalone --nproc-per-node 2 examples/libraries/accelerate_deepspeed.py --stage 3
"""

import argparse
from pathlib import Path
from typing import Any, Optional

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, set_seed

from counting import Counting, SmallNet, load_ds_config


def prepare(ds_config: dict[str, Any], seed: int = 0) -> tuple[Accelerator, Any, Any, Any]:
    """accelerator, model, optimizer and this rank's batches. Norms and biases are left without weight decay."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config))
    set_seed(seed)
    model = SmallNet()
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    optimizer = DummyOptim([{"params": matrices}, {"params": others, "weight_decay": 0.0}])
    batches = torch.utils.data.DataLoader(Counting(512), batch_size=4)
    model, optimizer, batches, _ = accelerator.prepare(model, optimizer, batches, DummyScheduler(optimizer))
    return accelerator, model, optimizer, batches


def train(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, micro_batches: int) -> list[float]:
    """Losses of this rank's next `micro_batches` micro-batches, from the first one on."""
    losses: list[float] = []
    for batch in batches:
        if len(losses) == micro_batches:
            break
        # Steps every gradient_accumulation_steps of the ds_config.
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main(arguments: Optional[list[str]] = None) -> float:
    """The last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    args = parser.parse_args(arguments)
    accelerator, model, optimizer, batches = prepare(load_ds_config("ds_config.json", args.stage))
    losses = train(accelerator, model, optimizer, batches, micro_batches=40)
    accelerator.save_state(str(args.out))
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, state in {args.out}")
    return losses[-1]


if __name__ == "__main__":
    main()
