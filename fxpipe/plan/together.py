"""Together: every rank makes the same plan, or every rank raises. Replicas may run different tables, unless the tables
contain collectives between replicas.

Takes: a function that makes a plan on this rank. Gives: its state and plan, if all ranks made the same; otherwise an
error on every rank, and the old state.

1. Each rank makes its plan, and catches any error.
2. The ranks exchange the digest of their plans, and the errors in words, in each scope: the pipe group, then the
   replicas.
3. If digests differ, they exchange the descriptions, and the error names the first line that differs.
4. A rank that failed raises its own error; the others raise a RunError that names it.

Each rank makes all exchanges, also after a failure: another rank would wait for ever. ``first_plan_together`` repeats
the first plan while all ranks ask the same question about the example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest

from fxpipe.device import is_accelerator
from fxpipe.distributed.transport import Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.options import Options
from fxpipe.plan.example import Example, plan_first
from fxpipe.plan.plan import Plan
from fxpipe.plan.plans import Plans

EVERYONE = ("pipe", "data")


def first_plan_together(transport: Transport, plans: Plans, options: Options) -> Plans:
    """The plans with the plan for ``options``' example, the same on every rank. A collective call of all ranks.

    The first rank's example answers forward's questions about its inputs.
    """
    keeps_part = transport.pipe_rank is not None
    answers: tuple[Answers, ...] = ()
    while True:
        failure: Exception | None = None
        asked = [""]  # the key of an open question
        try:
            _check_device(transport, plans)
            plans, unanswered = plan_first(Example(plans, options), answers, keeps_part)
            if unanswered is not None:
                failure, asked, answers = unanswered, [unanswered.key], Example(plans, options).answers
        except Exception as error:  # raised on all ranks below
            failure = error
        for scope in EVERYONE:
            everyone = transport.gather(scope, (asked, answers))
            asked, answers = [key for keys, _ in everyone for key in keys], everyone[0][1]
        # Ranks capture again only if all of them ask the same question: otherwise a rank has failed, or has a plan.
        if len(set(asked)) != 1 or not asked[0]:
            break

    def first() -> tuple[Plans, Plan]:
        if failure is not None:
            raise failure
        return plans, plans.first

    plans, _ = plan_together(transport, EVERYONE, first)
    # If only some ranks could make a plan, such as evaluation of an example that other ranks cannot evaluate, no rank
    # keeps it: ranks would disagree in later calls.
    digests, same = [plan.digest for plan in plans.by_pattern.values()], True
    for scope in EVERYONE:
        same = all(answer == (True, digests) for answer in transport.gather(scope, (same, digests)))
    return plans.holding_what_all_use() if same else plans.only(())


def _check_device(transport: Transport, plans: Plans) -> None:
    """RunError if the job was started for accelerators, and this rank's model is not on this rank's accelerator."""
    own, tensors = transport.device, all_tensors(plans.module).items()
    held = {tensor.device: name for name, tensor in tensors if not tensor.is_meta}
    if is_accelerator(own) and held and own not in held:
        place, name = held.popitem()
        raise RunError(
            f"the model's {name} is on {place}, and this rank computes on {own}; write device = fxpipe.init() "
            'at the beginning, and model.to(device), or fxpipe.init(device="cpu") to train on the CPU'
        )


def plan_together(
    transport: Transport, scopes: Sequence[str], make: Callable[[], tuple[Plans, Plan]]
) -> tuple[Plans, Plan]:
    """Returns the plans and the plan, which is equal on every rank. If a rank has no plan, or a different plan, every
    rank raises and keeps its old plans. A collective call."""
    # 1. this rank's plan
    plans, plan, failure, wrong = None, None, None, ""
    try:
        plans, plan = make()
    except Exception as error:
        failure, wrong = error, f"could not compile: {type(error).__name__}: {error}"
    # 2. and 3. compare the digests of each scope
    for scope in scopes:  # every scope, even after a failure: other ranks wait in the next scope
        everyone = transport.gather(scope, (plan.digest if plan is not None else "", wrong))
        # Ranks that all ask the same question answer it and call again; a rank that asks alone would wait for ever.
        if isinstance(failure, Unanswered) and any(other != wrong for _, other in everyone):  # these do not call again
            failure, wrong = None, next(other or "has a plan already" for _, other in everyone if other != wrong)
        problems = [f"{member(transport, scope, rank)} {other}" for rank, (_, other) in enumerate(everyone) if other]
        digests = [digest for digest, _ in everyone]
        if problems:
            wrong = wrong or problems[0]
        elif len(set(digests)) > 1 and plan is not None:
            texts = transport.gather(scope, plan.description)
            odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            wrong = _difference(transport, scope, odd, digests, texts)
    # 4. this rank's own error first
    if failure is not None:
        raise failure
    if wrong or plan is None or plans is None:
        raise RunError(wrong)
    return plans, plan


def _difference(transport: Transport, scope: str, odd: int, digests: Sequence[str], texts: Sequence[str]) -> str:
    """The first line in which the descriptions of two ranks' plans differ, in words."""
    lines = zip_longest(texts[0].splitlines(), texts[odd].splitlines(), fillvalue="(ends)")
    mine, its = next(pair for pair in lines if pair[0] != pair[1])
    first, other = member(transport, scope, 0), member(transport, scope, odd)
    return (
        f"{first} and {other} have compiled different programs ({digests[0]} and {digests[odd]}); they first differ "
        f"in\n  {first}: {mine}\n  {other}: {its}\nbuild the same model and ask for the same schedule on every rank"
    )


def check_refusals(transport: Transport, everyone: Sequence[object]) -> None:
    """RunError if other replicas refuse their batches, and this one does not. A text in ``everyone``, an item of each
    replica, says why its replica refuses."""
    texts = {replica: text for replica, text in enumerate(everyone) if isinstance(text, str)}
    if texts and transport.data_rank not in texts:
        who, text = member(transport, "data", min(texts)), texts[min(texts)]
        raise RunError(f"{who} refuses its batch, and no rank runs this call: {text}")


def shared_rows(plan: Plan, zero: int, shards_parameters: bool, meets: bool, training: bool) -> tuple[int, ...] | None:
    """The digests of the rows of a call if they contain data-axis collectives, so that all replicas must run the same.

    None if no row has such a collective. Rows have collectives in these cases:

    - ``zero=2`` sums gradients after each micro-batch, and ``zero=3`` after each stage.
    - A stage gathers the rows of all replicas.
    - ``shards_parameters``: the parameters of stages are gathered.
    - ``meets``: stages may meet the stages of other expert and context ranks.
    """
    gathers, sums = plan.graph.sees_replicas, zero > 1 and training
    if not (gathers or sums or shards_parameters or meets):
        return None
    return plan.row_digests if gathers or meets or (sums and zero == 2) else plan.pass_digests


def check_rows(plan: Plan, everyone: Collection[tuple[int, ...] | None]) -> None:
    """RunError if the replicas' ``shared_rows`` differ."""
    if len(set(everyone)) > 1:  # of all rows, so that all ranks of a pipe group raise
        raise RunError(
            "sums and gathers inside of a step run in the order of the table, but the replicas run tables of their "
            f"own; this one's has {len(plan.graphs)} micro-batches. Give all replicas batches of one kind, that are "
            "cut into as many (drop_last=True in a DataLoader), or, of zero=2, write zero=1"
        )
