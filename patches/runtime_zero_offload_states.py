# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Moving states to the CPU and back, between phases of a training."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/zero/offload_states.py"

_move = partial(Edit,
                engine="ZeRO-3",
                drop_when="upstream moves the states that it finds",
                series="checkpoints",
                why="It moved Adam's two states by name; Muon's momentum stayed on the accelerator.")

EDITS = [
    _move("prepend",
          scope="offload_adam_states",
          code="""
              if any("momentum_buffer" in state for state in optimizer.state.values()):
                  offload_optimizer_states(optimizer, device, pin_memory=pin_memory, non_blocking=non_blocking)
                  return
          """),
    _move("prepend",
          scope="reload_adam_states",
          code="""
              if any("momentum_buffer" in state for state in optimizer.state.values()):
                  # Blocking, for nobody would keep the buffers on the host until the copies are made.
                  reload_optimizer_states(optimizer, device)
                  return
          """),
    _move("replace",
          scope="get_state_devices",
          within="elif state == OffloadStateTypeEnum.optim_states:",
          anchor="return $DEVICES",
          code="""
              states = model.optimizer.optimizer.state.values()
              return {value.device for state in states for value in state.values() if torch.is_tensor(value) and
              value.dim()}
          """),
]
