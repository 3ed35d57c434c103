# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builds the fork from the pinned DeepSpeed release: fetch it, lay our files over it, apply the edits, hand it on.

    pin.py         the release: what UPSTREAM names, fetched and checked
    syntax.py      what edits and seams ask of a syntax tree
    edit.py        structural edits of one source text
    patchset.py    the edits, replaced directories and commits of the series that patches/ holds
    seams.py       digests of the upstream functions that the patch set leans on
    build.py       trees: the release, our files and the edits put together
    backend.py     the PEP 517 and PEP 660 hooks that pip and uv call
    check.py refresh.py export.py    what `python -m forkbuild` offers to maintainers
"""


class ForkError(RuntimeError):
    """The fork cannot be built. The message holds what was named, what was found and what to do."""
