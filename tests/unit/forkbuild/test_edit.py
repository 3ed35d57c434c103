# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Each operation on a small source, and what each says when it does not fit."""

import difflib
import textwrap

import pytest

from forkbuild.edit import Edit, EditError, apply_edit, apply_edits
from forkbuild.seams import digest
from forkbuild.syntax import definitions, parse

SOURCE = '''\
# A header that belongs to the file.
import os
from package.sub import first, second as other
from package.single import only

# About A.
class A:
    """Doc."""
    limit = 3

    # About run.
    @staticmethod
    def run(x):
        """Doc."""
        # About y.
        y = compute(x, 1)  # trailing

        for item in x:
            use(item)
        if x:
            use(y)
        elif y:  # a comment
            use(y)
        else:
            use(None)
        try:
            use(1)
        except ValueError as error:
            use(error)

        def inner():
            y = compute(x, 1)
            return y

        return inner

    def stop(self):
        use(1)
        use(2)

        return 0


def outside(é):
    return "é"  # é
'''


def edited(op: str, **fields: str) -> str:
    return apply_edit("f.py", SOURCE, Edit(op, **fields))


def failure(op: str, **fields: str) -> str:
    with pytest.raises(EditError) as caught:
        edited(op, **fields)
    return str(caught.value)


def lines_changed(result: str) -> tuple:
    """Lines that went and lines that came, in order."""
    diff = list(difflib.ndiff(SOURCE.splitlines(), result.splitlines()))
    return [line[2:] for line in diff if line.startswith("- ")], [line[2:] for line in diff if line.startswith("+ ")]


def test_remove_definition_takes_decorators_comments_and_one_gap():
    result = edited("remove_definition", scope="A.run")
    assert "run" not in result and "About run" not in result and "staticmethod" not in result
    assert "    limit = 3\n\n    def stop(self):\n" in result
    assert edited("remove_definition", scope="A").startswith("# A header that belongs to the file.\nimport os\n")
    assert edited("remove_definition", scope="A").endswith("import only\n\n\ndef outside(é):\n    return \"é\"  # é\n")
    assert edited("remove_definition", scope="outside").endswith("        return 0\n")
    assert "            use(error)\n\n        return inner\n" in edited("remove_definition", scope="A.run.inner")


def test_remove_takes_the_comments_above_and_beside():
    gone, come = lines_changed(edited("remove", scope="A.run", anchor="y = compute($$$)"))
    assert gone == ["        # About y.", "        y = compute(x, 1)  # trailing"] and not come
    result = edited("remove", scope="A.stop", anchor="return 0")
    assert "use(2)\n\n\ndef outside" in result  # no blank line stays behind at the end of the body


def test_the_scope_of_a_function_excludes_the_functions_in_it():
    gone, _ = lines_changed(edited("remove", scope="A.run.inner", anchor="y = compute(x, 1)"))
    assert gone == ["            y = compute(x, 1)"]


@pytest.mark.parametrize("anchor, removed", [
    ("for $ITEM in x:", ["for item in x:", "use(item)"]),
    ("if x:", ["if x:", "use(y)", "elif y:  # a comment", "use(y)", "else:", "use(None)"]),
    ("try:", ["try:", "use(1)", "except ValueError as error:", "use(error)"]),
    ("def inner():", ["def inner():", "y = compute(x, 1)", "return y"]),
])
def test_a_compound_statement_is_named_by_its_header(anchor, removed):
    gone, come = lines_changed(edited("remove", scope="A.run", anchor=anchor))
    assert [line.strip() for line in gone if line] == removed and not come


def test_replace_keeps_the_indentation_of_the_anchor():
    gone, come = lines_changed(
        edited("replace",
               scope="A.run",
               anchor="for $I in $X:",
               code="""
               with x:

                   new()
               """))
    assert gone == ["        for item in x:", "            use(item)"]
    assert come == ["        with x:", "", "            new()"]


def test_insert_before_stands_above_the_comments_of_the_anchor():
    result = edited("insert_before", scope="A.run", anchor="y = compute(x, 1)", code="new()")
    assert "        new()\n        # About y.\n        y = " in result
    assert "class A:\n" in edited("insert_before", scope="A", anchor="def run(x):", code="new = 1")
    assert "    new = 1\n    # About run.\n    @static" in edited("insert_before",
                                                                  scope="A",
                                                                  anchor="def run(x):",
                                                                  code="new = 1")


def test_insert_after_stands_below_the_whole_statement():
    assert "  # trailing\n        new()\n" in edited("insert_after",
                                                     scope="A.run",
                                                     anchor="y = compute($$$)",
                                                     code="new()")
    assert "use(None)\n        new()\n        try" in edited("insert_after",
                                                             scope="A.run",
                                                             anchor="if x:",
                                                             code="new()")


def test_insert_before_the_first_statement_leaves_the_header_of_the_file_alone():
    assert edited("insert_before", anchor="import os", code="import sys").startswith(SOURCE[:36] + "\nimport sys\n")


@pytest.mark.parametrize("within, place", [
    ("if x:", "        if x:\n            new()\n            use(y)\n"),
    ("elif y:", "        elif y:  # a comment\n            new()\n            use(y)\n"),
    ("else:", "        else:\n            new()\n"),
    ("except ValueError as $E:", "error:\n            new()\n            use(error)\n"),
])
def test_prepend_into_a_clause(within, place):
    assert place in edited("prepend", scope="A.run", within=within, code="new()")


def test_prepend_and_append_to_a_body():
    assert '"""Doc."""\n        new()\n        # About y.\n' in edited("prepend", scope="A.run", code="new()")
    assert '"""Doc."""\n    new = 1\n    limit' in edited("prepend", scope="A", code="new = 1")
    assert "        return 0\n        new()\n" in edited("append", scope="A.stop", code="new()")
    assert "        return 0\n\n    def new(self):\n        pass\n\n\ndef out" in edited(
        "append", scope="A", code="def new(self):\n    pass")
    assert edited("append", code="def new():\n    pass").endswith("# é\n\n\ndef new():\n    pass\n")


def test_within_limits_the_search():
    gone, come = lines_changed(edited("replace", scope="A.run", within="elif y:", anchor="use(y)", code="new()"))
    assert come == ["            new()"]
    assert gone == ["            use(y)"]


NESTED = """\
def f(x):
    if x:
        for y in x:
            if x:
                use(y)
            else:
                use(1)
    else:
        use(2)
"""


def test_a_path_of_headers_tells_alike_ones_apart():
    with pytest.raises(EditError, match="2 matches instead of 1 for the header `else:`: lines 6, 8"):
        apply_edit("f.py", NESTED, Edit("prepend", scope="f", within="else:", code="new()"))
    path = "for y in x: > else:"
    result = apply_edit("f.py", NESTED, Edit("replace", scope="f", within=path, anchor="use($X)", code="new()"))
    assert result == NESTED.replace("use(1)", "new()")
    with pytest.raises(EditError, match="no match for the header `else:`; nearest there: line 6: elif x:"):
        apply_edit("f.py", NESTED.replace("            else", "            elif x"),
                   Edit("prepend", scope="f", within=path, code="new()"))


def test_replace_expression_carries_over_what_metavariables_matched():
    result = edited("replace_expression", scope="A.run", anchor="compute($X, $$$REST)", code="fast(0, $X, $$$REST)")
    assert "y = fast(0, x, 1)  # trailing" in result and result.count("compute") == 1
    assert 'return "é", 1  # é' in edited("replace_expression", scope="outside", anchor='"é"', code='"é", 1')


@pytest.mark.parametrize("anchor, code, expected", [
    ("from package.sub import first", "", "from package.sub import second as other\n"),
    ("from package.sub import second as other", "", "from package.sub import first\n"),
    ("from package.sub import first", "import new", "from package.sub import second as other\nimport new\n"),
    ("from package.single import only", "import new", "import first, second as other\nimport new\n\n"),
    ("from package.single import only", "", "import first, second as other\n\n# About A"),
    ("import os", "import sys", "the file.\nimport sys\n"),
])
def test_replace_import(anchor, code, expected):
    assert expected in edited("replace_import", anchor=anchor, code=code)


def test_no_match_names_file_scope_anchor_and_the_nearest_statements():
    message = failure("remove", scope="A.stop", anchor="use(3)")
    assert message.startswith("f.py: remove in A.stop, at `use(3)`: no match for the anchor `use(3)`; nearest there: ")
    assert "line 38: use(1)" in message and "line 39: use(2)" in message


def test_many_matches_name_their_lines():
    message = failure("remove", scope="A.stop", anchor="use($X)")
    assert message == ("f.py: remove in A.stop, at `use($X)`: 2 matches instead of 1 for the anchor `use($X)`: "
                       "lines 38, 39.")


def test_an_unknown_scope_names_the_nearest_ones():
    message = failure("prepend", scope="A.runs", code="new()")
    assert "no match for the scope `A.runs`; nearest there: line 13: def run(x):" in message


def test_a_scope_that_is_defined_twice_is_refused():
    twice = "def f():\n    pass\n\n\ndef f():\n    pass\n"
    with pytest.raises(EditError, match="2 matches instead of 1 for the scope `f`: lines 1, 5"):
        apply_edit("f.py", twice, Edit("remove_definition", scope="f"))


def test_an_unknown_header_names_the_nearest_ones():
    message = failure("prepend", scope="A.run", within="elif z:", code="new()")
    assert message.startswith("f.py: prepend in A.run, within `elif z:`: no match for the header `elif z:`; nearest")
    assert "line 22: elif y:" in message


def test_an_expression_that_matches_twice_names_its_lines():
    assert "2 matches instead of 1 for the anchor `use`: lines 38, 39" in failure("replace_expression",
                                                                                  scope="A.stop",
                                                                                  anchor="use",
                                                                                  code="new")


def test_an_import_that_is_not_there():
    assert "no match for the import `import sys`; nearest there: line 2: import os" in failure("replace_import",
                                                                                               anchor="import sys")


def test_invalid_python_as_anchor_or_as_result():
    assert "the anchor `use(` is not one Python statement" in failure("remove", scope="A.stop", anchor="use(")
    assert "is not one Python statement" in failure("remove", scope="A.stop", anchor="use(1)\nuse(2)")
    assert "no valid Python at line" in failure("replace", scope="A.stop", anchor="use(1)", code="use(")
    # Removing all there is would leave a body without a statement.
    assert "no valid Python at line" in failure("remove", scope="A.run", within="for item in x:", anchor="use(item)")


def test_a_statement_that_shares_its_line_is_refused():
    with pytest.raises(EditError, match=r"shares its line with other code \(line 2: b = 2\)"):
        apply_edit("f.py", "def f():\n    a = 1; b = 2\n", Edit("remove", scope="f", anchor="b = 2"))
    with pytest.raises(EditError, match="shares its line"):
        apply_edit("f.py", "def f(): return 1\n", Edit("prepend", scope="f", code="new()"))


def test_operations_and_their_fields_are_checked():
    assert "no operation 'rename'; there are remove_definition, remove," in failure("rename", scope="A")
    assert "remove needs anchor" in failure("remove", scope="A")
    assert "remove takes no code" in failure("remove", scope="A", anchor="limit = 3", code="x = 1")
    assert "prepend takes no anchor" in failure("prepend", scope="A", anchor="limit = 3", code="x = 1")


def test_several_edits_of_which_one_breaks_the_file():
    good, bad = Edit("append", scope="outside", code="use(1)"), Edit("append", scope="outside", code="use(")
    assert apply_edits("f.py", SOURCE, [good, good]).endswith("# é\n    use(1)\n    use(1)\n")
    with pytest.raises(EditError, match="append in outside: the result is no valid Python at line 47"):
        apply_edits("f.py", SOURCE, [good, bad, good])


def one(text: str, name: str = "f") -> str:
    return digest(definitions(parse(textwrap.dedent(text)))[name][0])


def test_a_digest_does_not_depend_on_comments_and_layout():
    same = one("""
        # above
        def f(a,  b):  # beside
            # inside
            x = g(a,
                  b)

            return x
    """)
    assert same == one("def f(a, b):\n  x = g(a, b)\n  return x\n")


@pytest.mark.parametrize("changed", [
    "def f(a, b):\n  x = g(b, a)\n  return x\n",
    "def f(a, b=1):\n  x = g(a, b)\n  return x\n",
    "def f(a, b):\n  x = g(a, b)\n  if x:\n    return x\n",
    "def f(a, b):\n  x = g(a, b)\n  return f'{x:.2f}'\n",
])
def test_a_digest_depends_on_the_code(changed):
    assert one("def f(a, b):\n  x = g(a, b)\n  return x\n") != one(changed)


def test_a_digest_depends_on_blocks_and_format_specifiers():
    assert one("def f(a):\n  if a:\n    g()\n    h()\n") != one("def f(a):\n  if a:\n    g()\n  h()\n")
    assert one("def f(a):\n  return f'{a:.2f}'\n") != one("def f(a):\n  return f'{a:.3f}'\n")
