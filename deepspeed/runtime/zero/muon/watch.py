# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What looks into a Muon step from inside, without a say in it: the self-test and the statistics."""

from typing import TYPE_CHECKING, Any, Sequence

import torch

if TYPE_CHECKING:
    from deepspeed.runtime.zero.muon.step import MuonStep


class Watcher:
    """Called by a `MuonStep` that has it in `watchers`, in the order of the methods below; here each does nothing.

    Tensors are the step's own: not to be changed, and valid during the call only. Reading a value on the host would
    make the host wait for the device, so what is wanted is kept in tensors and read later.
    """

    def begin(self, step: "MuonStep") -> None:
        """Before anything is changed; `step.partitions` are there."""

    def before_iteration(self, step: "MuonStep", matrices: Sequence[int], x: torch.Tensor) -> None:
        """`x` [len(matrices), rows, cols]: owned matrices of the plan, normalized, in the dtype of the iteration."""

    def after_iteration(self, step: "MuonStep", matrices: Sequence[int], x: torch.Tensor) -> None:
        """The same, orthogonalized."""

    def before_weights(self, step: "MuonStep", part: Any, updates: Sequence[torch.Tensor],
                       factors: Sequence[float]) -> None:
        """The slices of `part` are about to be stepped by `factors[i]` (lr times scale) times `updates[i]`."""

    def end(self, step: "MuonStep") -> None:
        """All weights are stepped; `step.partitions` are still there."""

    def weights_were_set(self) -> None:
        """Between two steps: the weights are others than the last step has left."""
