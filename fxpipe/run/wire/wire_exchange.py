"""Wire exchange: one rank's messages of a step, over a transport.

What a message looks like (container, shapes, types, strides) follows from the capture and the shapes of its
micro-batch, which both ends know. So its description travels once for each of these, in front of the first such
message; from then on the receiver allocates and posts ahead, in every step and for every micro-batch that is like it.
Where a stage makes values of another shape each time, it travels in front of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.collective import Work
from fxpipe.distributed.transport import Pair, Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.packing import Meta, PlainMeta, TensorMeta, allocate, pack, unpack
from fxpipe.graph.plain_data import check_length, decode, encode
from fxpipe.run.wire.exchange import Port
from fxpipe.schedules.action import Op
from fxpipe.schedules.lower import Message
from fxpipe.torch_compat import bytes_of

_Under = list[tuple[Work, Tensor]]
"""Buffers that are under way."""

BURST = 2**18
"""Bytes that are received from one rank ahead of their time: a receive that is posted takes those behind it along. Each
one that is posted alone wakes the sender up, which for small messages takes longer than to send them."""

HEADER = 256
"""Bytes of the message that goes in front of one that is not described yet, so that it can be posted ahead: the length
of the description, 8 bytes, and its beginning. Of a single tensor that is all; else the rest is a message behind it."""


class _WireLayout:
    """What a message looks like."""

    __slots__ = ("like", "meta", "nbytes")

    def __init__(self, meta: Meta, device: torch.device) -> None:
        self.meta, self.nbytes = meta, meta.nbytes
        self.like = PlainMeta.of(meta, device)  # of a single plain tensor, which travels unchanged


class _Described:
    """The layouts of an edge's values, or gradients, by what is the same at both ends."""

    __slots__ = ("by_number", "by_place")

    def __init__(self) -> None:
        self.by_number: dict[Hashable, _WireLayout] = {}  # of the micro-batch
        self.by_place: dict[tuple[Hashable, Hashable, int], _WireLayout] = {}
        """(kind of batch, number, micro-batch) → of what shapes do not describe, as of a part of the batch, whose place
        there decides how it is aligned, and that the last bit of what is computed of it."""

    def keep(self, kinds: Collection[Hashable], numbers: Collection[Hashable]) -> None:
        self.by_number = {number: layout for number, layout in self.by_number.items() if number in numbers}
        self.by_place = {place: layout for place, layout in self.by_place.items() if place[0] in kinds}


class WireExchange:
    """The exchange of one rank among others. ``device``: where the transport's buffers live."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self._ports: dict[tuple[Message, bool], _Wire] = {}
        self._lines: dict[Pair, _Receives] = {}
        self._layouts: dict[tuple[int, Op, Pair], _Described] = {}
        self.kind: Hashable = None
        self.numbers: Sequence[Hashable] = ()
        """Of the micro-batches of the step that runs."""
        self._receives: Sequence[Port] = ()
        self.sending: dict[_Wire, _Under] = {}
        self.arriving: dict[_Wire, tuple[_WireLayout, _Under]] = {}

    def port(self, message: Message, varies: bool = False) -> _Wire:
        if (message, varies) not in self._ports:
            pair = message.sender, message.receiver
            line = self._lines.setdefault(pair, _Receives(self, pair))
            layouts = self._layouts.setdefault((message.edge, message.op, pair), _Described())
            self._ports[message, varies] = _Wire(self, message, line, None if varies else layouts)
        return self._ports[message, varies]

    def keep(self, kinds: Collection[Hashable], numbers: Collection[Hashable]) -> None:
        for layouts in self._layouts.values():
            layouts.keep(kinds, numbers)

    def begin(self, kind: Hashable, numbers: Sequence[Hashable], receives: Sequence[Port] = ()) -> None:
        self.drop()
        self.kind, self.numbers = kind, numbers
        if receives is not self._receives:
            self._receives = receives
            for line in self._lines.values():
                line.coming = [wire for wire in receives if isinstance(wire, _Wire) and wire.line is line]

    def drop(self) -> None:
        self.sending.clear()
        self.arriving.clear()
        for line in self._lines.values():
            line.drop()

    def finish(self) -> None:
        for line in self._lines.values():
            while line.waiting:
                line.waiting[0].take()
        for port in list(self.arriving):
            port.take()
        for works in self.sending.values():
            for work, _ in works:
                work.wait()
        self.drop()

    def start(self, pair: Pair, buffer: Tensor) -> tuple[Work, Tensor]:
        """Starts to send."""
        buffer = buffer.to(self.device)
        return self.transport.send(pair, buffer), buffer

    def receive(self, pair: Pair, buffer: Tensor) -> tuple[Work, Tensor]:
        """Posts a receive."""
        return self.transport.receive(pair, buffer), buffer


class _Receives:
    """Of one pair of ranks, in the sender's order, what is to be received. ``coming``: in this step. ``waiting``: what
    cannot be posted yet: it is not described, or stands behind what is not; of the first the header is posted."""

    def __init__(self, exchange: WireExchange, pair: Pair) -> None:
        self._exchange, self._pair = exchange, pair
        self._header: tuple[Work, Tensor] | None = None
        self.coming: Sequence[_Wire] = ()
        self._place = 0  # of the next in it that is neither posted nor waiting
        self.waiting: deque[_Wire] = deque()

    def drop(self) -> None:
        self._header, self._place = None, 0
        self.waiting.clear()

    def add(self, wire: _Wire) -> None:
        """Posts a receive, and those behind it that are small; or lets it wait for its turn."""
        self.waiting.append(wire)
        self._place += 1
        self._advance()

    def _advance(self) -> None:
        """Posts whatever can be."""
        while self.waiting and (layout := self.waiting[0].layout) is not None:
            self.waiting.popleft().post_like(layout)
        if not self.waiting:
            self._post_more()
        elif self._header is None:
            self._header = self._receive(HEADER)

    def _post_more(self) -> None:
        """Posts what comes next, as long as it is small and described. Where it is posted, is planned to be later, at
        the latest: to post it now cannot make anybody wait."""
        left = BURST if self._exchange.device.type == "cpu" else 0
        while self._place < len(self.coming):
            wire = self.coming[self._place]
            layout = wire.layout
            if layout is None or (left := left - layout.nbytes) < 0:
                return
            wire.post_like(layout)
            self._place += 1

    def describe_first(self) -> None:
        """Waits for the description of the first, and posts it."""
        assert self._header is not None  # for there is a first one
        (work, buffer), self._header = self._header, None
        work.wait()
        header = bytes_of(buffer.cpu())
        sender = member(self._exchange.transport, "pipe", self._pair[0])
        size = check_length(int.from_bytes(header[:8], "little", signed=True), sender)
        described = header[8 : 8 + size]
        if size > len(described):
            work, rest = self._receive(size - len(described))
            work.wait()
            described += bytes_of(rest.cpu())
        layout = _WireLayout(Meta.of(decode(described, sender), sender), self._exchange.device)
        self.waiting.popleft().learn(layout).post_like(layout)
        self._advance()

    def _receive(self, size: int) -> tuple[Work, Tensor]:
        exchange = self._exchange
        return exchange.receive(self._pair, torch.empty(size, dtype=torch.uint8, device=exchange.device))


class _Wire:
    """One message's way between two ranks. ``line``: its pair's. ``layouts``: its edge's; None where it varies."""

    def __init__(self, exchange: WireExchange, message: Message, line: _Receives, layouts: _Described | None) -> None:
        self._exchange, self._message, self.line, self._layouts = exchange, message, line, layouts
        self._pair, self._microbatch = (message.sender, message.receiver), message.microbatch

    @property
    def layout(self) -> _WireLayout | None:
        """What it looks like in this step, where that is known by now, which it is at both ends or at none."""
        layouts, exchange = self._layouts, self._exchange
        if layouts is None:
            return None
        place, number = self._microbatch, exchange.numbers[self._microbatch]
        if layouts.by_place and (layout := layouts.by_place.get((exchange.kind, number, place))) is not None:
            return layout
        return layouts.by_number.get(number)

    def learn(self, layout: _WireLayout) -> _Wire:
        """It was described, for all that are like it."""
        layouts, exchange = self._layouts, self._exchange
        place, number = self._microbatch, exchange.numbers[self._microbatch]
        if layouts is not None and layout.meta.is_of_its_place:
            layouts.by_place[exchange.kind, number, place] = layout
        elif layouts is not None:
            layouts.by_number[number] = layout
        return self

    # sending

    def send(self, value: Any) -> None:
        known, exchange = self.layout, self._exchange
        if known is not None and known.like is not None and known.like.fits(value):
            exchange.sending[self] = [exchange.start(self._pair, value.detach())]
            return
        meta, buffers = pack(value, None if known is None else known.meta)
        header: list[Tensor] = []
        if known is None:
            header, known = self._header(meta), _WireLayout(meta, exchange.device)
            self.learn(known)
        elif known.meta != meta:
            raise RunError(
                f"{self._message} is {_describe(meta)}, but for a micro-batch of these shapes it was "
                f"{_describe(known.meta)}; what passes between stages may depend on the shape of a batch, not on its "
                "values, nor on how many came before"
            )
        if known.like is not None:
            buffers = [value.detach().resolve_neg()]
        exchange.sending[self] = [exchange.start(self._pair, part) for part in [*header, *buffers]]

    def _header(self, meta: Meta) -> list[Tensor]:
        try:
            described = encode(meta.tree)
        except RunError as error:
            raise RunError(f"{self._message} is {_describe(meta)}: {error}") from None
        header = len(described).to_bytes(8, "little") + described
        parts = [header[:HEADER].ljust(HEADER), header[HEADER:]]
        return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]

    def release(self) -> None:
        for work, _ in self._exchange.sending.pop(self, ()):
            work.wait()

    # receiving

    def post(self) -> None:
        """Posts ahead, unless what comes, or something in front of it, is not described yet."""
        if self not in self._exchange.arriving:  # posted with one before it
            self.line.add(self)

    def post_like(self, layout: _WireLayout) -> None:
        """Posts ahead; it is this wire's turn."""
        exchange = self._exchange
        buffers = allocate(layout.meta, exchange.device) if layout.like is None else [layout.like.allocate()]
        exchange.arriving[self] = layout, [exchange.receive(self._pair, buffer) for buffer in buffers]

    def take(self) -> Any:
        arriving = self._exchange.arriving
        while self not in arriving:  # in the sender's order, for that is how they come
            self.line.describe_first()
        layout, works = arriving.pop(self)
        for work, _ in works:
            work.wait()
        if layout.like is not None:
            return works[0][1].requires_grad_(layout.like.requires_grad)
        return unpack(layout.meta, [buffer for _, buffer in works])


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
