"""What all tests share: one thread per process, and the workers of the tests that need several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)  # thread counts change bits
torch.manual_seed(0)  # for what test modules make when they are imported


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test draws the same numbers in every run, whichever others run before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for ``pool.run(fn, *args, ranks=4)``; none is left at the end."""
    workers = Pool()
    try:
        yield workers
    finally:
        workers.close()
