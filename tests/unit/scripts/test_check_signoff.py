# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest

PATH = "COMMIT_EDITMSG"
SIGNED = "Signed-off-by: A. Contributor <a.contributor@example.com>"
SCISSORS = "# ------------------------ >8 ------------------------"


@pytest.mark.parametrize("message", [
    f"Subject\n\nBody.\n\n{SIGNED}\n",
    f"Subject\n\n{SIGNED}\nReviewed-by: B <b@example.com>\n",
    f"Subject\n\n{SIGNED}\n# a comment\n{SCISSORS}\ndiff\n",
])
def test_signed_message_is_accepted(check_file, message):
    assert check_file("check_signoff", message, PATH) == []


@pytest.mark.parametrize("message", [
    "Subject\n\nBody.\n",
    "Subject\n\nSigned-off-by: Nobody\n",
    "Subject\n\nSigned-off-by: <a@example.com>\n",
    f"Subject\n\n# {SIGNED}\n",
    f"Subject\n\nAs in: {SIGNED}\n",
    f"Subject\n\n{SCISSORS}\n{SIGNED}\n",
])
def test_unsigned_message_is_refused(check_file, message):
    found = check_file("check_signoff", message, PATH)
    assert len(found) == 1 and "git commit -s" in found[0]
