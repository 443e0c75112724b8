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
from fxpipe.distributed.transport import Pair, Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.packing import Meta, PlainMeta, TensorMeta, allocate, pack, unpack
from fxpipe.graph.plain_data import check_length, decode, encode
from fxpipe.schedules.lower import Message
from fxpipe.torch_compat import bytes_of


class Port(Protocol):
    """One message's way, in every step of a kind of batch."""

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

    def port(self, kind: Hashable, message: Message) -> Port:
        """A message's in steps of a kind of batch, the same object in all of them."""

    def forget(self, kind: Hashable) -> None:
        """Forgets what messages of this kind of batch look like; both ends of each do."""

    def begin(self) -> None:
        """A step begins."""

    def finish(self) -> None:
        """Waits for what is still under way, at the end of a step."""

    def drop(self) -> None:
        """Forgets what is under way, without waiting: the step has failed."""


class Mailbox:
    """The exchange of a process that plays all ranks: values are handed over as they are."""

    def __init__(self) -> None:
        self._boxes: dict[Hashable, dict[Message, _Letterbox]] = {}

    def port(self, kind: Hashable, message: Message) -> _Letterbox:
        return self._boxes.setdefault(kind, {}).setdefault(message, _Letterbox(message))

    def forget(self, kind: Hashable) -> None:
        self._boxes.pop(kind, None)

    def begin(self) -> None:
        pass

    finish = begin  # all that was sent was taken

    def drop(self) -> None:
        for boxes in self._boxes.values():
            for box in boxes.values():
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


_Under = list[tuple[Work, Tensor]]
"""Buffers that are under way."""


class WireExchange:
    """The exchange of one rank among others. ``device``: where the transport's buffers live."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self._ports: dict[Hashable, dict[Message, _Wire]] = {}  # by kind of batch
        self._undescribed: dict[Pair, deque[_Wire]] = {}
        self.sending: dict[_Wire, _Under] = {}
        self.arriving: dict[_Wire, _Under] = {}
        self.headers: _Under = []

    def port(self, kind: Hashable, message: Message) -> _Wire:
        ports = self._ports.setdefault(kind, {})
        if message not in ports:
            waiting = self._undescribed.setdefault((message.sender, message.receiver), deque())
            ports[message] = _Wire(self, message, waiting)
        return ports[message]

    def forget(self, kind: Hashable) -> None:
        self._ports.pop(kind, None)

    def drop(self) -> None:
        self.sending.clear()
        self.arriving.clear()
        self.headers.clear()
        for waiting in self._undescribed.values():
            waiting.clear()

    begin = drop

    def finish(self) -> None:
        for waiting in self._undescribed.values():
            while waiting:
                waiting[0].take()
        for port in list(self.arriving):
            port.take()
        for works in [*self.sending.values(), self.headers]:
            for work, _ in works:
                work.wait()
        self.drop()


class _Wire:
    """One message's way between two ranks. ``waiting``: of this pair, what is to be received but not described yet, and
    what comes behind that."""

    def __init__(self, exchange: WireExchange, message: Message, waiting: deque[_Wire]) -> None:
        self._exchange, self._message, self._waiting = exchange, message, waiting
        self._pair = message.sender, message.receiver
        self._meta: Meta | None = None
        self._like: PlainMeta | None = None  # of a single plain tensor, which travels as it is

    def _describe(self, meta: Meta) -> None:
        self._meta, self._like = meta, PlainMeta.of(meta, self._exchange.device)

    # sending

    def send(self, value: Any) -> None:
        like = self._like
        if like is not None and like.fits(value):
            self._exchange.sending[self] = [self._start(value.detach())]
            return
        known = self._meta
        meta, buffers = pack(value, known)
        if known is None:
            self._send_header(meta)
            self._describe(meta)
        elif known != meta:
            raise RunError(
                f"{self._message} is {_describe(meta)}, but for this kind of batch it was {_describe(known)}; what "
                "passes between stages may depend on the shape of a batch, not on its values"
            )
        if self._like is not None:
            buffers = [value.detach().resolve_neg()]
        self._exchange.sending[self] = [self._start(buffer.to(self._exchange.device)) for buffer in buffers]

    def _start(self, buffer: Tensor) -> tuple[Work, Tensor]:
        return self._exchange.transport.send(self._pair, buffer), buffer

    def _send_header(self, meta: Meta) -> None:
        try:
            described = encode(meta.tree)
        except RunError as error:
            raise RunError(f"{self._message} is {_describe(meta)}: {error}") from None
        body = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        length = torch.tensor([body.numel()], device="cpu").view(torch.uint8)
        self._exchange.headers += [self._start(part.to(self._exchange.device)) for part in (length, body)]

    def release(self) -> None:
        for work, _ in self._exchange.sending.pop(self, ()):
            work.wait()

    # receiving

    def post(self) -> None:
        """Posts ahead, unless what comes, or something in front of it, is not described yet."""
        if self._waiting or self._meta is None:
            self._waiting.append(self)
        else:
            self._post(self._meta)

    def _post(self, meta: Meta) -> None:
        buffers = allocate(meta, self._exchange.device) if self._like is None else [self._like.allocate()]
        self._exchange.arriving[self] = [(self._receive(buffer), buffer) for buffer in buffers]

    def _receive(self, buffer: Tensor) -> Work:
        return self._exchange.transport.receive(self._pair, buffer)

    def take(self) -> Any:
        while self._waiting and self in self._waiting:  # in the sender's order, for that is how they come
            first = self._waiting.popleft()
            first._post(first._meta or first._receive_header())
        works = self._exchange.arriving.pop(self)
        for work, _ in works:
            work.wait()
        assert self._meta is not None
        if self._like is not None:
            return works[0][1].requires_grad_(self._like.requires_grad)
        return unpack(self._meta, [buffer for _, buffer in works])

    def _receive_header(self) -> Meta:
        length = torch.empty(8, dtype=torch.uint8, device=self._exchange.device)
        self._receive(length).wait()
        sender = member(self._exchange.transport, "pipe", self._message.sender)
        size = check_length(int(length.cpu().view(torch.int64)), sender)
        body = torch.empty(size, dtype=torch.uint8, device=self._exchange.device)
        self._receive(body).wait()
        meta = Meta.of(decode(bytes_of(body.cpu()), sender), sender)
        self._describe(meta)
        return meta


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
