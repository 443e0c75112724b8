"""Waits end, and say why: ranks that are slow, gone, stopped, in another call, or given something else."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxpipe
from fxpipe import Action
from fxpipe.distributed import watchdog as watching
from fxpipe.distributed.activity import Activity, Call, Phase, announced, first_difference, here
from fxpipe.distributed.heartbeat import ProcessId, state_of, this_process
from fxpipe.distributed.watchdog import ends_later
from fxpipe.torch_compat.groups import default_store
from tests.models import Layers
from tests.pool import Pool

PIPE, DATA = fxpipe.Topology([("pipe", 2)]), fxpipe.Topology([("data", 2)])
X = torch.ones(4, 4)


class Two(Layers):
    """Two stages; ``before`` is called in the first one's forward."""

    names, width = "one two", 4

    def forward(self, x: Tensor) -> Tensor:
        return self.two(fxpipe.stage_boundary(self.one(x), name="text")).square().mean()


def compiled(topology: fxpipe.Topology = PIPE, **options: Any) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    options = {"checks": fxpipe.Checks(batches=False), **options}
    return fxpipe.compile(Two(), topology, microbatches=2, **options)


def failure_of(call: Callable[[], object]) -> str:
    """The RunError that the call ends with."""
    with pytest.raises(fxpipe.RunError) as raised:
        call()
    return str(raised.value)


def in_a_hurry(**options: Any) -> fxpipe.ForwardBackward:
    """Compiled, and has made a step; from then on it waits for two seconds. Before, other ranks may take their time."""
    forward_backward = compiled(**options)
    forward_backward(X)
    forward_backward._transport._inner.timeout = 2.0  # type: ignore[attr-defined]
    return forward_backward


def tell(key: str) -> None:
    default_store().set(key, "")


def hear(key: str) -> None:
    """Waits until another rank has told."""
    default_store().wait([key], datetime.timedelta(seconds=60))


# --- pre-flight


def given_other_options(rank_one: dict[str, Any]) -> str:
    fxpipe.init()
    return failure_of(lambda: compiled(**(rank_one if dist.get_rank() else {})))


# --- in another call


def without_one_step() -> str:
    forward_backward = compiled(DATA, zero=1)
    optimizer = forward_backward.optimizer(torch.optim.AdamW)

    def steps() -> None:
        for step in range(4):
            forward_backward(X)
            if step != 1 or dist.get_rank():
                optimizer.step()

    return failure_of(steps)


def one_calls_the_other_model() -> str:
    both = [compiled(), compiled()]
    return failure_of(lambda: both[dist.get_rank()](X))


def step_its_scheduler(_: object, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 if rank else 0.05


def clip_at_its_norm(forward_backward: fxpipe.ForwardBackward, _: object, rank: int) -> None:
    forward_backward.clip_grad_norm_(1.0 + rank)


def sum_gradients(forward_backward: fxpipe.ForwardBackward, _: object, rank: int) -> None:
    forward_backward.set_requires_gradient_sync(not rank)


def freeze_on_one_rank(forward_backward: fxpipe.ForwardBackward, _: object, rank: int) -> None:
    forward_backward._plans.module.two.weight.requires_grad_(not rank)


def ask_for_the_timeline(forward_backward: fxpipe.ForwardBackward, _: object, rank: int) -> None:
    if rank == 0:
        forward_backward.timeline()


def ask_for_the_state(forward_backward: fxpipe.ForwardBackward, _: object, rank: int) -> None:
    if rank == 0:
        forward_backward.state_dict(full=True)


def in_the_next_step(change: Callable[[fxpipe.ForwardBackward, torch.optim.Optimizer, int], object]) -> str:
    """What a rank says behind a step and a change of something."""
    forward_backward = compiled()
    forward_backward.record_timeline()
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    forward_backward(X)
    return failure_of(lambda: (change(forward_backward, optimizer, dist.get_rank()), forward_backward(X)))


def without_its_optimizer() -> float:
    forward_backward = compiled()
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    if dist.get_rank():
        del optimizer
    return forward_backward(X).item()


def test_a_rank_that_has_let_go_of_its_optimizer_is_compared_with_nobody(pool: Pool) -> None:
    assert len(set(pool.run(without_its_optimizer, ranks=2))) == 1


def with_its_own_optimizer(*own: tuple[type[torch.optim.Optimizer], dict[str, Any]]) -> str:
    forward_backward = compiled(DATA)
    cls, options = own[dist.get_rank()]
    optimizer = forward_backward.optimizer(cls, lr=0.1, **options)
    text = failure_of(lambda: forward_backward(X))
    assert optimizer.steps == 0
    return text


ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW


P0, P1 = "rank 0 (pipe 0)", "rank 1 (pipe 1)"
STEP_0, STEP_1 = "in forward_backward, step 0", "in forward_backward, step 1"
IN_TIMELINE, IN_STATE = (f"{P0} in {name}, {P1} {STEP_1}; all ranks" for name in ("timeline", "state_dict(full=True)"))
TOLD: dict[str, tuple[Any, ...]] = {
    "the topology is (pipe 2), ranks_per_node=None on rank 0": (given_other_options, {"topology": DATA}),
    f"schedule is '1f1b' on {P0}, and 'gpipe' on {P1}; ": (
        given_other_options,
        {"schedule": "gpipe", "checks": fxpipe.Checks(timeout=9)},
    ),
    "step 2: the number of calls of optimizer.step() is 1 on rank 0 (data 0), and 2 on": (without_one_step,),
    f"{P0} {STEP_0}, {P1} {STEP_0}, of compile 2; all ranks must make the same": (one_calls_the_other_model,),
    IN_TIMELINE: (in_the_next_step, ask_for_the_timeline),
    IN_STATE: (in_the_next_step, ask_for_the_state),
    f"{STEP_1}: lr of parameter group 0 is 0.05 on {P0}, and 0.1 on {P1}": (in_the_next_step, step_its_scheduler),
    f"{STEP_1}: (max_norm, norm_type) of clip_grad_norm_() is (1.0, 2.0) on": (in_the_next_step, clip_at_its_norm),
    f"{STEP_1}: set_requires_gradient_sync() is True on {P0}, and False on": (in_the_next_step, sum_gradients),
    f"{P0} and {P1} differ in the requires_grad of two.weight; change": (in_the_next_step, freeze_on_one_rank),
    "weight_decay of parameter group 0 is 0.01": (with_its_own_optimizer, (ADAMW, {}), (torch.optim.SGD, {})),
    "the class of optimizer 0 is 'AdamW'": (with_its_own_optimizer, (ADAMW, {"weight_decay": 0}), (ADAM, {})),
    "eps of parameter group 0 is 1e-06": (with_its_own_optimizer, (ADAMW, {"eps": 1e-6}), (ADAMW, {"eps": 1e-8})),
    "amsgrad of parameter group 0 is True": (with_its_own_optimizer, (ADAMW, {"amsgrad": True}), (ADAMW, {})),
}


@pytest.mark.parametrize("told", TOLD)
def test_what_ranks_do_or_were_given_differently_is_told_to_both(pool: Pool, told: str) -> None:
    call, *given = TOLD[told]
    first, second = pool.run(call, *given, ranks=2)
    assert told in first
    assert told in second


A, B = (Call(7, 3, name) for name in "ab")
NEXT, BEFORE, OF_A_PIPE = Call(8, 4, "next"), Call(6, 2, "before"), Call(8, 0, "timeline")


@pytest.mark.parametrize(
    ("mine", "theirs", "in_pipe", "elsewhere"),
    [
        ([A], [A], None, None),
        ([A, NEXT], [A], None, None),  # who is behind may yet come to it
        ([A, NEXT], [B, NEXT], ("a", "b"), ("a", "b")),
        ([BEFORE, A], [A], None, None),  # which the other does not remember
        ([A, OF_A_PIPE], [A, NEXT], ("timeline", "next"), None),
    ],
)
def test_calls_are_compared_where_both_ranks_have_come_to_them(
    mine: Any, theirs: Any, in_pipe: Any, elsewhere: Any
) -> None:
    assert first_difference(mine, theirs, same_pipe=True) == in_pipe
    assert first_difference(mine, theirs, same_pipe=False) == elsewhere


# --- deadlines


def one_does_not_come() -> str:
    forward_backward = in_a_hurry()
    if dist.get_rank():
        hear("over")
        return failure_of(lambda: forward_backward(X))
    text = failure_of(lambda: forward_backward(X))
    tell("over")
    return text


def with_a_folder(folder: Path) -> str:
    os.environ["FXPIPE_DEBUG_DIR"] = str(folder)
    try:
        return one_does_not_come()
    finally:
        del os.environ["FXPIPE_DEBUG_DIR"]


def test_at_the_deadline_all_say_who_is_waited_for_and_what_they_did_last_is_written(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(with_a_folder, tmp_path / "traces", ranks=2)
    assert re.match(
        r"rank 0 \(pipe 0\) waits for an all-gather over pipe, in forward_backward, step 1, before its first action, "
        r"\d+ s; rank 1 \(pipe 1\) is outside of fxpipe's calls, "
        r"behind forward_backward, step 0, at test_watchdog.py:\d+ in hear, \d+ s: longer than timeout=2 s",
        first,
    ), first
    assert first.partition(";")[0] in second
    for rank, action in enumerate(["0B1", "1B1"]):
        lines = (tmp_path / "traces" / f"rank{rank}.txt").read_text().splitlines()
        assert lines[0].startswith(f"rank {rank} (pipe {rank}) ")
        assert any(re.fullmatch(rf" +\d+\.\d+ s ago  {action}", line) for line in lines), lines


def test_a_collective_is_told_by_its_call_and_by_whether_actions_ran() -> None:
    activity = Activity()
    assert activity.when() == ""
    for name in ("forward_backward, step 5", "evaluate, before step 5"):
        activity.inside = (Phase(name, False),)
        activity.at(name)
        assert activity.when() == f", in {name}, before its first action"
        activity.at(Action.parse("2F3"))
        assert activity.when() == f", in {name}, behind its last action"
    activity.inside = (Phase("save, step 5", True),)
    activity.at("save, step 5")
    assert activity.when() == ", in save, step 5"


def one_sends_nothing() -> str:
    forward_backward = in_a_hurry()
    transport = forward_backward._transport
    if dist.get_rank() == 0:
        send = transport.send
        transport.send = lambda *message: (hear("over"), send(*message))  # type: ignore[method-assign]
    text = failure_of(lambda: forward_backward(X))
    tell("over")
    return text


def one_is_slow(extends: bool) -> list[str]:
    """What a rank says while it waits; nothing fails."""
    watching.SAY_AFTER, before = 1.0, watching.SAY_AFTER
    said: list[str] = []
    try:
        forward_backward = in_a_hurry() if extends else compiled()
        if dist.get_rank():
            with announced("save", extends=True) if extends else contextlib.nullcontext():
                hear("said") if not extends else threading.Event().wait(3)
        else:
            say = watching.say
            watching.say = lambda text: (said.append(text), tell("said"))  # type: ignore[assignment]
            with announced("save") if extends else contextlib.nullcontext():
                pass
        forward_backward(X)
        if not dist.get_rank():
            watching.say = say
        return said
    finally:
        watching.SAY_AFTER = before


def test_a_slow_rank_is_told_of_and_waited_for(pool: Pool) -> None:
    (text,), _ = pool.run(one_is_slow, False, ranks=2)
    assert re.fullmatch(
        r"rank 0 \(pipe 0\) waits for .*, \d+ s; rank 1 \(pipe 1\) is outside of fxpipe's calls, behind .*, \d+ s", text
    )


def test_a_rank_that_saves_is_given_more_time(pool: Pool) -> None:
    (text,), _ = pool.run(one_is_slow, True, ranks=2)
    assert "rank 1 (pipe 1) is in save" in text


# --- signals


def interrupted(in_a_message: bool) -> str:
    """Ctrl-C while this rank waits; the other one does nothing until it was heard."""
    forward_backward = compiled()
    forward_backward(X)
    if dist.get_rank() == 0:
        if in_a_message:
            forward_backward._transport.send = lambda *message: hear("heard")  # type: ignore[method-assign]
            return failure_of(lambda: (forward_backward(X), forward_backward(X)))
        hear("heard")
        return failure_of(lambda: forward_backward(X))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        waits = threading.Event()
        while here.waiting is None or ("of stage" in here.waiting.what()[0]) != in_a_message:
            waits.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    try:
        forward_backward(X)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell("heard")
    return "finished"


@pytest.mark.parametrize("in_a_message", [True, False])
def test_a_waiting_rank_hears_ctrl_c(pool: Pool, in_a_message: bool) -> None:
    other, text = pool.run(interrupted, in_a_message, ranks=2)
    assert text == "interrupted"
    assert other.startswith("another rank failed: rank 1 (pipe 1): KeyboardInterrupt")


def test_a_sigterm_is_put_off_in_the_main_thread_where_nobody_else_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    with ends_later():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # which would end the tests
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
        assert sent == []
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ends_later():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# --- between calls


def failing_between_calls() -> tuple[str, str]:
    """What a rank raises, and what the other one prints, which fails in its own code."""
    forward_backward = compiled()
    if not dist.get_rank():
        text = failure_of(lambda: forward_backward(X))
        tell("over")
        return text, ""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            int("row 17")
        except ValueError:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    hear("over")
    return "", printed.getvalue()


def test_an_exception_between_calls_is_told_to_all(pool: Pool) -> None:
    (text, _), (_, printed) = pool.run(failing_between_calls, ranks=2)
    assert text == "another rank failed: rank 1 (pipe 1): ValueError: invalid literal for int() with base 10: 'row 17'"
    assert "Traceback" in printed
    assert printed.count("ValueError") == 1


# --- what is left


def threads_and_sockets() -> list[tuple[int, int]]:
    counts = []
    for _ in range(3):
        compiled().close()
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    return counts


def test_compiling_again_leaves_no_threads_and_no_sockets(pool: Pool) -> None:
    for first, *later in pool.run(threads_and_sockets, ranks=2):
        assert later == [first] * len(later)


def test_one_process_has_no_watch() -> None:
    compiled()(X)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("fxpipe")] == []


# --- processes


def test_the_system_tells_what_became_of_a_process() -> None:
    me = this_process()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        found = ProcessId(me.machine, process.pid, int(Path(f"/proc/{process.pid}/stat").read_text().split()[21]))
        assert state_of(found) == "running"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert state_of(found) == "stopped"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert state_of(found) == "ended"
        process.wait()
        assert state_of(found) == "gone"
        assert state_of(found._replace(machine="another")) == ""
        assert state_of(me._replace(started=me.started - 1)) == "gone"  # another one had this number
    finally:
        process.kill()
        process.wait()
