"""Listed: what a capture is given for a list of tensors is concatenated as the list would be, changed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.stage.listed import ListOfTensors

ENTRIES = [torch.full((rows, 2), float(rows)) for rows in (1, 2, 3)]


def extended(entries: list[Tensor]) -> list[Tensor]:
    entries += [ENTRIES[0]]
    return entries


def replaced(entries: list[Tensor]) -> list[Tensor]:
    entries[0] = ENTRIES[2]
    return entries


USES: dict[str, Callable[[Any], Any]] = {
    "not at all": lambda entries: entries,
    "append": lambda entries: entries.append(ENTRIES[0]) or entries,
    "+=": extended,
    "item": replaced,
    "pop": lambda entries: entries.pop() is not None and entries,
    "reverse": lambda entries: entries.reverse() or entries,
    "copy": lambda entries: entries.copy(),
    "reversed": lambda entries: list(reversed(entries)),
    "*": lambda entries: entries * 2,
    "+": lambda entries: entries + ENTRIES[:1],
    "behind +": lambda entries: ENTRIES[:1] + entries,
}


@pytest.mark.parametrize("how", USES)
def test_it_is_concatenated_as_the_list_would_be(how: str) -> None:
    listing = ListOfTensors(list, len(ENTRIES), 2, str)
    listed = listing.stands_for([torch.cat(ENTRIES), *ENTRIES])
    assert torch.equal(torch.cat(USES[how](listed)), torch.cat(USES[how](list(ENTRIES))))
    assert listing.opened == (how != "not at all")
