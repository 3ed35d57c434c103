# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the examples of this folder train on: sequences that count, in steps of one size each, from any start."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCAB_SIZE = 64
SEQUENCE_LENGTH = 16
FOLDER = Path(__file__).resolve().parent


class Counting(torch.utils.data.Dataset):
    """`size` sequences, int64 [SEQUENCE_LENGTH], the same ones in every process; `labels` are the inputs."""

    def __init__(self, size: int, first: int = 0):
        index = torch.arange(first, first + size)
        start, step = index * 7 % VOCAB_SIZE, 1 + index % 3
        self.tokens = (start[:, None] + step[:, None] * torch.arange(SEQUENCE_LENGTH)) % VOCAB_SIZE

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class SmallNet(nn.Module):
    """Predicts the next token from this one and the one before it. Two matrices in its hidden layer."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.norm = nn.LayerNorm(2 * width)
        self.up = nn.Linear(2 * width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.lm_head = nn.Linear(width, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss, 0-dim; `input_ids` and `labels` are int64 [batch, SEQUENCE_LENGTH]."""
        embedded = self.embedding(input_ids)
        pairs = torch.cat([embedded[:, :-2], embedded[:, 1:-1]], dim=-1)
        logits = self.lm_head(self.down(torch.relu(self.up(self.norm(pairs)))))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 2:].flatten())


def load_ds_config(name: str, stage: int) -> dict[str, Any]:
    """The ds_config `name` of this folder, with another ZeRO stage."""
    config = json.loads((FOLDER / name).read_text())
    config["zero_optimization"]["stage"] = stage
    return config
