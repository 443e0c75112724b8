"""An exchange as tests of it write one: by message, in steps of any kind of batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from fxpipe.run.exchange import Exchange
from fxpipe.schedules.lower import Message


class Apart:
    """Numbers of the micro-batches of a kind of batch of which none looks like another."""

    def __init__(self, kind: Hashable) -> None:
        self._kind = kind

    def __getitem__(self, place: int) -> Hashable:
        return self._kind, place


class ByMessage:
    """Finds each message's port."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.forget, self.finish = exchange.forget, exchange.finish

    def begin(
        self, kind: Hashable, numbers: Sequence[Hashable] | None = None, receives: Sequence[Message] = ()
    ) -> None:
        ports = list(map(self._exchange.port, receives))
        self._exchange.begin(kind, Apart(kind) if numbers is None else numbers, ports)  # type: ignore[arg-type]

    def post(self, message: Message, varies: bool = False) -> None:
        self._exchange.port(message, varies).post()

    def take(self, message: Message, varies: bool = False) -> Any:
        return self._exchange.port(message, varies).take()

    def send(self, message: Message, value: Any, varies: bool = False) -> None:
        self._exchange.port(message, varies).send(value)

    def release(self, message: Message) -> None:
        self._exchange.port(message).release()
