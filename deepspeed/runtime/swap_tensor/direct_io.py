# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What NVMe offload may ask of direct I/O: memory, file offsets and lengths in whole blocks of the device.

async_io does not look at the results of what it has submitted. A read that the kernel refuses leaves in the buffer
what another tensor has put there, and nobody is told.
"""

import os
from typing import Any, List, Sequence, Tuple

import torch


def cut_at_alignment(tensors: Sequence[torch.Tensor], offsets: Sequence[int],
                     alignment: int) -> Tuple[List[torch.Tensor], List[int]]:
    """The same flat tensors, those that start between two multiples of `alignment` cut in two at the next one.

    `offsets` are their places in a buffer that is itself aligned; all in elements. The first pieces are copies, so
    that they can be kept without what they were cut from.
    """
    pieces: List[torch.Tensor] = []
    starts: List[int] = []
    for tensor, offset in zip(tensors, offsets):
        head = min(-offset % alignment, tensor.numel())
        if head:
            pieces.append(tensor.narrow(0, 0, head).clone())
            starts.append(offset)
        if head < tensor.numel():
            pieces.append(tensor.narrow(0, head, tensor.numel() - head))
            starts.append(offset + head)
    return pieces, starts


def check_folder(aio_handle: Any, folder: str, num_bytes: int) -> None:
    """Raises ValueError where a file in `folder` does not return the `num_bytes` that were written to it, which is the
    smallest unit of what is going to be swapped. Leaves no file behind."""
    path = os.path.join(folder, "direct_io_check.swp")
    example = torch.zeros(1, dtype=torch.uint8)
    written, found = (aio_handle.new_cpu_locked_tensor(num_bytes, example) for _ in range(2))
    try:
        written.copy_(torch.arange(num_bytes) % 251 + 1)
        found.zero_()
        returned = aio_handle.async_pwrite(written, path, 0) == 0 and aio_handle.wait() == 1
        # A read beyond the end of the file would end the process.
        returned = returned and os.path.getsize(path) == num_bytes
        returned = returned and aio_handle.async_pread(found, path, 0) == 0 and aio_handle.wait() == 1
        if not returned or not torch.equal(written, found):
            raise ValueError(
                f"zero_optimization.offload_optimizer.nvme_path: {folder} does not return what is written to it by "
                f"direct I/O in units of {num_bytes} bytes, and DeepSpeed cannot swap in larger ones. Use a folder on "
                "a device with logical blocks of 512 bytes.")
    finally:
        for buffer in (written, found):
            aio_handle.free_cpu_locked_tensor(buffer)
        if os.path.exists(path):
            os.remove(path)
