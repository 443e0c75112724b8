"""Label count: ``num_items_in_batch``, by which Hugging Face's losses divide instead of a micro-batch's own labels.

Let N be the labels in the whole batch, over all micro-batches and replicas, and wᵢ the weight of micro-batch i's loss.
Micro-batch i gets N·wᵢ: Σ wᵢ · (totalᵢ / (N·wᵢ)) = Σ totalᵢ / N, the whole batch's mean, wherever its padding is. A
loss that is not divided by the number (a mean over rows, an auxiliary loss, any loss of a model that ignores it)
becomes the mean over the micro-batches. So fxpipe need not know how the model uses the number.

Takes: a model, and micro-batches with labels. Gives: ``Items``, which says whether the model takes the number, counts
labels, and adds the number to micro-batches. It sums nothing over ranks: a step does.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.description import Description, described
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.specs import ITEMS, TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.validation import is_list

IGNORED = -100
"""The label that no loss counts."""
_GIVEN = described(TensorSpec((), torch.float32, (), "cpu", False), exact=False)


@dataclass(frozen=True)
class Items:
    """How a model's labels are counted. ``shifts``: whether its loss predicts a label from the label before, so that a
    row's first label does not count. ``uncounted``: the reason why labels are not counted; a number that the call gives
    is still passed to micro-batches. ``is_taken``: whether a call can give the number. ``has_positions``: whether
    forward takes ``position_ids``."""

    shifts: bool = False
    uncounted: str = ""
    is_taken: bool = True
    has_positions: bool = False

    @staticmethod
    def from_model(model: nn.Module | StageGraph, uncounted: str = "") -> Items:
        """The items of a model, from its ``forward``, its loss function and its configuration."""
        if isinstance(model, StageGraph):
            return Items(uncounted="the stages are given", is_taken=ITEMS in model.inputs)
        # An adapter (PEFT) takes any input, so the signature of the model inside decides, as in transformers' Trainer.
        base: Any = getattr(model, "get_base_model", lambda: model)()
        parameters = inspect.signature(base.forward).parameters
        has_positions = "position_ids" in parameters
        if ITEMS not in parameters:
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                return Items(uncounted="forward takes no number", is_taken=False, has_positions=has_positions)
            if not hasattr(model, "loss_function"):
                uncounted = uncounted or f"forward does not name {ITEMS}"
            elif not getattr(model, "accepts_loss_kwargs", True):
                uncounted = uncounted or "the model has accepts_loss_kwargs = False"
        is_causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        return Items(is_causal and not encoder_decoder, uncounted, has_positions=has_positions)

    def note(self, inputs: Collection[str], read: Collection[str]) -> str:
        """A note that says whether the labels of a batch are counted. ``read``: the inputs that stages read."""
        if "labels" not in inputs or not self.is_taken:
            return ""
        if ITEMS in read and not self.uncounted:
            return f"labels are counted: the loss reads {ITEMS} of the whole batch"
        if ITEMS in read:
            return f"labels are not counted: {ITEMS} is what the call gives"
        return f"labels are not counted: {self.uncounted or f'the loss does not read {ITEMS}'}"

    def described(self, batch: Description) -> Description:
        """The batch's description, with the number of items if it has labels and the user has not given the number."""
        named = dict(batch)
        wanted = not self.uncounted and "labels" in named and are_counted(named["labels"].spec) and ITEMS not in named
        return (*batch, (ITEMS, _GIVEN)) if wanted else batch

    def given(self, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches, with the number of their items if ``described`` adds the number."""
        counted = (are_counted(batch.get("labels")) and ITEMS not in batch for batch in batches)
        if self.uncounted or not all(counted):
            return [dict(batch) for batch in batches]
        count = as_number(self.count(batches).clamp(min=1))
        return [{**batch, ITEMS: count} for batch in batches]

    def count(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """The number of labels in these micro-batches that a loss counts: 0-dimensional, int64."""
        return torch.stack([(self._labels(batch) != IGNORED).sum() for batch in batches]).sum()

    def counts_of(self, batches: Sequence[Mapping[str, Any]]) -> list[int]:
        """The number of labels that a loss counts, and the number with the first label of each row included; empty for
        micro-batches without labels."""
        if not all(are_counted(batch.get("labels")) for batch in batches):
            return []
        return [int(self.count(batches)), int(replace(self, shifts=False).count(batches))]

    def _labels(self, batch: Mapping[str, Any]) -> Tensor:
        # Sequence-parallel batches contain shifted labels in addition to plain labels.
        if batch.get("shift_labels") is not None:
            return torch.as_tensor(batch["shift_labels"])
        labels = torch.as_tensor(batch["labels"])
        return labels[..., 1:] if self.shifts else labels


def are_counted(labels: Any) -> bool:
    """Whether labels can be counted: a tensor, a ``TensorSpec``, or numbers in lists. A detector's labels, a dict for
    each image, are not counted, as in transformers' Trainer."""
    if is_list(labels):
        return all(isinstance(leaf, Real) for leaf in pytree.tree_leaves(labels))
    return isinstance(labels, (Tensor, TensorSpec))


def with_number(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with a number of items converted to a float32 tensor, the type for which captures are valid."""
    number = inputs.get(ITEMS)
    return inputs | {ITEMS: as_number(number)} if isinstance(number, (Tensor, Real)) else inputs


def as_number(number: Tensor | Real) -> Tensor:
    """A number of items as captures have it: a 0-dimensional float32 tensor."""
    return torch.as_tensor(number).to(torch.float32)
