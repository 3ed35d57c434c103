# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where DeepSpeed and its users import the optimizer from."""

from deepspeed.runtime.zero.muon.optimizer import MuonWithAuxAdam

__all__ = ["MuonWithAuxAdam"]
