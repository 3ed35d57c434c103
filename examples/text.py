# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The training text: Python's own standard library, as bytes.

Real text that is on every machine which can run this example; 256 byte values need no tokenizer and no download.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import torch

VOCAB_SIZE = 256

# Folders without text worth learning: test suites are large and repetitive, `encodings` is tables of code points, and
# site-packages depends on what happens to be installed.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})

MAX_TEXT_BYTES = 20_000_000
MIN_TEXT_BYTES = 500_000
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts, each a 1-D uint8 tensor on the CPU: the concatenated bytes of its files."""
    train: torch.Tensor
    validation: torch.Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


def source_files(root: Path) -> Iterator[Path]:
    """Yields the Python files under ``root`` outside SKIPPED_FOLDERS, in an order that depends on their names only."""
    for folder, subfolders, names in os.walk(root):
        # os.walk follows the order of this list, and the file system's own order differs between machines.
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def is_validation(content: bytes) -> bool:
    """Says whether a file is held out, from its content alone.

    A file keeps its side when others come or go, and two copies of one file can never lie on both sides.
    """
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def load_corpus(root: Path | None = None, max_bytes: int = MAX_TEXT_BYTES) -> Corpus:
    """Reads at most ``max_bytes`` bytes of whole files under ``root`` (default: this Python's standard library).

    Raises RuntimeError where there are fewer than MIN_TEXT_BYTES, as in a Python that ships compiled files only.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    names: dict[bool, list[str]] = {False: [], True: []}
    total_bytes = 0
    for path in source_files(root):
        content = path.read_bytes()
        if total_bytes + len(content) > max_bytes:
            break
        total_bytes += len(content)
        held_out = is_validation(content)
        texts[held_out].append(content)
        names[held_out].append(path.relative_to(root).as_posix())
    if total_bytes < MIN_TEXT_BYTES:
        raise RuntimeError(f"{root} holds {total_bytes} bytes of Python source, training needs {MIN_TEXT_BYTES}: "
                           "use a Python that has its standard library as .py files")
    return Corpus(train=_as_tensor(texts[False]),
                  validation=_as_tensor(texts[True]),
                  train_files=tuple(names[False]),
                  validation_files=tuple(names[True]))


def random_windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Returns ``count`` windows of ``length`` bytes from random places of ``text``, int64 [count, length]."""
    starts = torch.randint(text.numel() - length + 1, (count, ), generator=generator)
    return _windows(text, starts, length)


def spaced_windows(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Returns ``count`` windows of ``length`` bytes spread evenly over ``text``, int64 [count, length]."""
    starts = torch.arange(count) * (text.numel() - length) // max(count - 1, 1)
    return _windows(text, starts, length)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def _as_tensor(contents: list[bytes]) -> torch.Tensor:
    # bytearray: torch warns about memory that it must not write to.
    return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
