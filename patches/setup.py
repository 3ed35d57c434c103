# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""DeepSpeed's setup.py."""

from forkbuild.edit import Edit

FILE = "setup.py"

EDITS = [
    Edit(
        op="insert_after",
        anchor="extras_require['all'] = $VALUE",
        # After [all], so that it stays what DeepSpeed's users know it as.
        code="""
            extras_require['test'] = fetch_requirements('requirements/requirements-test.txt')
            extras_require['example'] = fetch_requirements('requirements/requirements-example.txt')
            extras_require['kernels'] = fetch_requirements('requirements/requirements-kernels.txt')
        """,
        why="The fork's tests, its example and its optional kernels need packages that DeepSpeed's own extras do not "
        "have.",
        engine="none, packaging of the fork",
        drop_when="never; it is the fork's own and no part of what is offered upstream",
        series="extras",
    ),
    Edit(
        op="insert_before",
        anchor="setup($$$ARGS)",
        code="scripts.append('bin/ds_muon')",
        why="The planner is a command of its own, as ds_report is.",
        engine="all",
        drop_when="upstream has taken the package",
        series="plan_command",
    ),
]
