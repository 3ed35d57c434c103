# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The `deepspeed` command."""

from forkbuild.edit import Edit

FILE = "deepspeed/launcher/runner.py"

EDITS = [
    Edit(
        op="insert_before",
        scope="parse_args",
        anchor="return parser.parse_args($$$)",
        code="""
            from ..git_version_info import version
            parser.add_argument("--version", action="version", version=f"deepspeed {version}")

        """,
        why="`deepspeed --version` ended with a usage error, so a user could not see whether the fork is installed.",
        engine="none, the launcher",
        drop_when="upstream's launcher takes --version",
        series="version",
    ),
]
