"""Some of the cases of ``python -m tests.faults``, about a minute of them; ``FXPIPE_ALL=1`` runs all."""

from __future__ import annotations

import pytest

from tests.faults.cases import cases
from tests.faults.harness import faults
from tests.faults.training import PHASES, Fault
from tests.thinned import every


def test_each_rank_is_struck_in_each_phase_by_each_signal() -> None:
    struck = {(fault.victim, fault.phase, fault.signal) for fault in cases()}
    assert len(struck) == 4 * len(PHASES) * 2
    assert len(cases()) >= 90


@pytest.mark.slow
@pytest.mark.parametrize("fault", every(21, cases()), ids=str)
def test_the_others_end_in_time_and_say_why(fault: Fault) -> None:
    assert faults(fault) == []
