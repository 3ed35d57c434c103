# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A stand-in for DeepSpeed's quantizer, which is a CUDA kernel: the same functions, in torch.

It rounds as a quantizer does, to 8 or 4 bits with a scale for each group, so that what DeepSpeed does around the
kernel runs on a CPU: which tensors it quantizes, sends, and puts together. How the kernel packs its bits is not shown.
"""

from contextlib import contextmanager
from typing import Any, Iterator, Tuple
from unittest import mock

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

Quantized = Tuple[torch.Tensor, torch.Tensor]


class Quantizer:
    """Values are integers in int8, one for each element also at 4 bits; scales are fp32, one for each group."""
    Symmetric = "symmetric"

    def __init__(self) -> None:
        self.weights_quantized = 0
        self.gradients_reduced = 0

    def quantize(self, values: torch.Tensor, groups: int, bits: int, kind: str) -> Quantized:
        assert kind == self.Symmetric and values.numel() % groups == 0
        self.weights_quantized += 1
        return _rounded(values.float().view(groups, -1), bits, values.shape)

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor, groups: int, bits: int,
                   kind: str) -> torch.Tensor:
        whole = values.float().view(groups, -1) * scales.view(-1, 1)
        return whole.view(values.shape)

    def swizzle_quant(self, gradient: torch.Tensor, groups: int, bits: int, kind: str, pipeline: int, nodes: int,
                      local_size: int) -> Quantized:
        """The shares of all ranks, [node, local rank, ...], ordered by the local rank that they are sent to first."""
        shares = gradient.reshape(nodes, local_size, -1).transpose(0, 1).reshape(nodes * local_size, -1)
        return _rounded(shares.float(), bits, (gradient.numel(), ))

    def quantized_reduction(self, received: torch.Tensor, scales: torch.Tensor, groups_in: int, groups_out: int,
                            bits: int, kind: str, local_size: int) -> Quantized:
        """The mean of what the local ranks have sent, one share for each node, quantized again."""
        self.gradients_reduced += 1
        shares = received.float().view(scales.numel(), -1) * scales.view(-1, 1)
        mean = shares.view(local_size, scales.numel() // local_size, -1).mean(0)
        return _rounded(mean, bits, (mean.numel(), ))


def _rounded(groups: torch.Tensor, bits: int, shape: Any) -> Quantized:
    """[groups, elements] to whole multiples of each group's scale."""
    largest = 2**(bits - 1) - 1
    scales = groups.abs().amax(dim=1).clamp(min=1e-12) / largest
    values = torch.round(groups / scales.view(-1, 1)).to(torch.int8)
    return values.view(shape), scales


@contextmanager
def quantizing(local_size: int) -> Iterator[Quantizer]:
    """DeepSpeed quantizes with the stand-in, on nodes of `local_size` ranks each."""
    quantizer = Quantizer()
    with mock.patch.object(CUDAQuantizer, "quantizer_cuda_module", quantizer), \
            mock.patch.object(coalesced_collectives, "quantizer_module", quantizer), \
            mock.patch.object(get_accelerator(), "device_count", lambda: local_size):
        yield quantizer
