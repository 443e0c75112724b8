"""Which model families fxpipe trains as they come: each tiny, with random weights, against plain PyTorch.

    python examples/benchmarks/compatibility.py --rows rows.json              # all; rows that are there are kept
    python examples/benchmarks/compatibility.py --rows rows.json --only Llama "GPT-2"
    python examples/benchmarks/compatibility.py --rows rows.json --page examples/compatibility.md  # the table

A family runs in a process of its own, with 2 pipe ranks in it. It is compiled with ``tracer="auto"`` and takes two
steps of SGD on three micro-batches each, whose lengths and numbers of images differ; then it evaluates a batch. Losses,
gradients and outputs are compared with those of plain PyTorch, in parts of a tensor's largest number. Where it is
refused with a rule to write, the rule is added, four times at most. The families are in ``families.py``; those of a
library that is not installed are left out.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.metadata
import json
import multiprocessing
import random
import re
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # here, once, and not in each process
import torch.export
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the models of the tests

from families import FAMILIES, Family, Inputs

import fxpipe
from fxpipe.batch.label_count import Items

BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"
STEPS, MICROBATCHES, RATE, SECONDS = 2, 3, 0.01, 240
LARGEST = 1e-5
"""The largest difference of a row that is right; a larger one in float32 is rounding if ``IN_DOUBLE`` bounds it in
float64."""
IN_DOUBLE = 1e-7
"""More than nothing: some models make float32 of their logits, whatever their parameters are."""
NOTHING = 1e-6
"""Of the model's largest gradient: smaller ones are nothing but rounding, such as that of a key's bias."""
RULES = 4
T = TypeVar("T")
RULE = re.compile(r'boundaries=(\{"[^.{}][^{}]*": (?:"whole"|\["whole", "[a-z]+"\])\})')
OPAQUE = re.compile(r"^(\S+) is opaque, (\d+)% of a step's FLOPs: ", re.MULTILINE)
ASKED = re.compile(r"^each outcome of this takes a capture", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """``result``: as the table says it; ``kind``: its first words. ``why``: what was refused, or what is wrong."""

    family: str
    library: str
    captured: str
    kind: str
    result: str
    difference: float | None
    seconds: float
    why: str = ""
    in_double: float | None = None
    """The difference in float64, where that in float32 is larger than ``LARGEST``."""
    captures: int = 0
    repeated: int = 0
    """Captures for batches that came before, as ``kinds_of_batch.py`` counts them."""


# --- two steps and an evaluation ---


@dataclass(frozen=True)
class Run:
    """What one of both computes: a step's losses and gradients, and what evaluation returns, by path."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    outputs: dict[str, Any]


def microbatches(family: Family, step: int) -> list[Inputs]:
    """Each of another length, or with another number of images."""
    generator = torch.Generator().manual_seed(step)
    return [family.batch(place, generator) for place in range(MICROBATCHES)]


def joined(family: Family, parts: Sequence[Inputs]) -> Inputs:
    """One batch of micro-batches of one length; without what all have in common."""
    return {
        name: value if family.rules.get(name, 0) is None else _joined([part[name] for part in parts])
        for name, value in parts[0].items()
    }


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    return [one for value in values for one in value] if isinstance(values[0], list) else values[0]


def evaluated_parts(family: Family) -> list[Inputs]:
    generator = torch.Generator().manual_seed(STEPS)
    parts = [family.batch(0, generator) for _ in range(MICROBATCHES)]
    left_out = set() if family.loss_alone else {"target"}
    return [{name: value for name, value in part.items() if name not in left_out} for part in parts]


def example(family: Family) -> Inputs:
    generator = torch.Generator().manual_seed(STEPS + 1)
    return joined(family, [family.batch(0, generator) for _ in range(MICROBATCHES)])


def compiled(
    family: Family, model: nn.Module, rules: Mapping[str, Any], cuts: Any, example: Inputs
) -> fxpipe.ForwardBackward:
    return fxpipe.compile(
        model,
        fxpipe.Topology([("pipe", 2)]),
        boundaries=cuts if not rules else {**({"*": "auto"} if cuts == "auto" else cuts), **rules},
        microbatches=MICROBATCHES,
        batch_dim=family.rules,
        loss_fn=family.loss,
        example_kwargs=example,
    )


def in_stages(family: Family, forward_backward: fxpipe.ForwardBackward) -> Run:
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=RATE)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(forward_backward.step_microbatches([((), part) for part in microbatches(family, step)]))
        gradients.append(gradients_of(forward_backward.named_parameters()))
        optimizer.step()
    outputs = forward_backward.evaluate(**joined(family, evaluated_parts(family)), outputs="all")
    outputs = outputs[None] if family.loss_alone else outputs
    return Run(losses, gradients, dict(named(outputs)))


def plainly(family: Family, model: nn.Module, forward_backward: fxpipe.ForwardBackward) -> Run:
    """The loop over micro-batches; numbers are drawn as the last stage draws them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    shares = [1 / MICROBATCHES] * MICROBATCHES
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(accumulated(family, model, forward_backward, microbatches(family, step), shares, step))
        gradients.append(gradients_of(model.named_parameters()))
        optimizer.step()
    return Run(losses, gradients, evaluated(family, model, evaluated_parts(family), shares, family.loss_alone))


def accumulated(
    family: Family,
    model: nn.Module,
    forward_backward: fxpipe.ForwardBackward,
    parts: Sequence[Inputs],
    shares: Sequence[float],
    step: int,
) -> Tensor:
    """The loss of micro-batches, ``shares`` of the batch's rows, after the backward of each."""
    items, total = Items.from_model(model), torch.zeros(())
    counted = not items.uncounted and isinstance(parts[0].get("labels"), Tensor)
    for place, (part, share) in enumerate(zip(parts, shares, strict=True)):
        seed(forward_backward.seed(forward_backward.stages.names[-1], place, step))
        given = {"num_items_in_batch": items.count(parts).float() * share} if counted else {}
        loss = family.loss_of(model, {**part, **given}) * share
        loss.backward()
        total += loss.detach()
    return total


def evaluated(
    family: Family, model: nn.Module, parts: Sequence[Inputs], shares: Sequence[float], loss_alone: bool
) -> dict[str, list[Any]]:
    """What the model, or its loss, is for each micro-batch, by path."""
    model.eval()
    with torch.no_grad():
        if loss_alone:
            losses = [family.loss_of(model, part) * share for part, share in zip(parts, shares, strict=True)]
            every = [{"": sum(losses)[None]}]
        else:
            every = [dict(named(model(**part))) for part in parts]
    model.train()
    return {path: [each[path] for each in every] for path in every[0]}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


def gradients_of(parameters: Any) -> dict[str, Tensor | None]:
    return {name: None if one.grad is None else one.grad.clone() for name, one in parameters}


def named(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of an output, and lists of them, by path."""
    if isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(one, Tensor) for one in value)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from named(one, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for place, one in enumerate(value):
            yield from named(one, f"{path}.{place}")


# --- how far one is from the other ---


def distance(got: Tensor | None, wanted: Tensor | None, least: float = 0.0) -> float:
    """In parts of the largest number, which counts as ``least`` where it is smaller."""
    if got is None or wanted is None:
        return 0.0 if (got if wanted is None else wanted) is None else float("inf")
    if got.shape != wanted.shape or not bool((got.isfinite() == wanted.isfinite()).all()):
        return float("inf")
    if not wanted.numel() or torch.equal(got, wanted):
        return 0.0
    got, wanted = got.double().nan_to_num(posinf=0, neginf=0), wanted.double().nan_to_num(posinf=0, neginf=0)
    return float((got - wanted).abs().max() / max(float(wanted.abs().max()), least, 1e-30))


def distances(got: Run, wanted: Run) -> Iterator[tuple[float, str]]:
    for step in range(len(wanted.losses)):
        yield distance(got.losses[step], wanted.losses[step]), f"loss of step {step}"
        plain = wanted.gradients[step]
        sizes = {name: 0.0 if one is None else float(one.abs().max()) for name, one in plain.items()}
        largest = max(sizes.values())
        for name, gradient in plain.items():
            found = got.gradients[step].get(name)
            if gradient is None and found is not None and not found.any():
                continue
            least = largest if sizes[name] < NOTHING * largest else 0.0
            yield distance(found, gradient, least), f"gradient of {name}, step {step}"
    yield from output_distances(got.outputs, wanted.outputs)


def output_distances(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Of what has rows; a list holds what each micro-batch returns."""
    compared = 0
    for path, parts in wanted.items():
        found = got.get(path)
        if isinstance(parts[0], Tensor) and parts[0].dim() and parts[0].is_floating_point() and found is not None:
            whole = torch.cat(found) if isinstance(found, list) else found
            yield distance(whole, torch.cat(parts)), f"{path.lstrip('.') or 'output'} of evaluate"
            compared += 1
    if not compared:
        raise LookupError(f"nothing of evaluate can be compared: {list(wanted)} and {list(got)}")


# --- a row ---


def row_of(name: str, family: Family) -> Row:
    """In the process that this row has for itself."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = family.model()
    family.loss_of(copy.deepcopy(model), microbatches(family, 0)[-1])  # shows a wrong batch before fxpipe sees it
    start = time.perf_counter()

    def trained(rules: Mapping[str, Any]) -> tuple[fxpipe.ForwardBackward, Run]:
        forward_backward = compiled(family, copy.deepcopy(model), rules, family.cuts(model), example(family))
        return forward_backward, in_stages(family, forward_backward)

    try:
        (forward_backward, got), rules = with_rules(trained)
    except Exception as error:
        return refused(name, family, error, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    far, where = max(distances(got, plainly(family, model, forward_backward)))
    stages = str(forward_backward.stages)
    tracer = stages.partition("captured by the ")[2].partition(" tracer")[0]
    kind, result = verdict(stages, rules)
    again = None if far <= LARGEST else in_double(family, rules)
    if is_wrong(far, again):
        kind, result = "wrong", f"wrong: {where}"
    return Row(name, family.library, tracer, kind, result, far, round(seconds, 1), where, again)


def is_wrong(far: float, in_double: float | None) -> bool:
    """Whether such a difference, and that in float64 where it is known, is more than rounding."""
    return far > LARGEST and (in_double is None or not in_double <= IN_DOUBLE)


def with_rules(trained: Callable[[Mapping[str, Any]], T]) -> tuple[T, Mapping[str, Any]]:
    """What ``trained`` returns, with the rules that its refusals name, and these rules."""
    rules: dict[str, Any] = {}
    while True:
        try:
            return trained(rules), rules
        except fxpipe.FxpipeError as error:
            told = RULE.search(str(error))
            if told is None or len(rules) == RULES or ast.literal_eval(told[1]).items() <= rules.items():
                raise
            rules |= ast.literal_eval(told[1])


def in_double(family: Family, rules: Mapping[str, Any]) -> float:
    """The largest difference where every number is a float64."""
    torch.set_default_dtype(torch.float64)  # of what the batches draw, too
    model = family.model().double()
    forward_backward = compiled(family, copy.deepcopy(model), rules, family.cuts(model), example(family))
    got = in_stages(family, forward_backward)
    return max(distances(got, plainly(family, model, forward_backward)))[0]


def verdict(stages: str, rules: Mapping[str, Any]) -> tuple[str, str]:
    opaque = [f"`{part}` {share} %" for part, share in OPAQUE.findall(stages)]
    asked = len(ASKED.findall(stages))
    if rules:
        kind, of = "by a rule", [", ".join(f"`{part}`: {json.dumps(rule)}" for part, rule in rules.items())]
    else:
        kind, of = ("opaque by itself", []) if opaque else ("as it comes", [])
    if opaque:
        of.append(f"opaque by itself {', '.join(opaque)}" if rules else ", ".join(opaque))
    if asked:
        of.append(f"inputs are asked in {asked} line{'s' * (asked > 1)}")
    return kind, f"{kind}: {'; '.join(of)}" if of else kind


def refused(name: str, family: Family, error: Exception, seconds: float) -> Row:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    known = "" if isinstance(error, fxpipe.FxpipeError) else f"{type(error).__name__}: "
    whole = "".join(traceback.format_exception(error))
    return Row(name, family.library, "", "refused", f"refused: {known}{first}", None, round(seconds, 1), whole)


def in_own_process(make: Callable[[str, Family], Row], name: str, family: Family, limit: float = SECONDS) -> Row | str:
    """The row, or why there is none: the model or its batch cannot be made. ``limit``: seconds that it may take."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_sent, args=(send, make, name, family))
    process.start()
    send.close()
    start, row = time.perf_counter(), None
    if receive.poll(limit):
        try:
            row = receive.recv()
        except EOFError:
            row = None
    seconds = time.perf_counter() - start
    if row is None:
        process.kill()
    process.join()
    if row is not None:
        return row  # type: ignore[no-any-return]
    why = f"no answer in {limit:.0f} s" if seconds >= limit else f"the process ended with {process.exitcode}"
    return Row(name, family.library, "", "refused", f"refused: {why}", None, round(seconds, 1), why)


def _sent(send: Any, make: Callable[[str, Family], Row], name: str, family: Family) -> None:
    try:
        send.send(make(name, family))
    except Exception:
        send.send(traceback.format_exc())


# --- the page ---


def table(rows: Sequence[Row]) -> str:
    headers = ["family", "library", "captured by", "result", "largest difference", "seconds"]
    lines = [
        (
            row.family,
            row.library,
            row.captured or "-",
            textwrap.shorten(row.result.replace("|", "\\|"), 240, placeholder=" …"),
            difference(row),
            f"{row.seconds:.0f}",
        )
        for row in rows
    ]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def difference(row: Row) -> str:
    if row.difference is None:
        return "-"
    return f"{row.difference:.0e}" + (f", float64: {row.in_double:.0e}" if row.in_double is not None else "")


def versions() -> str:
    found = []
    for name in ("torch", "transformers", "diffusers", "timm", "open_clip_torch", "fxpipe"):
        try:
            found.append(f"{name} {fxpipe.__version__ if name == 'fxpipe' else importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def write_page(page: Path, rows: Sequence[Row]) -> None:
    kinds = [row.kind for row in rows]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds)))
    said = f"{len(rows)} families: {counts}. Made with {versions()}."
    write_between(page, BEGIN, f"{said}\n\n{table(rows)}", END)


def write_between(page: Path, begin: str, text: str, end: str) -> None:
    """Puts it between two marker lines of the page."""
    before, _, rest = (page.read_text() if page.exists() else "").partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, default=Path("compatibility.json"), help="where rows are kept")
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), help="these families")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marker lines")
    arguments = parser.parse_args()
    known = json.loads(arguments.rows.read_text()) if arguments.rows.exists() else {}
    for name in [name for name in arguments.only if name not in known]:
        made = in_own_process(row_of, name, FAMILIES[name])
        if isinstance(made, str):
            print(f"{name} is left out: {made}", flush=True)
            continue
        known[name] = asdict(made)
        arguments.rows.write_text(json.dumps(known, indent=1))
        print(f"{name}: {made.captured} {made.result} {made.difference} {made.seconds} s", flush=True)
    rows = [Row(**known[name]) for name in FAMILIES if name in known]
    if arguments.page:
        write_page(arguments.page, rows)
    else:
        print(table([row for row in rows if row.family in arguments.only]))


if __name__ == "__main__":
    main()
