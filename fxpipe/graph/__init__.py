"""Graph: ``Program`` and ``StageGraph``, the values that pass between packages, and their parts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpipe.graph.program import Program

__all__ = ["Program"]


def _first_use(name: str) -> Any:
    """Imports ``Program``, which needs torch, at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'fxpipe.graph' has no attribute {name!r}", name=name)
    from fxpipe.graph import program

    value = globals()[name] = program.Program
    return value


if not TYPE_CHECKING:
    __getattr__ = _first_use
