# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The example's text: which files, which side of the split, which windows."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import text  # noqa: E402


@pytest.fixture
def source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixty files of 100 different bytes each, made in an order that is not the sorted one."""
    for number in reversed(range(60)):
        folder = tmp_path / f"package{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number:02}.py").write_bytes(f"{number:02}".encode() * 50)
    monkeypatch.setattr(text, "MIN_TEXT_BYTES", 100)
    return tmp_path


def test_source_files_are_sorted_and_leave_out_tests_and_other_files(source_tree: Path):
    for unwanted in ("test", "site-packages", "__pycache__"):
        (source_tree / "package0" / unwanted).mkdir()
        (source_tree / "package0" / unwanted / "module.py").write_text("x")
    (source_tree / "package1" / "notes.txt").write_text("x")
    found = list(text.source_files(source_tree))
    assert len(found) == 60
    assert found == sorted(found)


def test_split_is_disjoint_and_complete(source_tree: Path):
    corpus = text.load_corpus(source_tree)
    assert corpus.train_files and corpus.validation_files
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert len(corpus.train_files) + len(corpus.validation_files) == 60
    assert corpus.train.numel() == 100 * len(corpus.train_files)
    assert corpus.validation.numel() == 100 * len(corpus.validation_files)
    first = (source_tree / corpus.validation_files[0]).read_bytes()
    assert bytes(corpus.validation[:100].tolist()) == first


def test_a_file_keeps_its_side_when_others_go_and_a_copy_shares_it(source_tree: Path):
    before = text.load_corpus(source_tree)
    held_out = before.validation_files[0]
    (source_tree / "copy_of_held_out.py").write_bytes((source_tree / held_out).read_bytes())
    for name in before.train_files[::2]:
        (source_tree / name).unlink()
    after = text.load_corpus(source_tree)
    assert after.train_files == before.train_files[1::2]
    assert set(after.validation_files) == {*before.validation_files, "copy_of_held_out.py"}


def test_reading_stops_at_the_cap_with_whole_files(source_tree: Path):
    corpus = text.load_corpus(source_tree, max_bytes=1234)
    assert corpus.train.numel() + corpus.validation.numel() == 1200


def test_too_little_text_is_an_error_that_names_the_folder(tmp_path: Path):
    with pytest.raises(RuntimeError, match=str(tmp_path)):
        text.load_corpus(tmp_path)


def test_standard_library_gives_enough_text_with_a_tenth_held_out():
    corpus = text.load_corpus()
    share = corpus.validation.numel() / (corpus.train.numel() + corpus.validation.numel())
    assert corpus.train.numel() > 2_000_000
    assert 0.05 < share < 0.2
    assert not any("/test/" in f"/{name}" for name in corpus.train_files)


def test_random_windows_follow_the_seed_and_reach_the_last_byte():
    bytes_in_order = torch.arange(6, dtype=torch.uint8)
    windows = text.random_windows(bytes_in_order, 200, 4, torch.Generator().manual_seed(3))
    again = text.random_windows(bytes_in_order, 200, 4, torch.Generator().manual_seed(3))
    assert windows.dtype == torch.int64 and windows.shape == (200, 4)
    assert torch.equal(windows, again)
    assert {tuple(row) for row in windows.tolist()} == {(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)}


def test_spaced_windows_span_the_whole_text():
    windows = text.spaced_windows(torch.arange(100, dtype=torch.uint8), 4, 10)
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert windows[-1, -1] == 99
    assert text.spaced_windows(torch.arange(100, dtype=torch.uint8), 1, 10)[:, 0].tolist() == [0]
