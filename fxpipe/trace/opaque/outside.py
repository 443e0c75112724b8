"""Outside: what other code reads of what an opaque region holds, and it may change only as it was seen to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, fx, nn

from fxpipe.errors import RunError
from fxpipe.graph.opaque_call import OpaqueCall
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.torch_compat import version_of
from fxpipe.trace.state.snapshot import Attributes, storage_of

Held = tuple[nn.Module, str, str]
"""A module, the name of a tensor that it holds, and that in the model."""


@dataclass(frozen=True)
class Unchanged:
    """What is looked at before and behind each call of a region, which may go another way than it was seen to.

    ``assigned``: buffers of its own; ``written``: tensors that others read, and that it was not seen to write;
    ``changed``: the name of an attribute that others read, and that is another one than when the step began.
    ``shared``: submodules, by their paths, that calls in other stages run, too, each rank its own; ``run``: all that it
    runs.
    """

    name: str
    assigned: tuple[Held, ...]
    written: tuple[Held, ...]
    changed: Callable[[], str | None]
    shared: Mapping[str, nn.Module]
    run: Mapping[str, nn.Module]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """RunError where what is inside changes what others have read already, or read in other stages."""
        own = [held(place) for place in self.assigned]
        read = [state_of(held(place)) for place in self.written]
        attributes = Attributes(self.shared, tensors=True)
        flags = [module.training for module in self.run.values()]
        yield
        for (path, module), flag in zip(self.run.items(), flags, strict=True):
            if module.training is not flag:
                raise RunError(switches(self.name, path))
        for before, place in zip(own, self.assigned, strict=True):
            if held(place) is not before:
                raise RunError(assigns(self.name, place[2]))
        changed = (
            place[2] for before, place in zip(read, self.written, strict=True) if state_of(held(place)) != before
        )
        found = next(changed, None) or self.changed() or next(map(_joined, sorted(attributes.changes())), None)
        if found is not None:
            raise RunError(
                f"{self.name}, an opaque region, changes {found}, which code outside of it reads, and which it did "
                "not change when the model was captured: return the value, or keep what reads it whole with it"
            )


def assigns(name: str, buffer: str) -> str:
    """Why a region may not put another tensor in a buffer's place."""
    return (
        f"{name}, an opaque region, assigns {buffer}, a buffer that is a part of state_dict, which would keep the "
        f"old one: write into it, self.{buffer.rpartition('.')[2]}.copy_(...), or register it with persistent=False"
    )


def switches(name: str, path: str) -> str:
    """Why a region may not leave a submodule in another mode."""
    return (
        f"{name}, an opaque region, switches {path or 'the model'} between training and evaluation when it runs, "
        "and micro-batches in flight and other ranks have it as it was: set it between steps, for the whole model, or "
        "set it back before the region returns"
    )


def buffers(module: nn.Module, parts: Iterable[nn.Module]) -> tuple[Held, ...]:
    """The buffers that parts of a module hold."""
    inside = {id(vars(inner)) for part in parts for inner in part.modules()}
    return tuple(
        (part, name, f"{path}.{name}" if path else name)
        for path, part in module.named_modules()
        if id(vars(part)) in inside
        for name in part._buffers
    )


def persistent(place: Held) -> bool:
    """Whether a buffer is saved."""
    module, name, _ = place
    return name not in module._non_persistent_buffers_set


def _joined(attribute: tuple[str, str]) -> str:
    return ".".join(filter(None, attribute))


def watch(program: Program, changed: Callable[[], str | None]) -> None:
    """Has each region of a program whose stages are known watched. ``changed``: see ``Unchanged``."""
    calls = {
        node: kept
        for node in program.graph.nodes
        if node.op == "call_module" and isinstance(kept := program.opaque.get(str(node.target)), OpaqueCall)
    }
    for node, kept in calls.items():
        mine = {
            other
            for other, one in calls.items()
            if one.name == kept.name and _stage(program, other) == _stage(program, node)
        }
        read = {name for other in program.graph.nodes if other not in mine for name in _reads(program, other)}
        read -= set(program.effects[node.name].writes)
        own = tuple(place for place in buffers(program.module, kept.parts.values()) if persistent(place))
        places = [_place(program.module, name) for name in sorted(read)]
        elsewhere = [one for other, one in calls.items() if _stage(program, other) != _stage(program, node)]
        inside, outside = _modules([kept]), _modules(elsewhere)
        run = {path: part for path, part in program.module.named_modules() if id(vars(part)) in inside}
        shared = {path: part for path, part in run.items() if id(vars(part)) in outside}
        kept.watch = Unchanged(kept.name, own, tuple(places), changed, shared, run)


def _stage(program: Program, node: fx.Node) -> int | None:
    return program.stage_of.get(node.name)


def _modules(calls: Iterable[OpaqueCall]) -> set[int]:
    """The submodules that calls run: whose method they are, and what they were seen to call."""
    run = [part for call in calls for top in call.parts.values() for part in top.modules()]
    return {id(vars(part)) for part in (*run, *(call.owner for call in calls))}


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


def state_of(tensor: Tensor | None) -> tuple[int, int, int]:
    """Which tensor it is, how often it was written, and where it lies, as ``.data = ...`` changes it."""
    return (id(None), 0, 0) if tensor is None else (id(tensor), version_of(tensor), storage_of(tensor))
