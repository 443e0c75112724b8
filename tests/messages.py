"""An exchange as tests of it write one: by message, in steps of any kind of batch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from fxpipe.run.exchange import Exchange
from fxpipe.schedules.lower import Message


class ByMessage:
    """Finds each message's port in the step that runs."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._kind: Hashable = None

    def begin(self, kind: Hashable) -> None:
        self._kind = kind
        self._exchange.begin()

    def post(self, message: Message, varies: bool = False) -> None:
        self._exchange.port(self._kind, message, varies).post()

    def take(self, message: Message) -> Any:
        return self._exchange.port(self._kind, message).take()

    def send(self, message: Message, value: Any, varies: bool = False) -> None:
        self._exchange.port(self._kind, message, varies).send(value)

    def release(self, message: Message) -> None:
        self._exchange.port(self._kind, message).release()

    def finish(self) -> None:
        self._exchange.finish()
