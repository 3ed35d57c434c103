# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""benchmarks/plots.py reads the tables that are in benchmarks/results/ and draws them."""

import importlib.util
import shutil
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[5] / "benchmarks" / "plots.py"
PAGE = """
| engine | ranks |
|---|---|
| zero1 | 2 |
| zero3 | 4 |

| other |
|---|
| 1 |
"""


@pytest.fixture(scope="module")
def plots():
    spec = importlib.util.spec_from_file_location("plots", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_a_page(plots):
    assert plots.tables(PAGE) == [[{
        "engine": "zero1",
        "ranks": "2"
    }, {
        "engine": "zero3",
        "ranks": "4"
    }], [{
        "other": "1"
    }]]


def test_spread(plots):
    assert plots.spread_of("0.75 (0.74 to 0.77)") == (0.75, 0.74, 0.77)
    assert plots.spread_of("2.000") == (2, 2, 2)
    with pytest.raises(ValueError, match="not a median with its spread: ''"):
        plots.spread_of("")


def test_the_results_are_drawn(plots, tmp_path, monkeypatch):
    for name in ("engines.md", "others.md"):
        shutil.copy(plots.RESULTS / name, tmp_path)
    monkeypatch.setattr("sys.argv", ["plots.py", str(tmp_path)])
    plots.main()
    for name in ("engines.png", "others.png"):
        drawn = (tmp_path / name).read_bytes()
        assert drawn.startswith(b"\x89PNG") and len(drawn) < 200_000
        assert (plots.RESULTS / name).is_file(), "draw it: python benchmarks/plots.py"
