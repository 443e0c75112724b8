"""Outside: what other code reads of what a region kept whole holds, and it may change only as it was seen to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, fx, nn

from fxpipe.errors import RunError
from fxpipe.graph.kept import KeptWhole
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.torch_compat import version_of

Held = tuple[nn.Module, str, str]
"""A module, the name of a tensor that it holds, and that in the model."""


@dataclass(frozen=True)
class Unchanged:
    """What is looked at before and behind each call of a region, which may go another way than it was seen to.

    ``assigned``: buffers of its own; ``written``: tensors that others read, and that it was not seen to write;
    ``changed``: the name of an attribute that others read, and that is another one than when the step began.
    """

    name: str
    assigned: tuple[Held, ...]
    written: tuple[Held, ...]
    changed: Callable[[], str | None]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """RunError where what is inside changes what others have read already, or read in other stages."""
        own = [held(place) for place in self.assigned]
        read = [_state(place) for place in self.written]
        yield
        for before, place in zip(own, self.assigned, strict=True):
            if held(place) is not before:
                raise RunError(assigns(self.name, place[2]))
        changed = (place[2] for before, place in zip(read, self.written, strict=True) if _state(place) != before)
        found = next(changed, None) or self.changed()
        if found is not None:
            raise RunError(
                f"{self.name}, which is kept whole, changes {found}, which code outside of it reads, and which it did "
                "not change when the model was captured: return the value, or keep what reads it whole with it"
            )


def assigns(name: str, buffer: str) -> str:
    """Why a region may not put another tensor in a buffer's place."""
    return (
        f"{name}, which is kept whole, assigns {buffer}, a buffer that is a part of state_dict, which would keep the "
        f"old one: write into it, self.{buffer.rpartition('.')[2]}.copy_(...), or register it with persistent=False"
    )


def persistent(module: nn.Module, parts: Iterable[nn.Module]) -> tuple[Held, ...]:
    """The buffers that parts of a module hold and that are saved."""
    inside = {id(vars(inner)) for part in parts for inner in part.modules()}
    return tuple(
        (part, name, f"{path}.{name}" if path else name)
        for path, part in module.named_modules()
        if id(vars(part)) in inside
        for name in part._buffers.keys() - part._non_persistent_buffers_set
    )


def watch(program: Program, changed: Callable[[], str | None]) -> None:
    """Has each region of a program whose stages are known watched. ``changed``: see ``Unchanged``."""
    calls = {
        node: kept
        for node in program.graph.nodes
        if node.op == "call_module" and isinstance(kept := program.opaque.get(str(node.target)), KeptWhole)
    }
    for node, kept in calls.items():
        mine = {
            other
            for other, one in calls.items()
            if one.name == kept.name and program.stage_of.get(other.name) == program.stage_of.get(node.name)
        }
        read = {name for other in program.graph.nodes if other not in mine for name in _reads(program, other)}
        read -= set(program.effects[node.name].writes)
        own = persistent(program.module, kept.parts.values())
        places = [_place(program.module, name) for name in sorted(read)]
        kept.watch = Unchanged(kept.name, own, tuple(places), changed)


def _reads(program: Program, node: fx.Node) -> Iterator[str]:
    """The tensors of the model that a node reads."""
    if node.name in program.effects:
        yield from program.effects[node.name].reads
    elif node.op == "get_attr" and str(node.target) not in program.constants:
        yield str(node.target)
    elif node.op == "call_module" and str(node.target) not in program.opaque:
        yield from all_tensors(program.module.get_submodule(str(node.target)), str(node.target))


def _place(module: nn.Module, name: str) -> Held:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute, name


def held(place: Held) -> Tensor | None:
    """The tensor that is there now."""
    module, name, _ = place
    return module._buffers[name] if name in module._buffers else module._parameters.get(name)


def _state(place: Held) -> tuple[int, int]:
    """Which tensor it is, and how often it was written."""
    tensor = held(place)
    return id(tensor), 0 if tensor is None else version_of(tensor)
