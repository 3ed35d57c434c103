# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A rank that raises, exits, dies, hangs or skips is reported as such, in seconds, and the next test still runs."""

import re
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Dict, NamedTuple

import pytest

from unit.harness.inner import copy_case, run_pytest

# Ranks get 5 s after the first failure, a stuck one up to 2 s for its stack; the rest is for a slow machine.
SOON_SECONDS = 20


class Result(NamedTuple):
    kind: str
    message: str
    text: str
    output: str
    seconds: float


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Result]:
    """What pytest reported for each test of cases/goes_wrong.py, from one run."""
    directory = tmp_path_factory.mktemp("goes_wrong")
    copy_case("goes_wrong", directory / "test_goes_wrong.py")
    report = directory / "report.xml"
    printed = run_pytest(directory, "-v", "--import-mode=prepend", f"--junitxml={report}", "-o", "junit_logging=all",
                         "test_goes_wrong.py")
    assert report.exists(), printed
    return {case.get("name", ""): _result(case) for case in xml.parse(report).getroot().iter("testcase")}


def _result(case: xml.Element) -> Result:
    kind, message, text = "passed", "", ""
    for name in ("failure", "error", "skipped"):
        found = case.find(name)
        if found is not None:
            kind, message, text = name, found.get("message", ""), found.text or ""
    return Result(kind, message, text, case.findtext("system-out", ""), float(case.get("time", "0")))


def _in_order(text: str, *parts: str) -> bool:
    return re.search(".*?".join(map(re.escape, parts)), text, re.DOTALL) is not None


def test_failure_shows_the_traceback_of_the_rank_that_raised(results):
    result = results["test_raises"]
    assert result.kind == "failure" and result.seconds < SOON_SECONDS
    assert _in_order(result.text, "rank 1 of 2 failed: AssertionError: assert 1 == 0", "assert expected == 0",
                     "rank 0 of 2 lost its peer", "dist.barrier()"), result.text
    # The harness's own frames are left out, and pytest shows what the ranks printed.
    assert "unit/ranks" not in result.text
    assert _in_order(result.output, "--- rank 0 ---\nprinted by rank 0", "--- rank 1 ---\nprinted by rank 1")


def test_failures_of_several_ranks_are_all_shown_the_first_cause_first(results):
    result = results["test_raises_on_both"]
    assert _in_order(result.text, "rank 1 of 2 failed: ValueError: own error of rank 1",
                     "rank 0 of 2 failed: ValueError: own error of rank 0"), result.text


def test_exit_is_reported_with_its_code(results):
    result = results["test_exits"]
    assert result.kind == "failure" and result.seconds < SOON_SECONDS
    assert _in_order(result.text, "rank 1 of 2 exited with code 3", "rank 0 of 2 lost its peer"), result.text


def test_kill_is_reported_with_its_signal(results):
    result = results["test_is_killed"]
    assert result.kind == "failure" and result.seconds < SOON_SECONDS
    assert _in_order(result.text, "rank 0 of 2 killed by signal 9 (SIGKILL)", "rank 1 of 2 lost its peer"), result.text


def test_crash_is_reported_with_its_stack(results):
    result = results["test_crashes"]
    assert result.kind == "failure" and result.seconds < SOON_SECONDS
    assert _in_order(result.text, "rank 0 of 2 killed by signal 11 (SIGSEGV)", "in test_crashes",
                     "rank 1 of 2 lost its peer"), result.text


def test_rank_that_does_not_notice_a_failure_is_stopped_after_the_grace(results):
    result = results["test_peer_does_not_notice"]
    assert result.kind == "failure" and result.seconds < SOON_SECONDS
    assert _in_order(result.text, "rank 1 of 2 failed: KeyError: 'the only cause'",
                     "rank 0 of 2 did not finish within 5 s after another rank had ended",
                     "in test_peer_does_not_notice")


def test_hang_in_a_collective_names_the_stuck_ranks_with_their_stacks(results):
    result = results["test_in_a_collective"]
    assert result.kind == "failure" and result.seconds < SOON_SECONDS
    for rank in (0, 1):
        stuck = rf"rank {rank} of 3 did not finish within 3 s \(exec_timeout\); it was here:\n.*?" \
                r"in all_reduce\n.*?in test_in_a_collective\n"
        assert re.search(stuck, result.text, re.DOTALL), result.text
    assert "without failure: rank 2" in result.text


def test_pytest_timeout_stops_the_ranks_and_shows_where_they_were(results):
    result = results["test_meets_pytest_timeout"]
    assert result.kind == "failure" and result.seconds < SOON_SECONDS
    assert "Timeout" in result.message
    for rank in (0, 1):
        assert _in_order(result.output, f"rank {rank} was interrupted here", "in test_meets_pytest_timeout")


def test_failure_to_tidy_up_fails_the_test(results):
    result = results["test_breaks_what_tidies_up"]
    # Both fail at the same time, so either may be reported first.
    for rank in (0, 1):
        assert f"rank {rank} of 2 failed: while tidying up after the test: OSError: no way back" in result.text


@pytest.mark.parametrize("test, kind, reason", [("test_skips", "skipped", "skipped inside"),
                                                ("test_skips_on_one", "skipped", "only rank 1 wants to skip"),
                                                ("test_xfails", "skipped", "known")])
def test_skip_and_xfail_inside_of_a_rank(results, test, kind, reason):
    assert results[test].kind == kind and reason in results[test].message
    assert results[test].seconds < SOON_SECONDS


def test_value_that_cannot_be_sent_is_named(results):
    result = results["test_wants_what_cannot_be_sent"]
    assert result.kind == "failure"
    assert "test_wants_what_cannot_be_sent() asks for 'request'" in result.text


def test_every_test_after_a_failure_runs(results):
    after = {name: result for name, result in results.items() if name.startswith("test_after_")}
    assert results["test_dies_when_it_has_passed"].kind == "passed"
    assert len(after) == 11
    assert {name: result.text for name, result in after.items() if result.kind != "passed"} == {}


def test_case_is_the_copied_file(results):
    source = (Path(__file__).parent / "cases" / "goes_wrong.py").read_text()
    assert set(results) == set(re.findall(r"def (test_\w+)\(", source))
