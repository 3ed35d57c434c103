# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Makes pytest run DistributedTests on ranks."""

from unit.ranks.plugin import pytest_pycollect_makeitem, pytest_pyfunc_call  # noqa: F401
