# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest

HEADER = "# SPDX-License-Identifier: Apache-2.0\n\n# DeepSpeed Team\n"


@pytest.mark.parametrize("text", ["", HEADER, HEADER + "import os\n", "#!/usr/bin/env python3\n" + HEADER])
def test_header_is_accepted(check_file, text):
    assert check_file("check_license", text) == []


@pytest.mark.parametrize("text", [
    "import os\n",
    "# SPDX-License-Identifier: MIT\n\n# DeepSpeed Team\n",
    "# SPDX-License-Identifier: Apache-2.0\n# DeepSpeed Team\n",
    "# SPDX-License-Identifier: Apache-2.0\n",
    "import os\n" + HEADER,
])
def test_other_beginnings_are_refused(check_file, text):
    assert len(check_file("check_license", text)) == 1
