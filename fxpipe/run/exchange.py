"""Exchange: a rank's instructions send, post and take messages by it; a single process uses a mailbox instead.

The layout of a message (container, shapes, types, strides) follows from the capture and the shapes of its micro-batch,
which both ends know. So a description of the layout travels once for each capture and shape, before the first such
message. From then on the receiver allocates and posts receives ahead. Where a stage makes values of a new shape each
time, a description travels before each message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.device import bytes_of
from fxpipe.distributed.collective import Work
from fxpipe.distributed.transport import Pair, Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.packing import Meta, PlainMeta, allocate, pack, unpack
from fxpipe.plain_data import check_length, decode, encode
from fxpipe.schedules.kinds import Direction
from fxpipe.schedules.lower import Message

_Buffers = list[tuple[Work, Tensor]]
"""Buffers under way, each with its send or receive."""

BURST = 2**18
"""Bytes to receive from one rank ahead of time: a receive posts the receives behind it, up to this size. A receive that
is posted alone wakes the sender up, which for small messages takes longer than to send them."""

HEADER = 256
"""Bytes of the header that travels before a message without a known layout: a fixed size, so that it is posted ahead.
It has the length of the description, in 8 bytes, and its beginning; the rest travels as another message."""


class _WireLayout:
    """The layout of a message: container, shapes, types and strides."""

    def __init__(self, meta: Meta, device: torch.device) -> None:
        self.meta, self.nbytes = meta, meta.nbytes
        self.plain = PlainMeta.from_meta(meta, device)  # for a single plain tensor, which travels unchanged


class WireExchange:
    """The exchange of one rank among others. ``device``: where the transport's buffers live."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self._ports: dict[tuple[Message, bool], _Wire] = {}
        self._lines: dict[Pair, _Receives] = {}
        self._layouts: dict[tuple[int, Direction, Pair], dict[Hashable, _WireLayout]] = {}
        self.kind: Hashable = None
        self.numbers: Sequence[Hashable] = ()
        """See ``begin``."""
        self._receives: Sequence[Port] = ()
        self.sending: dict[_Wire, _Buffers] = {}
        self.arriving: dict[_Wire, tuple[_WireLayout, _Buffers]] = {}

    def port(self, message: Message, varies: bool = False) -> _Wire:
        """The port of a message, the same object in all steps. ``varies``: whether its layout may change each time; the
        same at both ends."""
        if (message, varies) not in self._ports:
            pair = message.sender, message.receiver
            line = self._lines.setdefault(pair, _Receives(self, pair))
            layouts = self._layouts.setdefault((message.edge, message.direction, pair), {})
            self._ports[message, varies] = _Wire(self, message, line, None if varies else layouts)
        return self._ports[message, varies]

    def forget(self) -> None:
        """Forgets the layouts of all messages; both ends of each do so."""
        for layouts in self._layouts.values():
            layouts.clear()

    def begin(self, kind: Hashable, numbers: Sequence[Hashable], receives: Sequence[Port]) -> None:
        """Begins a step. ``numbers``: a key for each micro-batch; messages of equal keys have the same layout.
        ``receives``: the ports that the step will post, in order; the same object in all steps that post the same."""
        self.drop()
        self.kind, self.numbers = kind, numbers
        if receives is not self._receives:
            self._receives = receives
            for line in self._lines.values():
                line.coming = [wire for wire in receives if isinstance(wire, _Wire) and wire.line is line]

    def drop(self) -> None:
        """Forgets all messages under way, without waiting, after a step that failed."""
        self.sending.clear()
        self.arriving.clear()
        for line in self._lines.values():
            line.drop()

    def finish(self) -> None:
        """Waits until every send was received, at the end of a step, whose actions have taken all that was posted."""
        assert not self.arriving
        for wire in list(self.sending):
            wire.release()
        self.drop()


class _Receives:
    """The receives of one pair of ranks, in the sender's order. ``coming``: all receives of this step. ``waiting``: the
    receives that cannot be posted yet: the first has no known layout, and its header is posted; the rest wait for it.
    """

    def __init__(self, exchange: WireExchange, pair: Pair) -> None:
        self._exchange, self._pair = exchange, pair
        self._header: tuple[Work, Tensor] | None = None
        self.coming: Sequence[_Wire] = ()
        self._place = 0  # in ``coming``: the next receive that is neither posted nor waiting
        self.waiting: deque[_Wire] = deque()

    def drop(self) -> None:
        self._header, self._place = None, 0
        self.waiting.clear()

    def add(self, wire: _Wire) -> None:
        """Posts a receive, and small receives behind it; or lets it wait for its turn."""
        self.waiting.append(wire)
        self._place += 1
        self._advance()

    def _advance(self) -> None:
        # Receives of a pair match sends by order alone: no receive may be posted past one without a known layout.
        while self.waiting and (layout := self.waiting[0].layout) is not None:
            self.waiting.popleft().post_as(layout)
        # The header's size is fixed, so that its receive can be posted before the message's layout is known.
        if self.waiting:
            if self._header is None:
                self._header = self._receive(HEADER)
            return
        # Post the next receives, too, as long as they are small and their layouts are known. They would be posted later
        # anyway, so that no rank waits because they are posted now.
        # On a GPU each receive occupies the stream of its communicator: there no receive is posted early.
        left = BURST if self._exchange.device.type == "cpu" else 0
        while self._place < len(self.coming):
            wire = self.coming[self._place]
            layout = wire.layout
            if layout is None or (left := left - layout.nbytes) < 0:
                return
            wire.post_as(layout)
            self._place += 1

    def describe_first(self) -> None:
        """Waits for the description of the first waiting message, and posts the message."""
        assert self._header is not None  # it was posted when the message began to wait
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
        wire.post_as(wire.learn(Meta.from_tree(decode(described, sender), sender)))
        self._advance()

    def _receive(self, size: int) -> tuple[Work, Tensor]:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._exchange.device)
        return self._exchange.transport.receive(self._pair, buffer), buffer


class _Wire:
    """The port of one message between two ranks, in every step. ``line``: the receives of the pair. ``layouts``: key of
    a micro-batch → layout, for the values or the gradients of the edge; None where the layout varies."""

    def __init__(
        self, exchange: WireExchange, message: Message, line: _Receives, layouts: dict[Hashable, _WireLayout] | None
    ) -> None:
        self._exchange, self._message, self.line, self._layouts = exchange, message, line, layouts
        self._pair, self._microbatch = (message.sender, message.receiver), message.microbatch

    @property
    def layout(self) -> _WireLayout | None:
        """The layout in this step; None where it is not known yet. Both ends know it, or neither."""
        layouts, exchange = self._layouts, self._exchange
        if layouts is None:
            return None
        number = exchange.numbers[self._microbatch]
        # A slice of the batch has a layout for each micro-batch; all other values have one for all micro-batches of
        # equal shapes.
        return layouts.get((exchange.kind, number, self._microbatch)) or layouts.get(number)

    def learn(self, meta: Meta) -> _WireLayout:
        """Stores the layout that was described, for all messages of the same key."""
        exchange, layout = self._exchange, _WireLayout(meta, self._exchange.device)
        key = exchange.numbers[self._microbatch]
        if meta.is_of_its_place:
            # A slice of the batch: its offset decides how it is aligned, and so the last bit of results.
            key = exchange.kind, key, self._microbatch
        if self._layouts is not None:
            self._layouts[key] = layout
        return layout

    # sending

    def send(self, value: Any) -> None:
        """Starts a send; does not wait."""
        # The usual case, a plain tensor with the layout of the last message: it is sent without packing.
        last = self.layout
        if last is not None and last.plain is not None and last.plain.fits(value):
            self._start([value.detach()])
            return
        meta, buffers = pack(value, None if last is None else last.meta)
        header: list[Tensor] = []
        if last is None:
            header, last = self._header(meta), self.learn(meta)
        elif last.meta != meta:
            raise RunError(
                f"{self._message} is {meta.tree!r:.1000}, but for a micro-batch of these shapes it was "
                f"{last.meta.tree!r:.1000}; what passes between stages may depend on the shape of a batch, not on its "
                "values, nor on how many came before"
            )
        if last.plain is not None:
            buffers = [value.detach().resolve_neg()]
        self._start([*header, *buffers])

    def _start(self, parts: Sequence[Tensor]) -> None:
        exchange = self._exchange
        # The buffers must live until the send is over: gloo and NCCL read them later.
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
        """Frees the buffer of a send that was received."""
        for work, _ in self._exchange.sending.pop(self, ()):
            work.wait()

    # receiving

    def post(self) -> None:
        """Posts a receive ahead, unless the layout of this message, or of an earlier one, is not known yet."""
        if self not in self._exchange.arriving:  # otherwise an earlier receive has posted it
            self.line.add(self)

    def post_as(self, layout: _WireLayout) -> None:
        exchange = self._exchange
        buffers = allocate(layout.meta, exchange.device) if layout.plain is None else [layout.plain.allocate()]
        works = [(exchange.transport.receive(self._pair, buffer), buffer) for buffer in buffers]
        exchange.arriving[self] = layout, works

    def take(self) -> Any:
        arriving = self._exchange.arriving
        while self not in arriving:  # messages come in the sender's order
            self.line.describe_first()
        layout, works = arriving.pop(self)
        for work, _ in works:
            work.wait()
        if layout.plain is not None:
            return works[0][1].requires_grad_(layout.plain.requires_grad)
        return unpack(layout.meta, [buffer for _, buffer in works])


class Mailbox:
    """The exchange of a process that plays all ranks: it hands values over unchanged."""

    def __init__(self) -> None:
        self._boxes: dict[Message, _Letterbox] = {}

    def port(self, message: Message, varies: bool = False) -> _Letterbox:
        return self._boxes.setdefault(message, _Letterbox())

    def forget(self) -> None:
        pass

    def begin(self, kind: Hashable, numbers: Sequence[Hashable], receives: Sequence[Port]) -> None:
        self.drop()

    def finish(self) -> None:
        pass  # every message was taken

    def drop(self) -> None:
        for box in self._boxes.values():
            box.values.clear()


class _Letterbox:
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
"""The port of one message, in every step."""

Exchange = WireExchange | Mailbox
"""Through it a rank's instructions send, post and take messages."""
