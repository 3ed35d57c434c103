# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What ranks hand to the test that started them."""

import json
from pathlib import Path
from typing import Any, Callable, Iterable

import deepspeed.comm as dist

# The case that is the example itself, as a user runs it.
EXAMPLE = "example"


def results_of(names: Iterable[str], run: Callable[[str, Path], dict[str, Any]], out: Path) -> None:
    """Runs each case and, on rank 0, writes OUT/results.json after each, so that a failure leaves those before it."""
    results: dict[str, Any] = {}
    for name in names:
        results[name] = run(name, out / name.replace(" ", "-"))
        if dist.get_rank() == 0:
            (out / "results.json").write_text(json.dumps(results))
