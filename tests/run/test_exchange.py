"""The mailbox of a process that plays all ranks."""

from __future__ import annotations

import pytest
import torch

from fxpipe.run.exchange import Mailbox
from fxpipe.schedules.action import Op
from fxpipe.schedules.lower import Message
from tests.messages import ByMessage

MESSAGE = Message(0, Op.F, 0, 0, 1)


def test_a_mailbox_hands_over_the_very_same_value_once() -> None:
    mailbox, value = ByMessage(Mailbox()), (torch.ones(3), object())
    mailbox.begin("kind")
    mailbox.post(MESSAGE)
    mailbox.send(MESSAGE, value)
    assert mailbox.take(MESSAGE) is value
    with pytest.raises(IndexError):
        mailbox.take(MESSAGE)


def test_a_mailbox_is_empty_at_the_start_of_a_step() -> None:
    mailbox = ByMessage(Mailbox())
    mailbox.send(MESSAGE, 1)
    mailbox.begin("kind")
    with pytest.raises(IndexError):
        mailbox.take(MESSAGE)
