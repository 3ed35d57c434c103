# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest

TYPED = "def f(a: int, *, b: int = 0) -> int:\n    return a\n"
LONG = "def f() -> None:\n" + "    print()\n" * 60
SEVEN = "def f(self, a: int, b: int, c: int, d: int, e: int, g: int, h: int) -> None:\n    pass\n"


@pytest.mark.parametrize("text", [
    TYPED,
    LONG[:-len("    print()\n")],
    SEVEN,
    "x = 1\n" * 400,
    "class A:\n\n    def __init__(self, a: int):\n        pass\n",
    SEVEN.replace("def f(self", "def muon_update(z: int"),
    "@triton.jit\ndef f(a, b, c, d, e, g, h, i):\n    pass\n",
])
def test_what_is_within_the_measures_is_accepted(check_file, text):
    assert check_file("check_measures", text) == []


@pytest.mark.parametrize("text, said", [
    (LONG, "f has 61 lines"),
    ("x = 1\n" * 401, "401 lines"),
    (SEVEN.replace("(self", "(z: int"), "f has 8 parameters"),
    (SEVEN.replace("h: int", "h: int, **k: int"), "f has 8 parameters"),
    ("def f(a, b: int) -> int:\n    return a\n", "no type for: a"),
    ("@triton.autotune\ndef f(a, b: int) -> int:\n    return a\n", "no type for: a"),
    ("async def f(a: int):\n    return a\n", "no type for: what it returns"),
])
def test_what_exceeds_them_is_found(check_file, text, said):
    found = check_file("check_measures", text)
    assert len(found) == 1 and said in found[0]


def test_tests_may_be_long_files_without_types(check_file):
    assert check_file("check_measures", "x = 1\n" * 401, "tests/unit/test_x.py") == []
    assert check_file("check_measures", "def f(a):\n    return a\n", "tests/unit/test_x.py") == []
    assert len(check_file("check_measures", LONG, "tests/unit/test_x.py")) == 1
