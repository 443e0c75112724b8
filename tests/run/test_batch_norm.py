"""``update_batch_norm``: batch norms get the statistics that torch's ``update_bn`` gives those of the plain model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.swa_utils import AveragedModel, update_bn

import fxpipe
from tests.pool import Pool


class Siamese(nn.Module):
    """Two views by one encoder, so that each batch norm runs twice; the second stage has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.last = nn.BatchNorm1d(4, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(fxpipe.stage_boundary(self.encoder(x) - self.encoder(x.square())))


def batches() -> list[tuple[Tensor, Tensor]]:
    return [tuple(part) for part in torch.randn(4, 2, 12, 4, generator=torch.Generator().manual_seed(1))]


def updated(data: int, options: dict[str, Any]) -> None:
    """Averages of a first step, and the statistics of the batches for these, beside the plain model's."""
    torch.manual_seed(0)
    model = Siamese()
    plain, topology = copy.deepcopy(model), fxpipe.Topology([("pipe", 2 // data), ("data", data)])
    step = fxpipe.compile(model, topology, microbatches=2, loss_fn=nn.MSELoss(), **options)
    optimizer, average = step.optimizer(torch.optim.SGD, lr=0.5), fxpipe.Average(step, 0.9)
    loader = batches()[topology.data_rank if data > 1 else 0 :: data]
    average.update()
    step(loader[0][0], target=loader[0][1])
    optimizer.step()
    update_bn(loader, plain)
    with average.applied():
        fxpipe.update_batch_norm(step, loader)
        found = dict(step.state_dict(full=True))
        torch.testing.assert_close({n: found[n] + 0 for n in found}, dict(plain.state_dict()))
        torch.testing.assert_close(step.evaluate(loader[0][0], outputs="all"), plain.eval()(loader[0][0]))
    assert [part.momentum for part in model.modules() if isinstance(part, nn.BatchNorm1d)] == [0.1, 0.3]
    with pytest.raises(fxpipe.RunError):
        fxpipe.update_batch_norm(step, [*loader, {"no": loader[0][0]}])
    for name, buffer in step.module.named_buffers():
        assert torch.equal(buffer, found[name])
    step.close()


@pytest.mark.parametrize(("data", "zero"), [(1, 0), (2, 3)])
def test_statistics_are_those_of_update_bn_on_two_ranks(pool: Pool, data: int, zero: int) -> None:
    pool.run(updated, data, {"zero": zero}, ranks=2)


@pytest.mark.parametrize("options", [{"tracer": "record"}, {"parallelize": lambda stage, mesh: None}], ids=list)
def test_statistics_are_those_of_update_bn(options: dict[str, Any]) -> None:
    updated(1, {**options, "example_args": (torch.randn(4, 4),), "example_kwargs": {"target": torch.randn(4, 4)}})


def test_loops_over_the_modules_of_a_rank_find_the_models_classes() -> None:
    """They found none, and returned without a word."""
    model = nn.Sequential(Siamese(), nn.Dropout(0.5))
    module = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=2, loss_fn=torch.mean).module
    found = [type(part) for part in model.modules()][1:]
    assert [sum(isinstance(part, kind) for part in module.modules()) for kind in found] == [*map(found.count, found)]
    with pytest.raises(
        AttributeError, match=r"fxpipe\.update_batch_norm\(forward_backward, loader\) is torch's update"
    ):
        update_bn(batches(), AveragedModel(module))
    with pytest.raises(fxpipe.RunError, match=r"p is set in forward_backward\.module, but .* set it in the model that"):
        module.get_submodule("1").p = 0.1
    assert [part.in_features for part in module.modules() if isinstance(part, nn.Linear)] == [4, 8]
    module.get_submodule("0.last").eval()
    assert not model[0].last.training
    assert pickle.loads(pickle.dumps(module)).state_dict().keys() == module.state_dict().keys()


def test_loops_over_containers_of_a_rank_walk_its_parts() -> None:
    """torch's ``is_parametrized`` takes the length of a container: it raised a TypeError."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    module = fxpipe.compile(model, fxpipe.Topology([("pipe", 1)]), microbatches=2, loss_fn=torch.mean).module
    assert [*map(is_parametrized, module.modules())] == [*map(is_parametrized, model.modules())]
    (parts,) = (part for part in module.modules() if isinstance(part, nn.ModuleDict))
    assert (len(parts), [*parts], "weight" in parts, bool(parts)) == (1, ["weight"], True, True)
