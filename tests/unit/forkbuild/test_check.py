# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`check` on a made-up project with one thing wrong at a time."""

import pytest

from forkbuild import ForkError
from forkbuild.check import problems
from unit.forkbuild.conftest import write, write_lock


def replaced(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    write(path, text.replace(old, new))


def test_a_sound_patch_set_has_no_problems(small):
    assert problems(small) == []


@pytest.mark.parametrize("field, value", [("why", "w"), ("engine", "e"), ("drop_when", "d")])
def test_a_missing_header(small, field, value):
    replaced(small.root / "patches" / "engine.py", f'{field}="{value}"', f'{field}=" "')
    assert problems(small) == [
        f"deepspeed/engine.py: insert_after in Engine.step, at `first = 1`: the header lacks {field}."
    ]


def test_an_unknown_commit(small):
    replaced(small.root / "patches" / "engine.py", 'series="step"', 'series="stop"')
    found = problems(small)
    assert any("patches/series.py has no commit 'stop'" in line for line in found)
    assert any("no edit and no file belongs to the commit 'step'" in line for line in found)


def test_a_duplicate_edit(small):
    edit = 'Edit("append", scope="Engine.step", code="x()", why="w", engine="e", drop_when="d", series="step"),'
    replaced(small.root / "patches" / "engine.py", "\n]", f"\n    {edit}\n    {edit}\n]")
    assert problems(small) == ["deepspeed/engine.py: append in Engine.step: the same edit is there twice; drop one."]


def test_every_edit_that_does_not_apply_is_listed(small):
    edit = 'Edit("append", scope="Engine.{}", code="x()", why="w", engine="e", drop_when="d", series="step"),'
    replaced(small.root / "patches" / "engine.py", "\n]", f"\n    {edit.format('a')}\n    {edit.format('b')}\n]")
    found = problems(small)
    assert [line for line in found if "Engine.a: no match for the scope" in line]
    assert [line for line in found if "Engine.b: no match for the scope" in line]


def test_a_module_without_edits_and_one_with_another_name(small):
    write(small.root / "patches" / "wrong.py", 'FILE = "deepspeed/__init__.py"\nEDITS = []\n')
    assert problems(small) == [
        "patches/wrong.py is about deepspeed/__init__.py; rename it to init.py.",
        "patches/wrong.py has no edits; delete it.",
    ]


def test_two_modules_for_one_file(small):
    write(small.root / "patches" / "zz.py", 'FILE = "deepspeed/engine.py"\nEDITS = []\n')
    with pytest.raises(ForkError, match="a second module for deepspeed/engine.py"):
        problems(small)


def test_a_module_that_does_not_load(small):
    write(small.root / "patches" / "zz.py", "FILE = 1 / 0\n")
    with pytest.raises(ForkError, match="zz.py does not load: ZeroDivisionError"):
        problems(small)
    write(small.root / "patches" / "zz.py", 'FILE = "a.py"\n')
    with pytest.raises(ForkError, match="zz.py does not set EDITS"):
        problems(small)


def test_a_file_that_no_commit_comes_with(small):
    write(small.root / "deepspeed" / "lonely.py", "")
    assert problems(small) == ["deepspeed/lonely.py: no commit in patches/series.py comes with this file."]


def test_a_pattern_without_files_and_a_commit_without_anything(small):
    replaced(small.root / "patches" / "series.py", '"deepspeed/old/*.py"', '"deepspeed/old/*.py", "requirements/*"')
    replaced(small.root / "patches" / "series.py", "]\nREPLACES", '    Commit("idle", "s", "b"),\n]\nREPLACES')
    assert problems(small) == [
        "patches/series.py: 'package': no file of ours matches 'requirements/*'.",
        "patches/series.py: no edit and no file belongs to the commit 'idle'; drop it.",
    ]


def test_a_commit_that_names_a_file_has_it(small):
    write(small.root / "deepspeed" / "old" / "tool.py", "")
    assert small.patches().commit_of("deepspeed/old/tool.py") == small.patches().position("package")
    named = '    Commit("tool", "s", "b", ("deepspeed/old/tool.py", )),\n]\nREPLACES'
    replaced(small.root / "patches" / "series.py", "]\nREPLACES", named)
    assert small.patches().commit_of("deepspeed/old/tool.py") == small.patches().position("tool")
    assert small.patches().commit_of("deepspeed/old/__init__.py") == small.patches().position("package")
    assert problems(small) == []


def test_a_folder_that_the_release_does_not_have(small):
    replaced(small.root / "patches" / "series.py", 'Replace("deepspeed/old"', 'Replace("deepspeed/gone"')
    assert problems(small) == ["replace deepspeed/gone: the release has no such folder."]


def test_the_lock_has_a_function_too_many_or_too_few(small):
    write(small.root / "patches" / "leans_on.py", "LEANS_ON = {}\n")
    assert [line.partition(";")[0] for line in problems(small)
            ] == ["deepspeed/engine.py: Engine.other: in seams.lock, but no edit and no LEANS_ON entry names it"]
    write_lock(small)
    assert problems(small) == []
    write(small.root / "patches" / "leans_on.py", 'LEANS_ON = {"deepspeed/engine.py": {"Engine.other": "why"}}\n')
    assert problems(small) == ["deepspeed/engine.py: Engine.other: not in seams.lock; run `python -m forkbuild lock`."]


def test_a_function_that_the_release_does_not_have_cannot_be_locked(small):
    write(small.root / "patches" / "leans_on.py", 'LEANS_ON = {"deepspeed/engine.py": {"Engine.gone": "why"}}\n')
    with pytest.raises(ForkError, match="does not define exactly once: deepspeed/engine.py: Engine.gone"):
        write_lock(small)
    assert any("Engine.gone" in line for line in problems(small))


def test_a_commit_that_needs_a_later_one(small):
    edit = 'Edit("insert_after", scope="Engine.step", anchor="x()", code="y()", why="w", engine="e", drop_when="d", ' \
           'series="step"),'
    later = 'Edit("prepend", scope="Engine.step", code="x()", why="w", engine="e", drop_when="d", series="package"),'
    replaced(small.root / "patches" / "engine.py", "\n]", f"\n    {edit}\n    {later}\n]")
    # The series decides the order, so the edit of the first commit does not see what the second one brings.
    assert any("at `x()`: no match" in line for line in problems(small))


def test_this_checkout_is_sound(fork):
    assert problems(fork) == []
