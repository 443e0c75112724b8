"""Exchange: one rank's messages of a step, over a transport.

What a message looks like (container, shapes, types, strides) is static for a given kind of batch. So its description
travels once, in front of the first such message; from the second step on the receiver allocates and posts ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.distributed.collective import Work
from fxpipe.distributed.transport import Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.packing import Meta, TensorMeta, allocate, pack, unpack
from fxpipe.graph.plain_data import check_length, decode, encode
from fxpipe.schedules.lower import Message
from fxpipe.torch_compat import bytes_of


class Exchange(Protocol):
    """Where a rank's instructions send, post and take messages."""

    def begin(self, kind: Hashable) -> None:
        """A step with this kind of batch begins."""

    def forget(self, kind: Hashable) -> None:
        """Forgets what messages of this kind of batch look like; both ends of each do."""

    def post(self, message: Message) -> None:
        """Posts a receive; does not wait."""

    def take(self, message: Message) -> Any:
        """The message's value, once it is here."""

    def send(self, message: Message, value: Any) -> None:
        """Starts a send; does not wait."""

    def release(self, message: Message) -> None:
        """Frees the buffer of a send that is known to have been received."""

    def finish(self) -> None:
        """Waits for what is still under way, at the end of a step."""

    def drop(self) -> None:
        """Forgets what is under way, without waiting: the step has failed."""


class Mailbox:
    """The exchange of a process that plays all ranks: values are handed over as they are."""

    def __init__(self) -> None:
        self._values: dict[Message, Any] = {}

    def begin(self, kind: Hashable) -> None:
        self._values.clear()

    def post(self, message: Message) -> None:
        pass

    def take(self, message: Message) -> Any:
        return self._values.pop(message)

    def send(self, message: Message, value: Any) -> None:
        self._values[message] = value

    def release(self, message: Message) -> None:
        pass

    def forget(self, kind: Hashable) -> None:
        pass

    def finish(self) -> None:
        self._values.clear()

    drop = finish


class WireExchange:
    """The exchange of one rank among others. ``device``: where the transport's buffers live."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._known: dict[Hashable, dict[Message, Meta]] = {}  # by kind of batch
        self._of_kind: dict[Message, Meta] = {}
        self.drop()

    def drop(self) -> None:
        self._sending: dict[Message, list[tuple[Work, Tensor]]] = {}
        self._headers: list[tuple[Work, Tensor]] = []
        self._arriving: dict[Message, tuple[Meta, list[tuple[Work, Tensor]]]] = {}
        self._undescribed: dict[tuple[int, int], deque[Message]] = {}

    def begin(self, kind: Hashable) -> None:
        self._of_kind = self._known.setdefault(kind, {})
        self.drop()

    def forget(self, kind: Hashable) -> None:
        self._known.pop(kind, None)

    # sending

    def send(self, message: Message, value: Any) -> None:
        known = self._of_kind.get(message)
        meta, buffers = pack(value, known)
        if known is None:
            self._send_header(message, meta)
            self._of_kind[message] = meta
        elif known != meta:
            raise RunError(
                f"{message} is {_describe(meta)}, but for this kind of batch it was {_describe(known)}; what passes "
                "between stages may depend on the shape of a batch, not on its values"
            )
        self._sending[message] = [self._start(message, buffer.to(self._device)) for buffer in buffers]

    def _start(self, message: Message, buffer: Tensor) -> tuple[Work, Tensor]:
        return self._transport.send((message.sender, message.receiver), buffer), buffer

    def _send_header(self, message: Message, meta: Meta) -> None:
        try:
            described = encode(meta.tree)
        except RunError as error:
            raise RunError(f"{message} is {_describe(meta)}: {error}") from None
        body = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        length = torch.tensor([body.numel()], device="cpu").view(torch.uint8)
        self._headers += [self._start(message, part.to(self._device)) for part in (length, body)]

    def release(self, message: Message) -> None:
        for work, _ in self._sending.pop(message, ()):
            work.wait()

    # receiving

    def post(self, message: Message) -> None:
        """Posts ahead, unless what comes, or something in front of it, is not described yet."""
        waiting = self._undescribed.setdefault((message.sender, message.receiver), deque())
        known = self._of_kind.get(message)
        if waiting or known is None:
            waiting.append(message)
        else:
            self._post(message, known)

    def _post(self, message: Message, meta: Meta) -> None:
        buffers = allocate(meta, self._device)
        self._arriving[message] = meta, [(self._receive(message, buffer), buffer) for buffer in buffers]

    def _receive(self, message: Message, buffer: Tensor) -> Work:
        return self._transport.receive((message.sender, message.receiver), buffer)

    def take(self, message: Message) -> Any:
        waiting = self._undescribed.get((message.sender, message.receiver), deque())
        while message in waiting:  # in the sender's order, for that is how they come
            first = waiting.popleft()
            known = self._of_kind.get(first)
            self._post(first, known if known is not None else self._receive_header(first))
        meta, works = self._arriving.pop(message)
        for work, _ in works:
            work.wait()
        return unpack(meta, [buffer for _, buffer in works])

    def _receive_header(self, message: Message) -> Meta:
        length = torch.empty(8, dtype=torch.uint8, device=self._device)
        self._receive(message, length).wait()
        sender = member(self._transport, "pipe", message.sender)
        size = check_length(int(length.cpu().view(torch.int64)), sender)
        body = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._receive(message, body).wait()
        meta = Meta.of(decode(bytes_of(body.cpu()), sender), sender)
        self._of_kind[message] = meta
        return meta

    def finish(self) -> None:
        for waiting in self._undescribed.values():
            while waiting:
                self.take(waiting[0])
        for message in list(self._arriving):
            self.take(message)
        for works in [*self._sending.values(), self._headers]:
            for work, _ in works:
                work.wait()
        self.drop()


def _describe(meta: Meta) -> str:
    leaves = [_describe_leaf(leaf) for leaf in meta.leaves]
    if meta.spec.is_leaf():
        return leaves[0]
    return f"{getattr(meta.spec.type, '__name__', 'container')}({', '.join(leaves)})"


def _describe_leaf(leaf: Any) -> str:
    if not isinstance(leaf, TensorMeta):
        return repr(leaf)
    gradient = ", with a gradient" if leaf.requires_grad else ""
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} of strides {list(leaf.stride)}{gradient}"
