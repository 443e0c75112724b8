"""``fxpipe.save`` and ``fxpipe.load``: a run goes on as it was, on the same ranks or others."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fxpipe
from fxpipe.errors import CheckpointError
from tests.pool import Pool
from tests.thinned import every, in_turn
from tests.whole.test_resume import AFTER, BEFORE, Boxes, Layout, Run, closing, in_world, on_ranks, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Saved(Run):
    """The same model, optimizer and schedule of learning rates, saved and loaded by fxpipe."""

    def write(self, folder: Path, step: int, **options: Any) -> Any:
        options = {"scheduler": self.schedule, **options}
        return fxpipe.save(folder, self.model, self.optimizer, step=step, **options)

    def read(self, folder: Path) -> dict[str, Any]:
        if not self.layout.plain:
            return fxpipe.load(folder, self.model, self.optimizer, scheduler=self.schedule)
        state = {
            "model": self.model.state_dict(),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }
        dcp.load({**state, "scheduler": self.schedule}, checkpoint_id=folder / "latest", no_dist=True)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"])
        return {"step": BEFORE}


def losses(run: Saved) -> list[float]:
    return closing(run, [run.step(number).item() for number in range(BEFORE, BEFORE + AFTER + 1)])


def written(layout: Layout, folder: Path) -> tuple[Boxes, list[float]]:
    run = Saved(layout, seed=0)
    for step in range(BEFORE):
        run.step(step)
    run.write(folder, BEFORE, extra={"best": 0.5})
    boxes = run.boxes()
    return boxes, losses(run)


def read(layout: Layout, folder: Path) -> tuple[Boxes, list[float]]:
    run = Saved(layout, seed=1)
    assert run.read(folder)["step"] == BEFORE
    boxes = run.boxes()
    return boxes, losses(run)


HOME = Layout(4, 1, 0, False)
ELSEWHERE = [
    HOME,
    Layout(2, 2, 1, False),
    Layout(1, 4, 2, False, order=("data", "pipe")),
    Layout(1, 1, 0, False),
    Layout(1, 1, 0, False, plain=True),
]


@pytest.fixture(scope="module")
def at_home(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], list[float]]:
    folder = tmp_path_factory.mktemp("run")
    return (folder, *on_ranks(pool, HOME, written, folder))


@pytest.mark.parametrize("layout", every(2, ELSEWHERE), ids=str)
def test_a_run_of_four_stages_goes_on_elsewhere(pool: Pool, at_home: Any, layout: Layout) -> None:
    folder, saved, wanted = at_home
    loaded, after = on_ranks(pool, layout, read, folder)
    same(loaded, saved, precise=False)
    if layout == HOME:
        assert after == wanted
    else:
        assert after == pytest.approx(wanted, abs=1e-6)


# --- random numbers


class Noisy(nn.Module):
    """Draws in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(nn.functional.dropout(self.first(x), 0.3, self.training))
        h = nn.functional.dropout(self.second(h).relu(), 0.3, self.training)
        return self.last(h).square().mean()


def noisy(seed: int, pipe: int, data: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    topology = fxpipe.Topology([("pipe", pipe), ("data", data)])
    forward_backward = fxpipe.compile(Noisy(), topology, microbatches=2, **options)
    return forward_backward, forward_backward.optimizer(torch.optim.AdamW, lr=0.05)


def drawn(forward_backward: Any, optimizer: Any) -> float:
    """A step on rows that are drawn by torch and by Python, the same on all ranks of a pipe group."""
    optimizer.zero_grad()
    loss = forward_backward(torch.randn(8, 6) + random.random())
    optimizer.step()
    return float(loss)


def noisy_saved(folder: Path, block: bool, pipe: int, data: int, options: dict[str, Any]) -> list[float]:
    run = noisy(0, pipe, data, **options)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(rank % data)  # each replica draws its own
    for _ in range(2):
        drawn(*run)
    later = fxpipe.save(folder, *run, step=2, block=block)
    after = [drawn(*run) for _ in range(3)]  # which write over what is being saved
    assert later.result(60) == folder / "step-000002"
    run[0].close()
    return after


def noisy_loaded(folder: Path, pipe: int, data: int, options: dict[str, Any]) -> list[float]:
    run = noisy(7, pipe, data, **options)
    fxpipe.load(folder, *run)
    after = [drawn(*run) for _ in range(3)]
    run[0].close()
    return after


@pytest.mark.parametrize(("zero", "block"), in_turn([1, 3], [True, False]))
def test_the_same_ranks_go_on_with_the_same_bits(pool: Pool, tmp_path: Path, block: bool, zero: int) -> None:
    """Dropout, rows drawn anew, moments and masters; written at once, or while the run goes on."""
    grid = (2, 2, {"zero": zero, "precision": fxpipe.Precision()})
    wanted = pool.run(in_world, noisy_saved, tmp_path, block, *grid, ranks=4)
    assert pool.run(in_world, noisy_loaded, tmp_path, *grid, ranks=4) == wanted


def test_dropout_and_rows_go_on_where_stages_lie_otherwise(pool: Pool, tmp_path: Path) -> None:
    wanted = pool.run(in_world, noisy_saved, tmp_path, True, 2, 2, {}, ranks=4)
    found = pool.run(in_world, noisy_loaded, tmp_path, 1, 2, {}, ranks=2)
    assert found[0] == pytest.approx(wanted[0], abs=1e-6)


# --- what is given beside


class Position:
    """A loader's state: how far it has come, counted in this replica's rows or in the whole run's."""

    def __init__(self, place: int, any_replicas: bool = True) -> None:
        self.place, self.any_replicas = place, any_replicas

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def beside(
    folder: Path, pipe: int, data: int, place: Callable[[int], int], saves: bool, any_replicas: bool = True
) -> Any:
    """The place that a rank's loader comes to, or how it is refused."""
    run = noisy(0, pipe, data)
    rank = torch.distributed.get_rank()
    replica = run[0].topology.coordinate(rank)["data"]
    loader = Position(place(replica) if saves else -1, any_replicas)
    try:
        if saves:
            fxpipe.save(folder, *run, step=1, loader=loader)
        else:
            fxpipe.load(folder, *run, loader=loader)
    except CheckpointError as error:
        return str(error)
    finally:
        run[0].close()
    return loader.place


def tenfold(replica: int) -> int:
    return 10 + replica


def seven(replica: int) -> int:
    return 7


def test_each_replica_gets_its_loaders_place_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(in_world, beside, tmp_path, 2, 2, tenfold, True, ranks=4)
    assert pool.run(in_world, beside, tmp_path, 1, 2, tenfold, False, ranks=2) == [10, 11]
    refusals = pool.run(in_world, beside, tmp_path, 2, 1, tenfold, False, ranks=2)
    assert all("the loader that was saved differs between ranks" in told for told in refusals)


def test_a_place_in_a_replicas_own_rows_is_refused_on_another_number_of_them(pool: Pool, tmp_path: Path) -> None:
    """Two replicas that have drawn 7 rows each are at row 14, and four would go on at row 28; of all rows it is one."""
    pool.run(in_world, beside, tmp_path / "all", 1, 2, seven, True, ranks=2)
    assert pool.run(in_world, beside, tmp_path / "all", 1, 4, seven, False, ranks=4) == [7] * 4
    pool.run(in_world, beside, tmp_path, 1, 2, seven, True, False, ranks=2)
    refusals = pool.run(in_world, beside, tmp_path, 1, 4, seven, False, False, ranks=4)
    assert all("was saved on 2 replicas, and there are 4 now" in told for told in refusals)
    assert all("any_replicas = True in the class Position" in told for told in refusals)
    assert pool.run(in_world, beside, tmp_path, 2, 2, seven, False, False, ranks=4) == [7] * 4


# --- buffers of replicas


class ManyNorms(nn.Module):
    """Replicas have about as much to write, so that a write of one tensor changes who has less."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norms = nn.Linear(6, 8), nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for number, norm in enumerate(self.norms):
            h = norm(fxpipe.stage_boundary(h) if number == 2 else h).relu()
        return h.square().mean()


def statistics(folder: Path, pipe: int, data: int, saves: bool) -> dict[str, Tensor]:
    """This rank's, when it has saved or loaded them."""
    torch.manual_seed(0 if saves else 1)
    forward_backward = fxpipe.compile(ManyNorms(), fxpipe.Topology([("pipe", pipe), ("data", data)]), microbatches=2)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.05)
    if saves:
        rank = torch.distributed.get_rank() % data
        forward_backward(torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)))
        fxpipe.save(folder, forward_backward, optimizer, step=1)
    else:
        fxpipe.load(folder, forward_backward, optimizer)
    found = {name: buffer.clone() for name, buffer in forward_backward.module.named_buffers()}
    forward_backward.close()
    return found


def test_each_replica_goes_on_with_its_own_buffers_and_others_with_the_firsts(pool: Pool, tmp_path: Path) -> None:
    wanted = pool.run(in_world, statistics, tmp_path, 1, 2, True, ranks=2)
    assert not torch.equal(wanted[0]["norms.0.running_mean"], wanted[1]["norms.0.running_mean"])
    alike = pool.run(in_world, statistics, tmp_path, 1, 2, False, ranks=2)
    elsewhere = pool.run(in_world, statistics, tmp_path, 2, 1, False, ranks=2)
    for found, first in [*zip(alike, wanted, strict=True), *((one, wanted[0]) for one in elsewhere)]:
        assert found
        assert all(torch.equal(buffer, first[name]) for name, buffer in found.items())


def buffers_by_dcp(folder: Path, way: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """This rank's buffers; what torch's own call has saved of them, and what it loads into this rank."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(ManyNorms(), fxpipe.Topology([("pipe", 2), ("data", 2)]), microbatches=2)
    rank = torch.distributed.get_rank()
    forward_backward(torch.randn(8, 6, generator=torch.Generator().manual_seed(rank % 2)))
    own = {name: buffer.clone() for name, buffer in forward_backward.module.named_buffers()}
    if way == "async_save":
        dcp.async_save({"model": forward_backward}, checkpoint_id=folder).result(60)
    else:
        saved = {"save": forward_backward, "module": forward_backward.module}.get(way)
        dcp.save({"model": saved or forward_backward.state_dict(full=True)}, checkpoint_id=folder)
    written = {f"model.{name}": torch.empty_like(buffer) for name, buffer in own.items()}
    dcp.load(written, checkpoint_id=folder, no_dist=True)
    dcp.load({"model": forward_backward}, checkpoint_id=folder)
    loaded = {name: buffer.clone() for name, buffer in forward_backward.module.named_buffers()}
    pickled = pickle.dumps(forward_backward.state_dict())
    assert b"OwnBuffer" not in pickled  # no file depends on how replicas are marked
    copied = copy.deepcopy(forward_backward.state_dict())
    assert all(torch.equal(copied[name], buffer) for name, buffer in loaded.items())
    forward_backward.close()
    return own, {name.removeprefix("model."): buffer for name, buffer in written.items()}, loaded


@pytest.mark.parametrize("way", every(3, ["save", "module", "full", "async_save"]))
def test_torchs_own_save_has_the_first_replicas_buffers_alone(pool: Pool, tmp_path: Path, way: str) -> None:
    """As a plain loop's first rank would save them: a mean and its variance are of the same rows."""
    ranks = pool.run(in_world, buffers_by_dcp, tmp_path, way, ranks=4)
    for pipe in range(2):
        first, second = (ranks[2 * pipe + replica] for replica in range(2))
        assert first[0].keys() == second[0].keys() != set()
        assert not any(torch.equal(first[0][name], second[0][name]) for name in first[0] if "running" in name)
        for _, written, loaded in (first, second):
            assert all(torch.equal(written[name], buffer) for name, buffer in first[0].items())
            assert all(torch.equal(loaded[name], buffer) for name, buffer in first[0].items())


# --- errors are everybody's


def failing(folder: Path) -> list[str]:
    """One rank cannot write: what every rank is told, and what is left."""
    run = noisy(0, 2, 1)
    fxpipe.save(folder, *run, step=1)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr("os.fsync", no_space)
        try:
            fxpipe.save(folder, *run, step=2, block=False).result(60)
        except CheckpointError as error:
            told.append(str(error))
    with pytest.raises(CheckpointError, match="the checkpoint before this one could not be written"):
        fxpipe.save(folder, *run, step=3)
    fxpipe.save(folder, *run, step=3)
    told += sorted(path.name for path in folder.iterdir())
    run[0].close()
    return told


def no_space(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_where_one_rank_cannot_write_all_are_told_and_nothing_is_left(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(in_world, failing, tmp_path, ranks=2)
    assert first[0].startswith("rank 1: ")
    assert all("No space left on device; the checkpoints that were complete" in told[0] for told in (first, second))
    assert first[1:] == ["latest", "lock", "step-000001", "step-000003"]


def short_of_memory(folder: Path) -> Any:
    """One rank cannot look through the newer checkpoint: the step that every rank goes on from."""
    run = noisy(0, 2, 1)
    for step in (1, 2):
        fxpipe.save(folder, *run, step=step)
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr("fxpipe.run.loading.Manifest.check_contents", fails_for_the_newer)
        found = fxpipe.load(folder, *run)
    run[0].close()
    return found["step"]


def fails_for_the_newer(self: Any, folder: Path, rank: int, ranks: int) -> None:
    if self.step == 2:
        raise CheckpointError("altered")


@pytest.mark.filterwarnings("ignore:.*Going on from the one before")
def test_all_ranks_go_back_where_one_does(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(in_world, short_of_memory, tmp_path, ranks=2) == [1, 1]
