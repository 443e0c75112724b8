"""Exchange: where a rank's instructions send, post and take messages; where one process plays all ranks, a mailbox.

What a message looks like (container, shapes, types, strides) follows from the capture and the shapes of its
micro-batch, which both ends know. So its description travels once for each of these, in front of the first such
message; from then on the receiver allocates and posts ahead, in every step and for every micro-batch that is like it.
Where a stage makes values of another shape each time, it travels in front of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.collective import Work
from fxpipe.distributed.transport import Pair, Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.packing import Meta, PlainMeta, allocate, pack, unpack
from fxpipe.graph.plain_data import check_length, decode, encode
from fxpipe.schedules.action import Op
from fxpipe.schedules.lower import Message
from fxpipe.torch_compat import bytes_of

_Buffers = list[tuple[Work, Tensor]]
"""Buffers that are under way."""

BURST = 2**18
"""Bytes that are received from one rank ahead of their time: a receive that is posted takes those behind it along. Each
one that is posted alone wakes the sender up, which for small messages takes longer than to send them."""

HEADER = 256
"""Bytes of the message that goes in front of one that is not described yet, so that it can be posted ahead: the length
of the description, 8 bytes, and its beginning. Of a single tensor that is all; else the rest is a message behind it."""


class _WireLayout:
    """What a message looks like."""

    __slots__ = ("like", "meta", "nbytes", "number")

    def __init__(self, meta: Meta, device: torch.device) -> None:
        self.meta, self.nbytes = meta, meta.nbytes
        self.like = PlainMeta.of(meta, device)  # of a single plain tensor, which travels unchanged
        # a size that one stage has asked for another's sake: both ends know it, and nothing travels
        self.number = meta.leaves[0] if meta.spec.is_leaf() and type(meta.leaves[0]) is int else None


class WireExchange:
    """The exchange of one rank among others. ``device``: where the transport's buffers live."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self._ports: dict[tuple[Message, bool], _Wire] = {}
        self._lines: dict[Pair, _Receives] = {}
        self._layouts: dict[tuple[int, Op, Pair], dict[Hashable, _WireLayout]] = {}
        self.kind: Hashable = None
        self.numbers: Sequence[Hashable] = ()
        """Of the micro-batches of the step that runs."""
        self._receives: Sequence[Port] = ()
        self.sending: dict[_Wire, _Buffers] = {}
        self.arriving: dict[_Wire, tuple[_WireLayout, _Buffers]] = {}

    def port(self, message: Message, varies: bool = False) -> _Wire:
        """A message's, the same object in all steps. ``varies``: whether it may look otherwise each time; the
        same at both ends."""
        if (message, varies) not in self._ports:
            pair = message.sender, message.receiver
            line = self._lines.setdefault(pair, _Receives(self, pair))
            layouts = self._layouts.setdefault((message.edge, message.op, pair), {})
            self._ports[message, varies] = _Wire(self, message, line, None if varies else layouts)
        return self._ports[message, varies]

    def forget(self) -> None:
        """Forgets what messages look like; both ends of each do."""
        for layouts in self._layouts.values():
            layouts.clear()

    def begin(self, kind: Hashable, numbers: Sequence[Hashable], receives: Sequence[Port]) -> None:
        """A step begins. ``numbers``: one for each micro-batch: where they are equal, messages have the same layout.
        ``receives``: what will be posted, in order; the same object in all steps that post the same."""
        self.drop()
        self.kind, self.numbers = kind, numbers
        if receives is not self._receives:
            self._receives = receives
            for line in self._lines.values():
                line.coming = [wire for wire in receives if isinstance(wire, _Wire) and wire.line is line]

    def drop(self) -> None:
        """Forgets what is under way, without waiting: the step has failed."""
        self.sending.clear()
        self.arriving.clear()
        for line in self._lines.values():
            line.drop()

    def finish(self) -> None:
        """Waits for what is still under way, at the end of a step."""
        # What was sent and never taken must be received, or it would be taken for the next step's first message.
        for line in self._lines.values():
            while line.waiting:
                line.waiting[0].take()
        for wire in list(self.arriving):
            wire.take()
        for wire in list(self.sending):
            wire.release()
        self.drop()


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
        # Receives of a pair match sends by order alone: nothing may be posted past one that is not described.
        while self.waiting and (layout := self.waiting[0].layout) is not None:
            self.waiting.popleft().post_like(layout)
        # The header's size is fixed, so that its receive can be posted before anything is known of the message.
        if self.waiting:
            if self._header is None:
                self._header = self._receive(HEADER)
            return
        # Post what comes next, too, as long as it is small and described. It would be posted later anyway, so that
        # nobody waits because it is posted now.
        # On a GPU each receive occupies the stream of its communicator: there none is posted early.
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
        wire = self.waiting.popleft()
        wire.post_like(wire.learn(Meta.of(decode(described, sender), sender)))
        self._advance()

    def _receive(self, size: int) -> tuple[Work, Tensor]:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._exchange.device)
        return self._exchange.transport.receive(self._pair, buffer), buffer


class _Wire:
    """One message's way between two ranks, in every step. ``line``: its pair's. ``layouts``: of its edge's values, or
    gradients, by what is the same at both ends; None where it varies."""

    def __init__(
        self, exchange: WireExchange, message: Message, line: _Receives, layouts: dict[Hashable, _WireLayout] | None
    ) -> None:
        self._exchange, self._message, self.line, self._layouts = exchange, message, line, layouts
        self._pair, self._microbatch = (message.sender, message.receiver), message.microbatch

    @property
    def layout(self) -> _WireLayout | None:
        """What it looks like in this step, where that is known by now, which it is at both ends or at none."""
        layouts, exchange = self._layouts, self._exchange
        if layouts is None:
            return None
        number = exchange.numbers[self._microbatch]
        # A part of the batch has a layout for its place in it; all else has one for all micro-batches of its shapes.
        return layouts.get((exchange.kind, number, self._microbatch)) or layouts.get(number)

    def learn(self, meta: Meta) -> _WireLayout:
        """It was described, for all that are like it."""
        exchange, layout = self._exchange, _WireLayout(meta, self._exchange.device)
        key = exchange.numbers[self._microbatch]
        if meta.is_of_its_place:
            # as a part of the batch: its place there decides how it is aligned, and that the last bit of what is
            # computed of it
            key = exchange.kind, key, self._microbatch
        if self._layouts is not None:
            self._layouts[key] = layout
        return layout

    # sending

    def send(self, value: Any) -> None:
        """Starts a send; does not wait."""
        # The usual case: one plain tensor that looks as the last one did. It is sent as it is, without being packed.
        known = self.layout
        if known is not None and known.like is not None and known.like.fits(value):
            self._start([value.detach()])
            return
        if known is not None and type(value) is int and value == known.number:
            return
        meta, buffers = pack(value, None if known is None else known.meta)
        header: list[Tensor] = []
        if known is None:
            header, known = self._header(meta), self.learn(meta)
        elif known.meta != meta:
            raise RunError(
                f"{self._message} is {meta.tree!r:.1000}, but for a micro-batch of these shapes it was "
                f"{known.meta.tree!r:.1000}; what passes between stages may depend on the shape of a batch, not on its "
                "values, nor on how many came before"
            )
        if known.like is not None:
            buffers = [value.detach().resolve_neg()]
        self._start([*header, *buffers])

    def _start(self, parts: Sequence[Tensor]) -> None:
        exchange = self._exchange
        # The buffers are held until the send is over: gloo and NCCL read them later.
        buffers = [part.to(exchange.device) for part in parts]
        exchange.sending[self] = [(exchange.transport.send(self._pair, buffer), buffer) for buffer in buffers]

    def _header(self, meta: Meta) -> list[Tensor]:
        try:
            described = encode(meta.tree)
        except RunError as error:
            raise RunError(f"{self._message} is {meta.tree!r:.1000}: {error}") from None
        header = len(described).to_bytes(8, "little") + described
        parts = [header[:HEADER].ljust(HEADER), header[HEADER:]]
        return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]

    def release(self) -> None:
        """Frees the buffer of a send that is known to have been received."""
        for work, _ in self._exchange.sending.pop(self, ()):
            work.wait()

    # receiving

    def post(self) -> None:
        """Posts a receive ahead, unless what comes, or something in front of it, is not described yet."""
        if self not in self._exchange.arriving:  # posted with one before it
            self.line.add(self)

    def post_like(self, layout: _WireLayout) -> None:
        """Posts ahead; it is this wire's turn."""
        exchange = self._exchange
        buffers = allocate(layout.meta, exchange.device) if layout.like is None else [layout.like.allocate()]
        works = [(exchange.transport.receive(self._pair, buffer), buffer) for buffer in buffers]
        exchange.arriving[self] = layout, works

    def take(self) -> Any:
        """The message's value, once it is here."""
        arriving = self._exchange.arriving
        while self not in arriving:  # in the sender's order, for that is how they come
            self.line.describe_first()
        layout, works = arriving.pop(self)
        for work, _ in works:
            work.wait()
        if layout.like is not None:
            return works[0][1].requires_grad_(layout.like.requires_grad)
        if layout.number is not None:
            return layout.number
        return unpack(layout.meta, [buffer for _, buffer in works])


class Mailbox:
    """The exchange of a process that plays all ranks: values are handed over as they are."""

    def __init__(self) -> None:
        self._boxes: dict[Message, _Letterbox] = {}

    def port(self, message: Message, varies: bool = False) -> _Letterbox:
        return self._boxes.setdefault(message, _Letterbox())

    def forget(self) -> None:
        pass

    def begin(self, kind: Hashable, numbers: Sequence[Hashable], receives: Sequence[Port]) -> None:
        self.drop()

    def finish(self) -> None:
        pass  # all that was sent was taken

    def drop(self) -> None:
        for box in self._boxes.values():
            box.values.clear()


class _Letterbox:
    """One message's place in a mailbox."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[Any] = []

    def post(self) -> None:
        pass

    def take(self) -> Any:
        return self.values.pop()

    def send(self, value: Any) -> None:
        self.values.append(value)

    def release(self) -> None:
        pass


Port = _Wire | _Letterbox
"""One message's way, in every step."""

Exchange = WireExchange | Mailbox
"""Where a rank's instructions send, post and take messages."""
