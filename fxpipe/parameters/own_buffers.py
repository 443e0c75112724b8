"""Own buffers: what each replica has of its own, such as BatchNorm's statistics; a checkpoint has one replica's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fxpipe.parameters.dtensors import is_dtensor
from fxpipe.torch_compat import plain_results


def own_buffers(module: nn.Module, state: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The names of what each replica has of its own in a state dict of ``module``: buffers, but for spread ones."""
    names = {prefix + name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name for name in names & state.keys() if not is_dtensor(state[name])}


class OwnBuffer(Tensor):
    """A buffer in the state dict of a replica that is not the first: a checkpoint has the first one's in its place.

    torch.distributed.checkpoint would take each from whichever replica has less to write, so that a mean and its
    variance could be of different rows. To everybody else it is a tensor, and what is computed with it is a plain one.
    """

    __torch_function__ = plain_results

    def __create_write_items__(self, fqn: str, obj: Any) -> list[Any]:
        return []

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """What torch's staging, which fills it, and ``copy.deepcopy`` begin with."""
        return super().new_empty(*args, **kwargs).as_subclass(OwnBuffer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def mark_own_buffers(module: nn.Module, state: dict[str, Any], prefix: str = "", metadata: Any = None) -> None:
    """Makes them ``OwnBuffer``s, in a state dict of a replica that is not the first."""
    for name in own_buffers(module, state, prefix):
        state[name] = state[name].as_subclass(OwnBuffer)
