"""Exchange: where a rank's instructions send, post and take messages; where one process plays all ranks, a mailbox."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

from fxpipe.schedules.lower import Message


class Port(Protocol):
    """One message's way, in every step."""

    def post(self) -> None:
        """Posts a receive; does not wait."""

    def take(self) -> Any:
        """The message's value, once it is here."""

    def send(self, value: Any) -> None:
        """Starts a send; does not wait."""

    def release(self) -> None:
        """Frees the buffer of a send that is known to have been received."""


class Exchange(Protocol):
    """Where a rank's instructions send, post and take messages."""

    def port(self, message: Message, varies: bool = False) -> Port:
        """A message's, the same object in all steps. ``varies``: whether it may look otherwise each time; both ends say
        so alike."""

    def keep(self, kinds: Collection[Hashable], numbers: Collection[Hashable]) -> None:
        """Forgets what messages look like but in these kinds of batch, and in micro-batches of these numbers; both ends
        of each do."""

    def begin(self, kind: Hashable, numbers: Sequence[Hashable], receives: Sequence[Port] = ()) -> None:
        """A step begins. ``numbers``: one for each micro-batch: where they are equal, messages have the same layout.
        ``receives``: what will be posted, in order; the same object in all steps that post the same."""

    def finish(self) -> None:
        """Waits for what is still under way, at the end of a step."""

    def drop(self) -> None:
        """Forgets what is under way, without waiting: the step has failed."""


class Mailbox:
    """The exchange of a process that plays all ranks: values are handed over as they are."""

    def __init__(self) -> None:
        self._boxes: dict[Message, _Letterbox] = {}

    def port(self, message: Message, varies: bool = False) -> _Letterbox:
        return self._boxes.setdefault(message, _Letterbox(message))

    def keep(self, kinds: Collection[Hashable], numbers: Collection[Hashable]) -> None:
        pass

    def begin(self, kind: Hashable, numbers: Sequence[Hashable], receives: Sequence[Port] = ()) -> None:
        self.drop()

    def finish(self) -> None:
        pass  # all that was sent was taken

    def drop(self) -> None:
        for box in self._boxes.values():
            box.value = _NOTHING


_NOTHING = object()


class _Letterbox:
    """One message's place in a mailbox."""

    __slots__ = ("message", "value")

    def __init__(self, message: Message) -> None:
        self.message, self.value = message, _NOTHING

    def post(self) -> None:
        pass

    def take(self) -> Any:
        value, self.value = self.value, _NOTHING
        if value is _NOTHING:
            raise KeyError(self.message)
        return value

    def send(self, value: Any) -> None:
        self.value = value

    def release(self) -> None:
        pass
