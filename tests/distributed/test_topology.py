"""Topology: the contract's examples, and every group against numpy's own idea of a grid."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fxpipe
from fxpipe.distributed.grid import ROLES
from fxpipe.distributed.topology import Topology
from fxpipe.errors import TopologyError
from tests.device import BACKEND, DEVICE
from tests.distributed.environment import TORCHRUN
from tests.pool import Pool
from tests.work import steps

Axes = list[tuple[str, int]]

CONTRACT: Axes = [("pipe", 2), ("tensor", 2), ("data", 4)]
UNEVEN: Axes = [("data", 3), ("tensor", 2)]

# (axes, ranks per node)
TOPOLOGIES: list[tuple[Axes, int | None]] = [
    (CONTRACT, None),
    (CONTRACT, 2),
    ([("pipe", 1)], None),
    ([("data", 6)], 3),
    ([("pipe", 3), ("data", 2)], 3),  # the middle data group straddles the two nodes
    ([("data", 4), ("pipe", 3)], 6),
    ([("dp", 2), ("pp", 3), ("tp", 2)], 6),
    ([("tp", 1), ("dp", 5), ("pp", 2)], 10),
    ([("pipe", 2), ("data", 2), ("expert", 2)], 4),
    ([("pipe", 2), ("data", 2), ("expert", 2)], 2),
    ([("expert", 3), ("pipe", 2), ("cp", 2)], 4),
    ([("context", 2), ("pp", 2), ("dp", 3), ("tp", 2), ("ep", 2)], 24),
]
every_topology = pytest.mark.parametrize(("axes", "per_node"), TOPOLOGIES, ids=str)


def grid(axes: Axes) -> np.ndarray:
    return np.arange(math.prod(size for _, size in axes)).reshape([size for _, size in axes])


def expected_groups(axes: Axes, *roles: str) -> set[tuple[int, ...]]:
    """Move the axes to the end, and every row is a group."""
    ranks = grid(axes)
    places = [index for index, (name, _) in enumerate(axes) if ROLES[name] in roles]
    size = math.prod(axes[place][1] for place in places)
    rows = np.moveaxis(ranks, places, range(-len(places), 0)).reshape(-1, size)
    return {tuple(row) for row in rows.tolist()}


def expected_model_groups(axes: Axes) -> list[list[int]]:
    """Move the axes whose ranks draw rows to the front, and every slice is a group."""
    ranks = grid(axes)
    places = [index for index, (name, _) in enumerate(axes) if ROLES[name] in ("data", "expert")]
    size = math.prod(axes[place][1] for place in places)
    return [sorted(row) for row in np.moveaxis(ranks, places, range(len(places))).reshape(size, -1).tolist()]


def as_set(groups: list[list[int]]) -> set[tuple[int, ...]]:
    assert len({tuple(group) for group in groups}) == len(groups)
    return {tuple(group) for group in groups}


def refusal(make: Any) -> str:
    try:
        make()
    except TopologyError as error:
        return str(error)
    return ""


# --- the contract's example ---


def test_the_contracts_groups_come_in_the_contracts_order() -> None:
    topo = Topology(CONTRACT)
    assert topo.world_size == 16
    assert topo.groups("pipe")[:2] == [[0, 8], [1, 9]]
    assert topo.groups("tensor")[:3] == [[0, 4], [8, 12], [1, 5]]
    assert topo.groups("data")[0] == [0, 1, 2, 3]
    assert topo.groups("model")[0] == [0, 4, 8, 12]


def test_the_contracts_groups_are_printed() -> None:
    lines = str(Topology(CONTRACT, ranks_per_node=8)).splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert lines[0] == "16 ranks, 8 to a node"
    assert "[0, 8] [1, 9]" in rows["pipe"]
    assert rows["pipe"].endswith("yes")
    assert "[0, 4] [8, 12] [1, 5]" in rows["tensor"]
    assert rows["tensor"].endswith("no")
    assert "[0, 1, 2, 3]" in rows["data"]
    assert "[0, 4, 8, 12]" in rows["model"]
    assert rows["model"].endswith("yes")


# --- against numpy ---


@every_topology
def test_sizes_and_coordinates_are_those_of_numpys_row_major_grid(axes: Axes, per_node: int | None) -> None:
    topo = Topology(axes, per_node)
    assert (topo.axes, topo.ranks_per_node, topo.world_size) == (tuple(axes), per_node, grid(axes).size)
    given = {ROLES[name]: size for name, size in axes}
    for name, role in ROLES.items():  # both names of a role; an absent axis has size 1
        assert topo.size(name) == given.get(role, 1)
        assert topo.groups(name) == topo.groups(role)
    assert topo.size("model") == topo.world_size // (given.get("data", 1) * given.get("expert", 1))
    assert topo.size("batch") == math.prod(given.get(role, 1) for role in ("data", "expert", "context"))
    for index, rank in np.ndenumerate(grid(axes)):
        coordinate = dict(zip([name for name, _ in axes], index, strict=True))
        assert list(topo.coordinate(int(rank)).items()) == list(coordinate.items())
        assert topo.rank_at(**coordinate) == rank
        assert topo.rank_at(**{ROLES[name]: place for name, place in coordinate.items()}) == rank
    for equal in (eval(repr(topo)), pickle.loads(pickle.dumps(topo)), copy.deepcopy(topo)):
        assert equal == topo


@every_topology
@pytest.mark.parametrize("role", ["pipe", "data", "tensor", "expert", "context", "batch"])
def test_groups_vary_one_coordinate_and_cross_nodes_where_one_does(axes: Axes, per_node: int | None, role: str) -> None:
    topo = Topology(axes, per_node)
    roles = ("data", "expert", "context") if role == "batch" else (role,)
    assert as_set(topo.groups(role)) == expected_groups(axes, *roles)
    assert all(group == sorted(group) for group in topo.groups(role))
    node_of = grid(axes).ravel() // (per_node or topo.world_size)
    expected = any(len({int(node_of[rank]) for rank in group}) > 1 for group in expected_groups(axes, *roles))
    assert topo.crosses_nodes(role) is expected
    assert topo.groups("model") == expected_model_groups(axes)


@every_topology
def test_shard_and_replica_groups_tile_each_batch_group(axes: Axes, per_node: int | None) -> None:
    topo = Topology(axes, per_node)
    width = per_node or topo.world_size
    shards: set[tuple[int, ...]] = set()
    replicas: set[tuple[int, ...]] = set()
    for group in expected_groups(axes, "data", "expert", "context"):
        nodes = np.array(group) // width
        # Equally many ranks in every node, so that nodes are rows of a rectangle.
        rectangle = np.array(group).reshape(len(set(nodes.tolist())), -1)
        assert all(len(set(row)) == 1 for row in (rectangle // width).tolist())
        shards |= {tuple(row) for row in rectangle.tolist()}
        replicas |= {tuple(column) for column in rectangle.T.tolist()}
    assert as_set(topo.shard_groups()) == shards
    assert as_set(topo.replica_groups()) == replicas


# --- what else a value should do ---


def test_numpys_integers_are_integers() -> None:
    axes: Any = [("pipe", np.int64(2)), ("data", np.int32(3))]
    per_node: Any = np.int64(3)
    topo = Topology(axes, per_node)
    assert topo == Topology([("pipe", 2), ("data", 3)], 3)
    assert all(type(size) is int for _, size in topo.axes)


def test_equal_topologies_are_one_key() -> None:
    assert Topology(CONTRACT, 8) == Topology(tuple(CONTRACT), 8)
    assert len({Topology(CONTRACT, 8), Topology(CONTRACT, 8), Topology(CONTRACT)}) == 2
    assert Topology(CONTRACT) != Topology([("pipe", 2), ("data", 4), ("tensor", 2)])
    assert Topology(CONTRACT) != CONTRACT


@pytest.mark.parametrize("order", [("pipe", "tensor", "data"), ("data", "pipe", "tensor")])
def test_16384_ranks_are_no_more_work_than_their_number(order: tuple[str, ...]) -> None:
    def all_groups(data: int) -> None:
        size = {"pipe": 16, "tensor": 8, "data": data}
        topo = Topology([(name, size[name]) for name in order], ranks_per_node=1024)
        for axis in (*order, "model"):
            assert sum(len(group) for group in topo.groups(axis)) == 128 * data
        assert sum(len(group) for group in topo.shard_groups()) == 128 * data
        assert sum(len(group) for group in topo.replica_groups()) == 128 * data
        assert len(str(topo)) < 2000

    assert steps(all_groups, 128) <= 4.5 * steps(all_groups, 32)


# --- errors ---


NO_GRID: list[tuple[Any, Any, str]] = [
    ([], None, 'at least one axis: write Topology([("pipe", 1)])'),
    ([("pipes", 2)], None, 'unknown axis "pipes"; did you mean "pipe"?'),
    ([("pipe", 2), ("dp", 2), ("pp", 3)], None, 'axes "pipe" and "pp" are both the pipe axis'),
    ([("pipe", 2), ("data", 0)], None, 'axis "data" has size 0'),
    ([("pipe", 2.0)], None, 'the size of axis "pipe" must be a whole number, got 2.0'),
    (("pipe", 2), None, 'got \'pipe\': write Topology([("pipe", 2), ("data", 4)])'),
    ([("pipe", 2, 3)], None, "got ('pipe', 2, 3)"),
    (CONTRACT, 3, "ranks_per_node=3 does not divide the 16 ranks of pipe 2 × tensor 2 × data 4"),
    (CONTRACT, 32, "write ranks_per_node=1 or 2 or 4 or 8 or 16"),
    (CONTRACT, "8", "ranks_per_node must be a whole number, got '8'"),
    (UNEVEN, 3, "more ranks in one node than in another: write ranks_per_node=1 or 2 or 6, or make data, expert, con"),
    ([("pipe", 2), ("data", 3)], 2, "write ranks_per_node=1 or 3 or 6"),  # those that help
    ([("data", 3), ("pipe", 2), ("expert", 2)], 6, "than in another: write ranks_per_node=1 or 2 or 4 or 12, or"),
    ([("expert", 2), ("ep", 2)], None, 'axes "expert" and "ep" are both the expert axis'),
]
OUTSIDE: list[tuple[Callable[[Topology], Any], str]] = [
    (lambda topo: topo.coordinate(16), "rank 16 is outside pipe 2 × tensor 2 × data 4: its ranks are 0 to 15"),
    (lambda topo: topo.coordinate("3"), "a rank must be a whole number, got '3'"),  # type: ignore[arg-type]
    (lambda topo: topo.rank_at(pipe=2, tensor=0, data=0), "pipe=2 is outside pipe 2 × tensor 2 × data 4"),
    (lambda topo: topo.rank_at(pipe=0, data=3), "write every axis, as in rank_at(pipe=0, data=3, tensor=0)"),
    (lambda topo: topo.rank_at(pipe=0, tensor=0, date=0), 'unknown axis "date"; did you mean "data"?'),
    (lambda topo: topo.rank_at(pipe=0, tensor=0, data=0.5), "the index data must be a whole number, got 0.5"),
    (lambda topo: topo.size("tenser"), 'unknown axis "tenser"; did you mean "tensor"'),
    (lambda topo: topo.groups("tenser"), 'unknown axis "tenser"; did you mean "tensor"'),
    (lambda topo: topo.crosses_nodes("tenser"), 'unknown axis "tenser"; did you mean "tensor"'),
    (lambda topo: topo.group("tenser"), 'unknown axis "tenser"; did you mean "tensor"'),
    (lambda topo: topo.mesh, "torch.distributed is not started"),
    (lambda topo: topo.group("pipe"), "torch.distributed is not started"),
    (lambda _: Topology.fit(6, pipe=4), "6 ranks are no multiple of pipe 4 × tensor 1: start a multiple of 4, or"),
    (lambda _: Topology.fit(6, pipe=1, expert=2, context=2), "6 ranks are no multiple of pipe 1 × tensor 1 × expert 2"),
    (lambda _: Topology.fit(8, pipe=1, expert=0), "expert is 0: write 1 or more"),
    (lambda _: Topology.fit(6, pipe=1, expert=2, rows=64), "64 rows of a step are no multiple of 6 replicas"),
    (lambda _: Topology.fit(6, pipe=2, rows=64), "64 rows of a step are no multiple of 3 replicas"),
    (lambda _: Topology.fit(0, pipe=2), "world_size is 0: write 1 or more"),
    (lambda _: Topology.fit(4, pipe=2.0), "pipe must be a whole number, got 2.0"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("axes", "per_node", "says"), NO_GRID)
def test_a_grid_that_does_not_add_up_is_refused(axes: Any, per_node: Any, says: str) -> None:
    assert says in refusal(lambda: Topology(axes, per_node))


@pytest.mark.parametrize(("ask", "says"), OUTSIDE)
def test_what_is_outside_the_grid_is_refused(ask: Callable[[Topology], Any], says: str) -> None:
    assert says in refusal(lambda: ask(Topology(CONTRACT)))


@pytest.mark.parametrize(
    ("ranks", "options", "axes"),
    [
        (8, {"pipe": 2}, [("pipe", 2), ("data", 4)]),
        (8, {"pipe": 2, "tensor": 2, "rows": 64}, [("pipe", 2), ("tensor", 2), ("data", 2)]),
        (4, {"pipe": 4}, [("pipe", 4), ("data", 1)]),
        (12, {"pipe": 4, "rows": 96, "ranks_per_node": 3}, [("pipe", 4), ("data", 3)]),
        (16, {"pipe": 2, "expert": 4, "rows": 64}, [("pipe", 2), ("data", 2), ("expert", 4)]),
        (8, {"pipe": 1, "expert": 2, "context": 2}, [("pipe", 1), ("data", 2), ("expert", 2), ("context", 2)]),
        (4, {"pipe": 2, "expert": 1}, [("pipe", 2), ("data", 2), ("expert", 1)]),
    ],
)
def test_the_data_axis_takes_the_ranks_that_are_left(ranks: int, options: dict[str, int], axes: Axes) -> None:
    topology = Topology.fit(ranks, **options)
    assert topology == Topology(axes, options.get("ranks_per_node"))
    assert topology.world_size == ranks


# --- in four processes ---


def facts(topo: Topology, meeting: str) -> dict[str, Any]:
    """What one rank of four sees."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    fxpipe.init()

    def summed(axis: str) -> float:
        total = torch.tensor(float(10 ** dist.get_rank()))
        dist.all_reduce(total, group=topo.group(axis))
        return total.item()

    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pp", "dp"))
    seen = Topology.from_mesh(mesh, ranks_per_node=2)
    unnamed = DeviceMesh(DEVICE, [[0, 1], [2, 3]])
    swapped = DeviceMesh(DEVICE, [[0, 2], [1, 3]], mesh_dim_names=("pp", "dp"))
    other = DeviceMesh(DEVICE, [[0, 1], [2, 3]], mesh_dim_names=("xp", "dp"))
    result: dict[str, Any] = {
        "names": topo.mesh.mesh_dim_names,
        "ranks": topo.mesh.mesh.tolist(),
        "device": topo.mesh.device_type,
        "cached": topo.mesh is topo.mesh and topo.group("model") is topo.group("model"),
        "groups": {
            axis: dist.get_process_group_ranks(topo.group(axis)) for axis in ("pipe", "data", "tensor", "model")
        },
        "sums": {axis: summed(axis) for axis in ("pipe", "dp", "tensor", "model")},
        "seen": (seen, seen.mesh is mesh, seen.group("pipe") is mesh.get_group("pp")),
        "too many": refusal(lambda: Topology(CONTRACT).mesh),
        "too few": refusal(lambda: Topology([("pipe", 2)]).group("model")),
        "unnamed": refusal(lambda: Topology.from_mesh(unnamed)),
        "swapped": refusal(lambda: Topology.from_mesh(swapped)),
        "unknown": refusal(lambda: Topology.from_mesh(other)),
        "part": refusal(lambda: Topology.from_mesh(mesh["dp"])),
    }
    first, rank = topo.mesh, dist.get_rank()
    dist.destroy_process_group()
    result["stale"] = refusal(lambda: topo.mesh)
    # In a place of its own: the pool's store still holds the first group's addresses.
    dist.init_process_group(BACKEND, init_method=meeting, rank=rank, world_size=4)
    result["restarted"] = topo.mesh is not first and summed("data")
    return result


DO_NOT_FIT = {
    "too many": "torch.distributed runs 4 processes, but pipe 2 × tensor 2 × data 4 makes 16",
    "too few": "torch.distributed runs 4 processes, but pipe 2 makes 2",
    "unnamed": "a DeviceMesh of shape (2, 2) names no dimensions",
    "swapped": "the mesh orders its ranks as [0, 2, 1, 3]",
    "unknown": 'unknown axis "xp"; known: "pipe", "pp"',
    "part": "torch.distributed runs 4 processes, but dp 2 makes 2",
    "stale": "torch.distributed is not started",
}


def test_the_mesh_and_the_process_groups_are_those_of_the_topology(pool: Pool, tmp_path: Path) -> None:
    topo = Topology([("pipe", 2), ("data", 2)])
    four = pool.run(facts, topo, (tmp_path / "meeting").as_uri())
    for rank, seen in enumerate(four):
        assert (seen["names"], seen["ranks"]) == (("pipe", "data"), [[0, 1], [2, 3]])
        assert seen["device"] == DEVICE
        assert seen["cached"]
        for axis, ranks in seen["groups"].items():
            assert ranks == next(group for group in topo.groups(axis) if rank in group)
        assert seen["seen"] == (Topology([("pp", 2), ("dp", 2)], 2), True, True)
        for case, says in DO_NOT_FIT.items():
            assert says in seen[case]
    assert [seen["sums"]["pipe"] for seen in four] == [101, 1010, 101, 1010]
    assert [seen["sums"]["dp"] for seen in four] == [11, 11, 1100, 1100]
    assert [seen["sums"]["tensor"] for seen in four] == [1, 10, 100, 1000]
    assert [seen["sums"]["model"] for seen in four] == [101, 1010, 101, 1010]
    assert [seen["restarted"] for seen in four] == [11, 11, 1100, 1100]


# --- rows and positions ---


def test_expert_ranks_are_printed_with_the_groups_over_which_gradients_are_summed() -> None:
    rows = {line.split()[0]: line for line in str(Topology([("pipe", 2), ("data", 2), ("expert", 2)])).splitlines()}
    assert "[0, 1] [2, 3] [4, 5] [6, 7]" in rows["expert"]
    assert "[0, 2] [4, 6] [1, 3] [5, 7]" in rows["data"]
    assert "[0, 1, 2, 3] [4, 5, 6, 7]" in rows["batch"]
    assert "[0, 4] [1, 5] [2, 6] [3, 7]" in rows["model"]
    assert "batch" not in str(Topology(CONTRACT))


def dealt(axes: Axes) -> dict[str, Any]:
    """The rows and the positions that a rank gets of 12 rows and 8 positions."""
    import torch
    import torch.distributed as dist

    fxpipe.init()
    topo = Topology(axes)
    positions = torch.arange(8).repeat(3, 1)
    part = topo.context_part(positions)
    gathered = [torch.empty_like(part) for _ in range(topo.size("context"))]
    dist.all_gather(gathered, part, group=topo.group("context"))
    whole = topo.context_whole(torch.cat(gathered, 1))
    return {
        "rows": list(topo.sampler(range(12), shuffle=False)),
        "of": (topo.data_rank, topo.data_size),
        "first": topo.is_first,
        "rank": (topo.rank, topo.pipe_rank),
        "positions": part[0].tolist(),
        "columns": topo.context_part(positions.T, dim=0)[:, 0].tolist(),
        "whole": torch.equal(whole, positions),
        "uneven": refusal(lambda: topo.context_part(positions[:, 1:])),
        "mesh": topo.mesh.mesh_dim_names,
    }


def test_rows_are_dealt_over_data_and_expert_ranks_and_positions_over_context_ranks(pool: Pool) -> None:
    for rank, seen in enumerate(pool.run(dealt, [("data", 2), ("context", 2)])):
        replica, place = divmod(rank, 2)
        assert (seen["of"], seen["rows"]) == ((replica, 2), list(range(replica, 12, 2)))
        assert (seen["first"], seen["rank"]) == (rank == 0, (rank, 0))
        assert seen["positions"] == seen["columns"] == [[0, 1, 6, 7], [2, 3, 4, 5]][place]
        assert seen["whole"]
        assert seen["uneven"] == (
            "7 positions, dimension 1 of [3, 7], are no multiple of 2 × context 2: pad them to a multiple of 4"
        )
    for rank, seen in enumerate(pool.run(dealt, [("data", 2), ("expert", 2)])):
        assert (seen["of"], seen["rows"]) == ((rank, 4), list(range(rank, 12, 4)))
        assert (seen["positions"], seen["whole"]) == (list(range(8)), True)
        assert seen["mesh"] == ("data", "expert", "tensor")


def test_one_process_has_all_positions() -> None:
    import torch

    topo, tensor = Topology([("context", 2)]), torch.arange(6).view(1, 6)
    assert (topo.is_first, topo.rank, topo.pipe_rank) == (True, 0, 0)
    assert topo.context_part(tensor) is tensor
    assert topo.context_whole(tensor) is tensor


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, 0), (TORCHRUN, 5), ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 3)], ids=str
)
def test_before_init_the_rank_is_the_launcher_s(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int
) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    topo = Topology(CONTRACT)
    assert (topo.rank, topo.is_first, pickle.loads(pickle.dumps(topo.rank))) == (rank, rank == 0, rank)
    call: Any = topo.rank
    with pytest.raises(TypeError, match=rf"this process's number, {rank}; write topo.rank_at\(pipe=1\)"):
        call(pipe=1)


def test_an_axis_is_in_a_topology_s_axes_by_either_name() -> None:
    axes = Topology([("pp", 2), ("data", 1)]).axes
    assert [name in axes for name in ("pp", "pipe", "dp", "tensor", "pipes")] == [True, True, True, False, False]
    assert (("pp", 2) in axes, ("pp", 3) in axes, axes == (("pp", 2), ("data", 1))) == (True, False, True)


# --- the mesh of the data axis ---


def data_meshes(topo: Topology) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    fxpipe.init()
    seen: dict[str, Any] = {"rank": dist.get_rank(), "pipe": topo.pipe_rank}
    for scope in ("node", "data"):
        mesh = topo.data_mesh(scope)
        assert mesh is topo.data_mesh(scope)
        assert mesh.mesh_dim_names == ("replica", "shard")
        sums = []
        for name in ("replica", "shard"):
            total = torch.tensor(10.0 ** dist.get_rank(), dtype=torch.float64)
            dist.all_reduce(total, group=mesh.get_group(name))
            sums.append(int(total))
            assert mesh[name].mesh.tolist() == dist.get_process_group_ranks(mesh.get_group(name))
        seen[scope] = mesh.mesh.tolist(), sums
    seen["unknown"] = refusal(lambda: topo.data_mesh("rack"))
    return seen


@pytest.mark.parametrize(
    ("axes", "per_node"),
    [
        ([("data", 4)], 2),
        ([("tensor", 2), ("data", 2), ("pipe", 1)], 1),
        ([("pipe", 3), ("data", 2)], 3),  # the middle data group straddles the two nodes
    ],
    ids=str,
)
def test_the_data_mesh_has_a_row_for_each_node(pool: Pool, axes: Axes, per_node: int | None) -> None:
    topo = Topology(axes, per_node)
    for seen in pool.run(data_meshes, topo, ranks=topo.world_size):
        rank = seen["rank"]
        group = next(row for row in sorted(expected_groups(axes, "data")) if rank in row)
        nodes = [other // (per_node or topo.world_size) for other in group]
        rows = [[r for r, at in zip(group, nodes, strict=True) if at == node] for node in sorted(set(nodes))]
        for scope, wanted in (("node", rows), ("data", [list(group)])):
            row = next(ranks for ranks in wanted if rank in ranks)
            column = [ranks[row.index(rank)] for ranks in wanted]
            assert seen[scope] == (wanted, [sum(10**r for r in column), sum(10**r for r in row)])
        assert seen["pipe"] == topo.coordinate(rank).get("pipe", 0)
        assert seen["unknown"] == 'zero_scope is \'rack\'; it is "node" or "data"'
