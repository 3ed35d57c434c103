# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""NVMe offload: gradients, masters and states in files."""

from functools import partial

from forkbuild.edit import Edit

FILE = "deepspeed/runtime/swap_tensor/optimizer_utils.py"
SWAPPER = "OptimizerSwapper"

_swap = partial(Edit, engine="ZeRO-3, NVMe offload", series="nvme_offload")

EDITS = [
    _swap("insert_after",
          anchor="from deepspeed.utils.logging import logger",
          code="from deepspeed.runtime.swap_tensor import direct_io",
          why="The two functions.",
          drop_when="upstream aligns gradients to blocks"),
    _swap(
        "insert_after",
        scope=f"{SWAPPER}.__init__",
        anchor="self.swap_buffer_manager = SwapBufferManager($$$ARGS)",
        code="direct_io.check_folder(aio_handle, self.swap_folder, self.aligned_bytes)",
        why="On a device with larger blocks nothing was written or read, and training went on with what buffers held.",
        drop_when="upstream's async_io reports failed reads and writes"),
    _swap(
        "prepend",
        scope=f"{SWAPPER}._adjust_for_misaligned_lengths",
        code="tensors, offsets = direct_io.cut_at_alignment(tensors, offsets, self.numel_alignment)",
        why="A gradient of 1 MiB or more behind a parameter of odd size was not read back: the step took what was in "
        "the buffer, with any optimizer.",
        drop_when="upstream aligns gradients to blocks"),
]
