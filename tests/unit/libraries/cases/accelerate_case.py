# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks: accelerate's loop on each engine. Writes what it found into OUT/results.json."""

import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

from accelerate_deepspeed import main, prepare, train
from counting import SmallNet, load_ds_config
from outcome import EXAMPLE, results_of
from whole import Record, Settings, compare, difference, in_fp32, state_of

SETTINGS = Settings(gas=2,
                    clip=0.1,
                    weight_decay=0.1,
                    betas=(0.9, 0.95),
                    eps=1e-10,
                    match_rms=False,
                    decay_vectors=False)
HALF = 4
CASES = {f"zero{stage}": stage for stage in (1, 2, 3)}


def run(name: str, out: Path) -> dict[str, Any]:
    if name == EXAMPLE:
        return {"loss": main(["--stage", "3", "--out", str(out)])}
    config = {**in_fp32(load_ds_config("ds_config.json", CASES[name])), "gradient_clipping": SETTINGS.clip}
    accelerator, engine, optimizer, batches = prepare(config)
    record = Record(engine)
    train(accelerator, engine, optimizer, batches, HALF)
    accelerator.save_state(str(out))
    train(accelerator, engine, optimizer, accelerator.skip_first_batches(batches, HALF), HALF)
    straight = state_of(engine)
    found = compare(SmallNet(), record, SETTINGS)
    found["norm"] = float(engine.get_global_grad_norm())
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, engine, optimizer, batches = prepare(config, seed=1)
    accelerator.load_state(str(out))
    train(accelerator, engine, optimizer, accelerator.skip_first_batches(batches, HALF), HALF)
    found["resumed differs in"] = difference(state_of(engine), straight)
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


if __name__ == "__main__":
    results_of([*CASES, EXAMPLE], run, Path(sys.argv[1]))
