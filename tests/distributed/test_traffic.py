"""Traffic: the rows that are asked for, and the table."""

from __future__ import annotations

import pytest

from fxpipe.distributed.traffic import Moved, Traffic


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (52_428_800, "52.4 MB"), (999_600_000, "1 GB"), (1.5e12, "1.5 TB")],
)
def test_sizes(size: float, told: str) -> None:
    row = Moved("send", (0, 1), (0, 1), False, 1, size, 0.0, 0.0)
    assert told in str(Traffic(0, (row,)))
