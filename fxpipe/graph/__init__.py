"""Graph: ``Program`` and ``StageGraph``, the values that pass between packages, and their parts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpipe.graph.program import Program

__all__ = ["Program"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports ``Program``, which needs torch, at its use (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module 'fxpipe.graph' has no attribute {name!r}", name=name)
        from fxpipe.graph.program import Program

        return Program
