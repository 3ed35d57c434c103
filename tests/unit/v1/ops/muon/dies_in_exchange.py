# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A rank of two, of which the second dies in the middle of its second step. Argument: the engine."""

import os
import sys
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.muon.exchange import Exchange
from unit.ranks.group import forbid_shared_memory_op
from unit.v1.ops.muon import contract
from unit.v1.ops.muon.contract import SHAPES, Gradients, ProductModel

EXIT_CODE, SEEN, TIMEOUT_S = 17, "the exchange failed", 20


def main(engine: str) -> None:
    forbid_shared_memory_op()
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    trained = contract.initialize(ProductModel(SHAPES), contract.ds_config(engine))
    gradients = Gradients(SHAPES, 2)
    contract.train_step(trained, gradients, 0)
    start = Exchange.start_all_to_all

    def dies(self: Exchange, *arguments: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(EXIT_CODE)
        return start(self, *arguments)

    with mock.patch.object(Exchange, "start_all_to_all", dies):
        began = time.monotonic()
        try:
            contract.train_step(trained, gradients, 1)
        except RuntimeError as error:
            contract.below("seconds until the error", time.monotonic() - began, TIMEOUT_S)
            print(SEEN, error, file=sys.stderr, flush=True)
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
