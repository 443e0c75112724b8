"""Ranks that were given different batches say so, all of them, instead of training on them."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.run.step.batch_check import EVERY, FIRST, KINDS, is_checked
from tests.pool import Pool
from tests.strict_transport import current_seat, run_strict

PAIR = Topology([("pipe", 2)])
TRIPLE = Topology([("pipe", 3)])
SQUARE = Topology([("pipe", 2), ("data", 2)])
TENSOR = Topology([("pipe", 2), ("tensor", 2)])
WIDTH = 4


class Classifier(nn.Module):
    """Stage 0 reads the image alone, and the last stage the labels alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, image: Tensor, labels: Tensor, more: Any = None) -> Tensor:
        h = stage_boundary(self.body(image if more is None else image * more["scale"]))
        return nn.functional.cross_entropy(self.head(h), labels)


def this_rank() -> int:
    seat = current_seat()
    return seat.rank if seat is not None else torch.distributed.get_rank()


def compiled(topology: Topology, **options: Any) -> tuple[fxpipe.ForwardBackward, dict[str, int]]:
    """And where this process is."""
    step = fxpipe.compile(Classifier(), topology, microbatches=2, **options)
    return step, topology.coordinate(this_rank())


def images(number: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def labels(number: int, rows: int = 4) -> Tensor:
    return torch.randint(0, WIDTH, (rows,), generator=torch.Generator().manual_seed(1000 + number))


def said(body: Callable[[], object]) -> tuple[str, list[str]]:
    """The error and the warnings of a rank, which are fxpipe's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            body()
        except fxpipe.RunError as error:
            return str(error), []
    return "", warnings_in(caught)


# --- a pipe group ---


def default_sampler() -> tuple[str, int]:
    """Each rank draws as a replica of its own, as torch's sampler does by default. And after how many steps it ends."""
    done = 0

    def body() -> None:
        nonlocal done
        step, _ = compiled(PAIR)
        dataset = torch.utils.data.TensorDataset(images(0, 32), labels(0, 32))
        sampler: torch.utils.data.DistributedSampler[Any] = torch.utils.data.DistributedSampler(dataset)
        for image, label in torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler):
            step(image, label)
            done += 1

    return said(body)[0], done


def assert_told(text: str) -> None:
    assert "step 0: the ranks [0, 1] of a pipe group were given different batches" in text
    assert "what differs is 'image' of ranks [0] and [1]; 'labels' of ranks [0] and [1]" in text
    assert "sampler=topo.sampler(dataset, shuffle=True)" in text
    assert "num_replicas=topo.data_size, rank=topo.data_rank" in text
    assert "required_inputs" in text


def test_every_rank_says_which_inputs_of_which_ranks_differ_one_call_later(pool: Pool) -> None:
    for text, done in pool.run(default_sampler, ranks=2):
        assert_told(text)
        assert done == 1


def test_no_replica_waits_for_one_whose_ranks_differ(pool: Pool) -> None:
    outcomes = pool.run(one_replica_differs, ranks=4)
    for rank, text in enumerate(outcomes):
        assert "step 1: the ranks [1, 3] of a pipe group were given different batches" in text, f"rank {rank}: {text}"
        assert "'labels' of ranks [1] and [3]" in text
        assert "'image' of" not in text


def one_replica_differs() -> str:
    def body() -> None:
        step, at = compiled(SQUARE)
        for number in range(4):
            mine = 10 * at["data"] + number
            differs = number == 1 and this_rank() == 3
            step(images(mine), labels(mine + 5 if differs else mine))

    return said(body)[0]


def warnings_in(caught: list[warnings.WarningMessage]) -> list[str]:
    """Of a check; each must point at the code that called fxpipe."""
    mine = [one for one in caught if "were given" in str(one.message)]
    assert {one.filename for one in mine} <= {__file__}
    return [str(one.message) for one in mine]


def strictly(body: Callable[[], object], ranks: int) -> list[tuple[str, list[str]]]:
    """What each rank of a strict world says."""
    found: list[tuple[str, list[str]]] = [("", [])] * ranks
    with warnings.catch_warnings(record=True) as caught:  # it holds for all threads, which take turns
        warnings.simplefilter("always")

        def one(rank: int) -> None:
            try:
                body()
            except fxpipe.RunError as error:
                found[rank] = str(error), []

        with contextlib.suppress(fxpipe.RunError):  # the strict world's own
            run_strict(one, ranks)
    told = warnings_in(caught)
    return [(text, told) for text, _ in found]


def test_one_rank_of_three_is_named() -> None:
    def body() -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        step = fxpipe.compile(layers, TRIPLE, microbatches=2, boundaries=["1", "2"], loss_fn=nn.functional.mse_loss)
        for number in range(2):
            step(images(number), target=images(number + 7 * (this_rank() == 1)))

    for text, _ in strictly(body, 3):
        assert "what differs is 'target' of ranks [0, 2] and [1]. " in text
        assert "batches=False" not in text, "no check that has found a fault is to be switched off"


def test_what_is_in_a_container_is_compared() -> None:
    def body() -> None:
        step, _ = compiled(PAIR)
        for _ in range(2):
            step(images(0), labels(0), more={"scale": torch.full((4, 1), 1.0 + this_rank())})

    for text, _ in strictly(body, 2):
        assert "what differs is 'more' of ranks [0] and [1]. " in text


def test_other_strides_and_none_where_an_input_is_not_needed_are_no_difference() -> None:
    def body() -> None:
        step, at = compiled(PAIR)
        for number in range(4):
            x = images(number)
            step(x.t().contiguous().t() if at["pipe"] else x, labels(number) if at["pipe"] else None)

    assert strictly(body, 2) == [("", [])] * 2


def test_check_batches_false_compares_nothing() -> None:
    def body() -> None:
        step, _ = compiled(PAIR, checks=fxpipe.Checks(batches=False))
        for number in range(3):
            step(images(this_rank()), labels(this_rank() + number))

    assert strictly(body, 2) == [("", [])] * 2


# --- when ---


def test_the_first_three_calls_and_every_hundredth_are_checked() -> None:
    assert [number for number in range(301) if is_checked(number)] == [0, 1, 2, 100, 200, 300]
    assert (FIRST, EVERY) == (3, 100)


def test_ranks_that_part_later_are_found_and_the_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.run.step.batch_check.EVERY", 8)
    done = [0, 0]

    def body() -> None:
        step, at = compiled(PAIR)
        for number in range(12):
            step(images(number + (at["pipe"] if number > 4 else 0)), labels(number))
            done[this_rank()] += 1

    for text, _ in strictly(body, 2):
        assert "step 8: the ranks [0, 1]" in text
    assert done == [9, 9]


def test_the_last_step_of_a_run_is_compared_by_an_evaluation() -> None:
    def body() -> None:
        step, _ = compiled(PAIR)
        step(images(this_rank()), labels(0))
        step.evaluate(images(0), labels(0))

    for text, _ in strictly(body, 2):
        assert "step 0: the ranks [0, 1]" in text


def test_batches_of_an_evaluation_are_compared() -> None:
    def body() -> None:
        step, _ = compiled(PAIR)
        step(images(0), labels(0))
        step.evaluate(images(0), labels(this_rank()))
        step.evaluate(images(0), labels(0))

    for text, _ in strictly(body, 2):
        assert "evaluate before step 1: the ranks [0, 1]" in text


def test_micro_batches_that_the_user_has_split_are_compared() -> None:
    def body() -> None:
        step, _ = compiled(PAIR)
        parts = [((images(n, rows), labels(n, rows)), {}) for n, rows in ((0, 3), (1, 3))]
        for _ in range(2):
            step.step_microbatches(parts[::-1] if this_rank() else parts)

    for text, _ in strictly(body, 2):
        assert "step 0: the ranks [0, 1]" in text


def checked(step: fxpipe.ForwardBackward, made: list[bool], calls: Sequence[tuple[int, bool]]) -> list[bool]:
    """Which of calls with batches of so many rows, steps or else evaluations, were checked."""
    for rows, is_step in calls:
        (step if is_step else step.evaluate)(images(rows, rows), labels(rows, rows))
        made.append(step._steps._check._left is not None)
        step._steps._check._left = None
    return made


def test_where_every_batch_has_another_number_of_rows_the_first_kinds_are_checked_and_then_one_call_in_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them run one plan; evaluations another."""
    monkeypatch.setattr("fxpipe.run.step.batch_check.EVERY", 20)
    steps = [(4 + number, True) for number in range(KINDS + 16)]
    calls = [*steps, *[(4, True)] * 4, *[(number, False) for number in (5, 6, 5)], (4 + KINDS, True)]
    wanted = [number < KINDS or number == 20 for number in range(KINDS + 16)] + [True, True, False, False]
    assert len(calls) == len(wanted) + 4

    def body() -> None:
        made = list[bool]()
        checked(compiled(PAIR)[0], made, calls)
        assert made == [*wanted, True, True, True, False]

    assert strictly(body, 2) == [("", [])] * 2


# --- beyond a pipe group ---


def test_ranks_of_a_tensor_group_are_compared() -> None:
    def body() -> None:
        step, at = compiled(TENSOR)
        for number in range(3):
            step(images(number + 10 * at["tensor"]), labels(number))

    for text, _ in strictly(body, 4):
        assert re.search(r"step 0: the ranks \[(0, 1|2, 3)\] of a tensor group were given different batches", text)
        assert "'image' of" in text


def test_one_process_compares_nothing() -> None:
    step = fxpipe.compile(Classifier(), PAIR, microbatches=2)
    for number in range(4):
        step(images(number), labels(number))
    assert step._steps._check._left is None


def test_replicas_with_the_same_batch_are_warned_of_once() -> None:
    def body() -> None:
        step, _ = compiled(SQUARE)
        for number in range(5):
            step(images(number), labels(number))
            step.evaluate(images(number), labels(number))

    for error, told in strictly(body, 4):
        assert error == ""
        assert [text.split(":")[0] for text in told] == ["step 0"]
        assert "the replicas [0, 1] of 2 were given the same batch" in told[0]
        assert "topo.sampler(dataset, shuffle=True)" in told[0]


def test_replicas_whose_kinds_of_batch_differ_do_not_wait_for_each_other() -> None:
    def body() -> None:
        step, at = compiled(SQUARE)
        for number in range(6):
            rows = 4 + at["data"] * (number % 2)
            step(images(number + 10 * at["data"], rows), labels(number, rows))
            if number == 3:
                step.evaluate(images(number, rows), labels(number, rows))

    assert strictly(body, 4) == [("", [])] * 4


def test_ranks_that_share_no_input_are_warned_of_once() -> None:
    def body() -> None:
        step, at = compiled(SQUARE)
        for number in range(3):
            mine = number + 10 * at["data"]
            step(None if at["pipe"] else images(mine), labels(mine) if at["pipe"] else None)

    for error, told in strictly(body, 4):
        assert error == ""
        assert len(told) == 1
        assert "they have no input in common ([0]: image; [2]: labels)" in told[0]
        assert "topo.sampler(dataset, shuffle=True)" in told[0]


def test_a_number_that_all_ranks_share_tells_nothing_of_rows() -> None:
    def body() -> None:
        step, at = compiled(PAIR)
        given = (None if at["pipe"] else images(0), labels(0) if at["pipe"] else None)
        step(*given, more={"scale": 2.0})
        step(*given, more={"scale": 2.0})

    ((_, told), _) = strictly(body, 2)
    assert len(told) == 1
    assert "no input in common ([0]: image; [1]: labels)" in told[0]


# --- topo.sampler ---


def test_one_process_draws_every_row() -> None:
    topology = Topology([("pipe", 2), ("data", 4)])
    assert (topology.data_rank, topology.data_size) == (0, 1)
    assert sorted(topology.sampler(range(10))) == list(range(10))
    assert list(topology.sampler(range(10), shuffle=False)) == list(range(10))


@pytest.mark.parametrize(
    "launched", [{"RANK": "1", "WORLD_SIZE": "4"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}], ids=["torchrun", "srun"]
)
def test_a_sampler_before_processes_have_met_is_refused(
    launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank would draw for replica 0."""
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    for use in (lambda: SQUARE.sampler(range(4)), lambda: SQUARE.data_rank, lambda: SQUARE.data_size):
        with pytest.raises(fxpipe.TopologyError, match=r"call fxpipe\.init\(\) first"):
            use()


def test_a_dataset_without_a_length_is_refused_with_what_to_write() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(fxpipe.TopologyError, match=r"Stream has no length.*topo\.data_size-th row from number"):
        PAIR.sampler(Stream())  # type: ignore[arg-type]


def drawn(topology: Topology) -> tuple[list[int], list[int], int, int]:
    """Rows of two epochs."""
    fxpipe.init()
    sampler = topology.sampler(range(10), seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    return first, list(sampler), topology.data_rank, topology.data_size


@pytest.mark.parametrize("axes", [[("data", 2), ("pipe", 2)], [("tensor", 2), ("dp", 2)]], ids=str)
def test_ranks_that_work_on_one_replicas_data_draw_the_same_rows(axes: list[tuple[str, int]], pool: Pool) -> None:
    topology = Topology(axes)
    results = pool.run(drawn, topology)
    epochs = []
    for group in topology.groups("model"):
        assert len({str(results[rank]) for rank in group}) == 1
        epochs.append(results[group[0]])
    assert sorted(row for first, *_ in epochs for row in first) == list(range(10))
    assert sorted(row for _, second, *_ in epochs for row in second) == list(range(10))
    assert epochs[0][0] != epochs[0][1]
    assert [place for *_, place, _ in epochs] == list(range(len(epochs)))
    assert {size for *_, size in epochs} == {len(epochs)}


def trained_with_a_sampler() -> tuple[str, list[str]]:
    """Each rank loads only what it needs; the rows match, and nothing is said."""
    fxpipe.init()
    topology = Topology([("pipe", 2), ("data", 2)])
    dataset = torch.utils.data.TensorDataset(images(0, 16), labels(0, 16))

    def body() -> None:
        step, at = compiled(topology)
        sampler = topology.sampler(dataset, shuffle=True)
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for image, label in loader:
                step(None if at["pipe"] else image, label if at["pipe"] else None)

    return said(body)


def test_whoever_uses_the_sampler_is_not_warned(pool: Pool) -> None:
    assert pool.run(trained_with_a_sampler) == [("", [])] * 4
