# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Turns the outcomes of all ranks into what pytest is told: one pass, skip or failure."""

from typing import List, Sequence

import pytest

from unit.ranks.messages import Kind, Outcome

# First what a rank did itself, then what it only suffered.
_ORDER = {Kind.DIED: 0, Kind.FAILED: 0, Kind.STUCK: 1, Kind.LOST_PEER: 2}


def conclude(outcomes: Sequence[Outcome], world_size: int) -> None:
    """Returns when every rank passed; else raises pytest's skip, xfail or failure.

    A failure of any rank's own wins. A skip wins over ranks that only waited for the one that skipped.
    """
    kinds = {outcome.kind for outcome in outcomes}
    gave_up = [outcome for outcome in outcomes if outcome.kind in (Kind.SKIPPED, Kind.XFAILED)]
    if not kinds & {Kind.DIED, Kind.FAILED} and gave_up:
        first = gave_up[0]
        if first.kind is Kind.XFAILED:
            pytest.xfail(first.summary)
        pytest.skip(first.summary)
    if kinds & set(_ORDER):
        pytest.fail(describe(outcomes, world_size), pytrace=False)


def describe(outcomes: Sequence[Outcome], world_size: int) -> str:
    """The text of a failure: every rank that did not pass, first cause first, with its traceback or stack."""
    bad = [outcome for outcome in outcomes if outcome.kind in _ORDER]
    bad.sort(key=lambda outcome: (_ORDER[outcome.kind], outcome.seconds))
    parts: List[str] = [_part(outcome, world_size) for outcome in bad]
    fine = [str(outcome.rank) for outcome in outcomes if outcome.kind not in _ORDER]
    if fine:
        parts.append(f"without failure: rank {', '.join(fine)}")
    return "\n".join(parts)


def _part(outcome: Outcome, world_size: int) -> str:
    verb = {Kind.FAILED: "failed:", Kind.LOST_PEER: "lost its peer:"}.get(outcome.kind, "")
    header = " ".join(filter(None, (f"rank {outcome.rank} of {world_size}", verb, outcome.summary)))
    if outcome.kind is Kind.STUCK:
        header += "; it was here:"
    return f"{header}\n{outcome.details}" if outcome.details else header
