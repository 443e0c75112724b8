"""Kinds of batch under automatic cuts: families of compatibility.py, each given batches of several sizes in turn.

    python examples/benchmarks/kinds_of_batch.py --rows kinds.json              # all; rows that are there are kept
    python examples/benchmarks/kinds_of_batch.py --rows kinds.json --only Llama "GPT-2, 2 ranks"
    python examples/benchmarks/kinds_of_batch.py --rows kinds.json --page examples/kinds_of_batch.md  # the table

Every second family runs in a process of its own, which plays 2 pipe ranks; every tenth in 2 processes, too. It is
compiled with ``boundaries="auto"`` for batches of 8 rows. It takes a step of SGD, and evaluates, on batches of 8, 5, 8
and 10 rows and of two more lengths, or numbers of images; then on the same batches again. Losses, gradients and outputs
are compared with those of plain PyTorch as in ``compatibility.py``, and captures are counted: the second round is to
make none.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import compatibility
import torch
import torch.distributed as dist
from compatibility import MICROBATCHES, RATE, Row, Run, difference, gradients_of, joined, named
from families import FAMILIES, Family, Inputs
from lengths import counted
from tabulate import tabulate
from torch import Tensor

import fxpipe
from fxpipe import Packed

BEGIN, END = "<!-- kinds of batch begin -->", "<!-- kinds of batch end -->"
BATCHES = [(8, 0), (5, 0), (8, 0), (10, 0), (8, 1), (8, 2)]
"""(rows, place of a micro-batch in ``families.py``, which decides lengths and numbers of images)."""
SECONDS = 600
NAMES = list(FAMILIES)[::2]
ON_RANKS = NAMES[::5]
RANKS = ", 2 ranks"


# --- batches ---


def batch_of(family: Family, rows: int, place: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    parts = [family.batch(place, generator) for _ in range((rows + 1) // 2)]  # of two rows each
    return rows_between(family, joined(family, parts), 0, rows)


def rows_between(family: Family, batch: Inputs, start: int, stop: int) -> Inputs:
    """Those rows of a batch, and what is packed for them."""

    def span(name: str) -> tuple[int, int]:
        rule = family.rules.get(name, 0)
        if not isinstance(rule, Packed):
            return start, stop
        first, last = (start, stop) if rule.of is None else span(rule.of)
        if isinstance(rule.counts, int):
            return first * rule.counts, last * rule.counts
        counts = rule.counts(**{each: batch[each] for each in inspect.signature(rule.counts).parameters})
        return int(sum(counts[:first])), int(sum(counts[:last]))

    return {
        name: value[slice(*span(name))] if isinstance(value, Tensor | list) and name not in whole(family) else value
        for name, value in batch.items()
    }


def whole(family: Family) -> set[str]:
    """The inputs that every micro-batch has in full."""
    return {name for name, rule in family.rules.items() if rule is None}


def batches(family: Family) -> list[Inputs]:
    """Of one round; each has numbers of its own."""
    return [batch_of(family, rows, place, seed) for seed, (rows, place) in enumerate(BATCHES)]


def for_evaluation(family: Family, batch: Inputs) -> Inputs:
    return {name: value for name, value in batch.items() if family.loss_alone or name != "target"}


def evaluates_loss(family: Family) -> bool:
    """Whether evaluation gives the loss alone, as where outputs are of pairs of a micro-batch's rows."""
    return family.loss_alone or "return_loss" in batch_of(family, 1, 0, 0)


# --- two rounds ---


def in_stages(family: Family, forward_backward: fxpipe.ForwardBackward, captures: list[Any]) -> tuple[list[Run], int]:
    """What each step and its evaluation computes, and how many captures there were when the second round began."""
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=RATE)
    runs, so_far = [], 0
    outputs: Literal["all", "loss"] = "loss" if evaluates_loss(family) else "all"
    for place, batch in enumerate([*batches(family)] * 2):
        so_far = len(captures) if place == len(BATCHES) else so_far
        optimizer.zero_grad()
        loss = forward_backward(**batch)
        gradients = gradients_of(forward_backward.named_parameters())
        optimizer.step()
        found = forward_backward.evaluate(**for_evaluation(family, batch), outputs=outputs)
        found = found[None] if outputs == "loss" else found
        runs.append(Run([loss], [of_all_ranks(gradients)], dict(named(found))))
    return runs, so_far


def of_all_ranks(gradients: dict[str, Any]) -> dict[str, Any]:
    if not dist.is_initialized():
        return gradients
    found: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, gradients)
    return {name: gradient for each in found for name, gradient in each.items()}


def plainly(family: Family, model: Any, forward_backward: fxpipe.ForwardBackward) -> Iterator[Run]:
    """The loop over micro-batches, whose rows are as many or one more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, batch in enumerate([*batches(family)] * 2):
        rows = BATCHES[step % len(BATCHES)][0]
        sizes = [len(part) for part in torch.arange(rows).tensor_split(MICROBATCHES)]
        shares = [size / rows for size in sizes]
        parts = [rows_between(family, batch, *ends) for ends in pairwise([0, *accumulate(sizes)])]
        optimizer.zero_grad()
        loss = compatibility.accumulated(family, model, forward_backward, parts, shares, step)
        gradients = gradients_of(model.named_parameters())
        optimizer.step()
        evaluated = [for_evaluation(family, part) for part in parts]
        outputs = compatibility.evaluated(family, model, evaluated, shares, evaluates_loss(family))
        yield Run([loss], [gradients], outputs)


def furthest(got: Sequence[Run], wanted: Iterator[Run]) -> tuple[float, str]:
    return max(
        (far, f"{where.removesuffix(' of step 0').removesuffix(', step 0')}, step {step}")
        for step, (one, other) in enumerate(zip(got, wanted, strict=True))
        for far, where in compatibility.distances(one, other)
    )


# --- a row ---


def measured(name: str) -> Row:
    """The row of a family; each of the ranks makes it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    family = FAMILIES[name.removesuffix(RANKS)]
    example = batch_of(family, 8, 0, len(BATCHES))
    family.loss_of(family.model(), example)  # shows a wrong batch before fxpipe sees it
    start = time.perf_counter()

    def trained(rules: Mapping[str, Any], double: bool = False) -> Any:
        model = family.model().double() if double else family.model()
        with counted() as captures:
            forward_backward = compatibility.compiled(
                family, copy.deepcopy(model), rules, "auto", batch_of(family, 8, 0, len(BATCHES))
            )
            runs, so_far = in_stages(family, forward_backward, captures)
        taken = time.perf_counter() - start
        far, where = furthest(runs, plainly(family, model, forward_backward))
        return far, where, str(forward_backward.stages), so_far, len(captures) - so_far, taken

    try:
        (far, where, stages, captures, repeated, taken), rules = compatibility.with_rules(trained)
    except Exception as error:
        return compatibility.refused(name, family, error, time.perf_counter() - start)
    again = None
    if far > compatibility.LARGEST:
        torch.set_default_dtype(torch.float64)
        again = trained(rules, double=True)[0]
    kind, result = compatibility.verdict(stages, rules)
    if repeated:
        kind, result = "captured again", f"captured again: {repeated} times"
    if compatibility.is_wrong(far, again):
        kind, result = "wrong", f"wrong: {where}"
    tracer = stages.partition("captured by the ")[2].partition(" tracer")[0]
    return Row(name, family.library, tracer, kind, result, far, round(taken, 1), where, again, captures, repeated)


def row_of(name: str, family: Family) -> Row:
    if not name.endswith(RANKS):
        return measured(name)
    try:
        return fxpipe.launch(measured, 2, name)[0]
    except Exception as error:
        return compatibility.refused(name, family, error, 0.0)


# --- the page ---


def table(rows: Sequence[Row]) -> str:
    headers = ["family", "captured by", "result", "captures", "again", "largest difference", "seconds"]
    lines = [
        (
            row.family,
            row.captured or "-",
            textwrap.shorten(row.result.replace("|", "\\|"), 240, placeholder=" …"),
            row.captures or "-",
            row.repeated if row.captures else "-",
            difference(row),
            f"{row.seconds:.0f}",
        )
        for row in rows
    ]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, default=Path("kinds_of_batch.json"), help="where rows are kept")
    parser.add_argument("--only", nargs="+", help='these families, or "Llama, 2 ranks"')
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marker lines")
    arguments = parser.parse_args()
    wanted = arguments.only or [*NAMES, *(name + RANKS for name in ON_RANKS)]
    known = json.loads(arguments.rows.read_text()) if arguments.rows.exists() else {}
    for name in [name for name in wanted if name not in known]:
        made = compatibility.in_own_process(row_of, name, FAMILIES[name.removesuffix(RANKS)], SECONDS)
        if isinstance(made, str):
            print(f"{name} is left out: {made}", flush=True)
            continue
        known[name] = asdict(made)
        arguments.rows.write_text(json.dumps(known, indent=1))
        print(f"{name}: {made.result} {made.captures} captures, {made.difference} {made.seconds} s", flush=True)
    rows = [Row(**known[name]) for name in wanted if name in known]
    if arguments.page:
        compatibility.write_between(arguments.page, BEGIN, table(rows), END)
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
