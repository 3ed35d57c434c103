# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""docs/support.md from a run of the tests: what a passed test with the mark `support` shows, nothing else.

`--support=FILE` writes the table, `--support-check=FILE` fails the run where the file says something else. Both are
for runs of the whole suite: a row whose tests did not run is not in the table.
"""

import difflib
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

import pytest

ENGINES = ("stage 0", "BF16_Optimizer", "ZeRO-1", "ZeRO-2", "ZeRO-3")
ALL = "all"
# What tests call their engines, in the parameters `engine`, `source` and `stage`.
_LABELS = {
    "stage0": "stage 0",
    "bf16_optimizer": "BF16_Optimizer",
    **{
        f"zero{stage}{kind}": f"ZeRO-{stage}"
        for stage in (1, 2, 3)
        for kind in ("", "_offload")
    },
    **{
        stage: f"ZeRO-{stage}"
        for stage in (1, 2, 3)
    },
    0: "stage 0",
}
_PROPERTY = "support"
_HEAD = """# What works

Written by `make test ARGS=--support=docs/support.md`; the next run of the tests refuses what is edited by hand.

Each cell was shown by a test of the last run, which is named in its row; a cell without a test is empty. *Exact* means
the weights of the unsharded optimizer, up to the rounding of the gradient reduction. *Refused* means that
`deepspeed.initialize` raises an error which says what was found and what to change.

"""


class Claim(NamedTuple):
    """What one test shows: `feature` is `state` under `engine`. `test` is its file, and its class or function."""
    feature: str
    engine: str
    state: str
    test: str


def claims_of(item: pytest.Item) -> List[Claim]:
    """Of the marks of a test: `feature`, `state` and `engine`; without one, and where it says all, the engine is that
    of the test's parameters.

    Parameters in braces in `feature` are replaced by their values. Raises pytest.UsageError where a mark has other
    keys, or the engine is not known.
    """
    path, *names = item.nodeid.split("[")[0].split("::")
    # Without the folder that all tests lie in.
    test = f"{path.split('unit/')[-1]}::{names[0]}"
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    found = []
    for mark in item.iter_markers("support"):
        if mark.args or set(mark.kwargs) - {"engine"} != {"feature", "state"}:
            raise pytest.UsageError(f"{item.nodeid}: a mark `support` takes feature, state and engine by name")
        own = next((parameters[key] for key in ("engine", "source", "stage") if key in parameters), None)
        engine = mark.kwargs.get("engine")
        if engine in (None, ALL) and own is not None:
            engine = _LABELS.get(own)
        if engine is None:
            raise pytest.UsageError(f"{item.nodeid}: a mark `support` without engine, and none in the parameters")
        feature = mark.kwargs["feature"].format(**parameters)
        if feature.split()[0].isalpha():
            feature = feature[0].upper() + feature[1:]
        found.append(Claim(feature, engine, mark.kwargs["state"], test))
    return found


def table(claims: Iterable[Claim]) -> str:
    """The page, in the order of the features' names. Raises ValueError where two tests contradict each other."""
    states: Dict[str, Dict[str, str]] = {}
    tests: Dict[str, List[str]] = {}
    for claim in sorted(set(claims), key=lambda found: (found.feature.lower(), found)):
        own = states.setdefault(claim.feature, {})
        for engine in ENGINES if claim.engine == ALL else (claim.engine, ):
            if own.setdefault(engine, claim.state) != claim.state:
                raise ValueError(f"{claim.test} says that {claim.feature} under {engine} is {claim.state}, another "
                                 f"test that it is {own[engine]}")
        if claim.test not in tests.setdefault(claim.feature, []):
            tests[claim.feature].append(claim.test)
    lines = [f"| feature | {' | '.join(ENGINES)} | shown by (in `tests/unit/`) |", "|---" * (len(ENGINES) + 2) + "|"]
    for feature, own in states.items():
        cells = [own.get(engine, "") for engine in ENGINES]
        beside = [f"{engine}: {state}" for engine, state in own.items() if engine not in ENGINES]
        name = feature + (f" ({'; '.join(beside)})" if beside else "")
        lines.append(f"| {' | '.join([name, *cells, ', '.join(f'`{test}`' for test in tests[feature])])} |")
    return _HEAD + "\n".join(lines) + "\n"


class SupportTable:
    """The plugin of a run that was asked for the table."""

    def __init__(self, write: Optional[str], check: Optional[str]):
        self.write, self.check = write, check
        self.claims: List[Claim] = []
        self.complaint = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.claims += [Claim(*value) for name, value in report.user_properties if name == _PROPERTY]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != 0 or hasattr(session.config, "workerinput"):
            return
        page = table(self.claims)
        if self.write:
            Path(self.write).write_text(page, encoding="utf-8")
        if self.check:
            held = Path(self.check)
            lines = held.read_text(encoding="utf-8").splitlines() if held.is_file() else []
            if lines != page.splitlines():
                changes = difflib.unified_diff(lines, page.splitlines(), self.check, "this run", lineterm="", n=0)
                self.complaint = "\n".join([f"{self.check} is not what this run of the tests shows:", *changes])
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.complaint:
            terminalreporter.write_line(self.complaint, red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support", metavar="FILE", help="write the support table of this run")
    parser.addoption("--support-check", metavar="FILE", help="fail where FILE is not the support table of this run")


def pytest_configure(config: pytest.Config) -> None:
    write, check = config.getoption("--support"), config.getoption("--support-check")
    if write or check:
        config.pluginmanager.register(SupportTable(write, check))


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    for item in items:
        # Properties travel with the report, also from another process.
        item.user_properties += [(_PROPERTY, tuple(claim)) for claim in claims_of(item)]
