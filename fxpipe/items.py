"""Items: ``num_items_in_batch``, which Hugging Face's losses divide by in place of a micro-batch's own labels.

Given the number of labels of the whole batch, over all micro-batches and replicas, the losses of the micro-batches add
up to the whole batch's mean, wherever its padding is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch import Description, Given, Like
from fxpipe.ir import StageGraph

NAME = "num_items_in_batch"
IGNORED = -100
"""The label that no loss counts."""
_GIVEN = Given("input", ("", (Like((), torch.int64, (), "cpu", False),)), Like((), torch.int64, (), "cpu", False))


@dataclass(frozen=True)
class Items:
    """How a model's labels are counted. ``shifts``: its loss predicts each label from the one before."""

    shifts: bool

    @staticmethod
    def of(model: nn.Module | StageGraph, loss_fn: Callable[..., Any] | None) -> Items | None:
        """None where the model takes no ``num_items_in_batch``, by its signature or as transformers' Trainer tells."""
        if isinstance(model, StageGraph) or loss_fn is not None:
            return None
        # of adapters around a model (PEFT), it is the model that says what it takes, as the Trainer asks, too
        base: Any = getattr(model, "get_base_model", lambda: model)()
        parameters = inspect.signature(base.forward).parameters
        by_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and hasattr(model, "loss_function")
        if NAME not in parameters and not (by_kwargs and getattr(model, "accepts_loss_kwargs", True)):
            return None
        is_causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        return Items(is_causal and not encoder_decoder)

    def described(self, batch: Description) -> Description:
        """The batch, with the number of its items, where it has labels and the user has not given the number."""
        names = {name for name, given in batch if given.kind == "input"}
        return (*batch, (NAME, _GIVEN)) if "labels" in names and NAME not in {name for name, _ in batch} else batch

    def count(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """The labels in these micro-batches that a loss counts: 0-dimensional, int64."""
        return torch.stack([(self._labels(batch) != IGNORED).sum() for batch in batches]).sum()

    def _labels(self, batch: Mapping[str, Any]) -> Tensor:
        if batch.get("shift_labels") is not None:
            return torch.as_tensor(batch["shift_labels"])
        labels = torch.as_tensor(batch["labels"])
        return labels[..., 1:] if self.shifts else labels


def uses_items(graph: StageGraph, rank: int | None = None) -> bool:
    """Whether a stage (on that rank) divides by the number of items; a model may accept the number and ignore it."""
    mine = (stage for stage in graph if rank is None or graph.placement[stage.index] == rank)
    return any(NAME in stage.batch_inputs for stage in mine)
