# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Makes pytest run DistributedTests on ranks, and write or check the support table when asked to."""

from unit.ranks.plugin import pytest_pycollect_makeitem, pytest_pyfunc_call  # noqa: F401
from unit.support import pytest_addoption, pytest_collection_modifyitems, pytest_configure  # noqa: F401
