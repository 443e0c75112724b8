"""``fxpipe.save``: a checkpoint is complete or absent, whenever the process dies."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.checkpoint.files import run_folder
from fxpipe.checkpoint.files.run_folder import FolderLock, lock_of
from fxpipe.errors import CheckpointError
from fxpipe.run import saving
from tests.pool import Pool, forking
from tests.run.test_loading import Trained, Two, check_unchanged
from tests.thinned import every


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the folder


def test_so_many_are_kept_and_the_latest_is_the_last(tmp_path: Path) -> None:
    run = Trained()
    for step in range(1, 6):
        assert run.save(tmp_path, step) == tmp_path / f"step-00000{step}"
        assert os.readlink(tmp_path / "latest") == f"step-00000{step}"
    assert names(tmp_path) == ["latest", "lock", "step-000003", "step-000004", "step-000005"]
    run.save(tmp_path, 6, keep=None)
    run.save(tmp_path, 7, keep=1)
    assert names(tmp_path) == ["latest", "lock", "step-000007"]


def test_a_run_that_goes_back_writes_what_is_newest(tmp_path: Path) -> None:
    run = Trained()
    for step in (100, 200, 300):
        run.save(tmp_path, step)
    run.load(tmp_path / "step-000100")
    run.save(tmp_path, 200)
    assert names(tmp_path) == ["latest", "lock", "step-000200", "step-000200-2", "step-000300"]
    assert Trained(1).load(tmp_path)["step"] == 200
    assert os.readlink(tmp_path / "latest") == "step-000200-2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, r"step=-1 is no number of steps"),
        ({"keep": 0}, r"keep=0 keeps no checkpoint"),
        ({"best": torch.tensor(0.5)}, r"best is tensor\(0\.5.*; it is True or False, for example best=loss < best"),
        ({"extra": [1]}, r"extra= is a list; write a dict without 'step'"),
        ({"extra": {"step": 3}}, r"extra= is a dict with 'step'"),
        ({"extra": {"a": {"b": 1j}}}, r"extra\['a'\]\['b'\] is a complex"),
        ({"loader": [1, 2]}, r"loader= is a list, which has no state_dict\(\)"),
        ({"optimizer": [1]}, r"optimizer= is a list; give what forward_backward\.optimizer"),
        ({"optimizer": {"a": 1}}, r"optimizer= is a int; give what"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    run = Trained()
    run.save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=message):
        fxpipe.save(tmp_path, run.model, options.pop("optimizer", run.optimizer), **{"step": 2, **options})
    assert names(tmp_path) == ["latest", "lock", "step-000001"]


def test_a_resumed_run_keeps_its_best(tmp_path: Path) -> None:
    losses, saved = [5.0, 3.0, 4.0, 3.5, 6.0, 3.2, 2.0, 2.5], []
    for start in range(2):  # of two programs
        run = Trained()
        state = fxpipe.load(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, required=False)
        best = state.get("best", float("inf"))
        for step in range(state["step"] + 1, 5 + 4 * start):
            run.step()
            loss, values = torch.tensor(losses[step - 1]), run.values()
            is_best, best = loss < best, min(loss, best)
            run.save(tmp_path, step, best=is_best, extra={"best": best}, keep=1)
            saved = [values] if is_best else saved
            number = 1 + min(range(step), key=losses.__getitem__)
            assert names(tmp_path)[3:] == sorted({f"step-{number:06}", f"step-{step:06}"})
            assert os.readlink(tmp_path / "best") == f"step-{number:06}"
    assert Trained(1).load(tmp_path) == {"best": 2.0, "step": 8}
    run = Trained(1)
    assert run.load(tmp_path / "best") == {"best": 2.0, "step": 7}
    check_unchanged(run, *saved)
    run.save(tmp_path, 9)  # it goes on from the best


def test_a_folder_in_the_place_of_the_best_is_refused_at_the_start(tmp_path: Path) -> None:
    run, other = Trained(), Trained()
    other.save(tmp_path / "best", 1)  # as scripts did that kept the best by a second folder
    with pytest.raises(CheckpointError, match=r"best is a folder, and no link to a checkpoint; delete it, or give"):
        fxpipe.load(tmp_path, run.model, run.optimizer, required=False)
    run.save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"best is a folder, and no link"):
        run.save(tmp_path, 2, best=True)
    assert names(tmp_path) == ["best", "latest", "lock", "step-000001"]
    assert run.load(tmp_path / "best")["step"] == 1
    with pytest.raises(CheckpointError, match=r"save\(\.\.\., best=loss < best\) keeps the best in the run's own"):
        Trained().save(tmp_path / "best", 2)


def saved_as_best(folder: Path) -> None:
    run = Trained()
    with pytest.raises(CheckpointError, match=r"best is True on rank 1 and False on rank 0; compare a value that all"):
        run.save(folder, 1, best=torch.distributed.get_rank() == 1)
    run.save(folder, 2, best=True, block=False)
    run.model.close()


def test_ranks_that_disagree_on_the_best_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved_as_best, tmp_path, ranks=2)
    assert names(tmp_path) == ["best", "latest", "lock", "step-000002"]


def test_where_nothing_can_be_written_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trained()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run: Not a directory; the checkpoints that were complete"):
        run.save(tmp_path / "file" / "run", 1)
    run.save(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match=r"step-000001 is a checkpoint itself; give the folder of the run"):
        run.save(tmp_path / "run" / "step-000001", 2)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"step-000002\.partial: No space left on device; the checkpoints that were"
    ):
        run.save(tmp_path / "run", 2)
    assert names(tmp_path / "run") == ["latest", "lock", "step-000001"]


def test_what_fails_behind_the_rename_hinders_no_later_save(tmp_path: Path) -> None:
    """The error said that nothing had changed, and each later save was refused as another run's."""
    run = Trained()
    run.save(tmp_path, 1)
    (tmp_path / "latest.partial").mkdir()  # where the new link is to be made
    with pytest.warns(match=r"step-000002 is complete, but latest or older ones were not changed: .*latest.partial"):
        run.save(tmp_path, 2)
    assert os.readlink(tmp_path / "latest") == "step-000001"
    assert Trained(1).load(tmp_path)["step"] == 2
    (tmp_path / "latest.partial").rmdir()
    run.save(tmp_path, 3)
    assert os.readlink(tmp_path / "latest") == "step-000003"


def test_a_save_that_is_interrupted_behind_the_rename_hinders_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trained()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "keep_newest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.save(tmp_path, 1)
    monkeypatch.undo()
    run.save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "lock", "step-000001", "step-000002"]


@pytest.mark.parametrize("gone", [".", "lock"])
def test_a_folder_that_was_moved_away_is_made_anew_with_a_lock(tmp_path: Path, gone: str) -> None:
    folder = tmp_path / "run"
    run = Trained()
    run.save(folder, 1)
    (folder / gone).rename(tmp_path / "moved")
    run.save(folder, 2)
    assert "lock" in names(folder)
    other = forking().Process(target=lock_of, args=(folder, "other"))
    other.start()
    other.join(60)
    assert other.exitcode == 1  # it is refused


def test_another_runs_checkpoints_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    """Started anew by habit, a script would have deleted what the run before it had saved."""
    Trained().save(tmp_path, 9000)
    run = Trained(1)
    with pytest.raises(CheckpointError, match=r"has a checkpoint that this run has not written or loaded, step-009000"):
        run.save(tmp_path, 1)
    assert names(tmp_path) == ["latest", "lock", "step-009000"]
    assert fxpipe.load(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, required=False)["step"] == 9000
    run.save(tmp_path, 9001)


holders: list[FolderLock] = []


def hold(folder: Path) -> None:
    """Another job, which writes to the folder until ``let_go``."""
    holders.append(lock_of(folder, "another"))


def let_go() -> None:
    holders.clear()


def test_a_run_that_begins_finds_another_job_at_once(pool: Pool, tmp_path: Path) -> None:
    """It would have found it at its first save, hours later, or have stopped the job that was there first."""
    pool.run(hold, tmp_path, ranks=1)
    run = Trained()
    with pytest.raises(CheckpointError, match=r"is written to by process \d+ on .* \(run another\)"):
        fxpipe.load(tmp_path, run.model, run.optimizer, required=False)
    pool.run(let_go, ranks=1)
    assert fxpipe.load(tmp_path, run.model, run.optimizer, required=False)["step"] == 0
    with pytest.raises(AssertionError, match=f"written to by process {os.getpid()}"):
        pool.run(hold, tmp_path, ranks=1)


def test_an_evaluation_reads_beside_a_job_that_writes(pool: Pool, tmp_path: Path) -> None:
    Trained().save(tmp_path, 3)
    gc.collect()  # the first run ends
    pool.run(hold, tmp_path, ranks=1)
    run = Trained(1)
    assert fxpipe.load(tmp_path, run.model)["step"] == 3
    pool.run(let_go, ranks=1)


def test_a_run_that_begins_finds_a_folder_that_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = Trained(), tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="file"):
        fxpipe.load(file, run.model, required=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a file system that is mounted read-only
    with pytest.raises(CheckpointError, match="cannot be written to by this process; give a folder that save"):
        fxpipe.load(tmp_path / "run", run.model, required=False)


@pytest.mark.parametrize("name", ["latest", "step-000001"])
def test_a_run_begins_where_its_latest_checkpoint_will_be(name: str, tmp_path: Path) -> None:
    run = Trained()
    assert fxpipe.load(tmp_path / name, run.model, run.optimizer, required=False)["step"] == 0
    assert names(tmp_path) == ["lock"]  # no folder of that name, which save() would refuse
    run.save(tmp_path, 1)
    assert Trained(1).load(tmp_path / name)["step"] == 1


def test_what_is_saved_and_loaded_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Trained()
    run.save(tmp_path, 20)
    fxpipe.load(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    said = [line for line in capfd.readouterr().err.splitlines() if "step-000020" in line]
    assert said == [f"fxpipe: {did} {tmp_path / 'step-000020'}" for did in ("saved", "loaded")]


def test_two_models_of_one_program_do_not_mix_their_checkpoints(tmp_path: Path) -> None:
    """A generator and its critic, say, of one architecture: each would delete the other's, and load it later."""
    one, other = Trained(), Trained(1)
    for run in (one, other):
        assert fxpipe.load(tmp_path, run.model, run.optimizer, required=False)["step"] == 0
    one.save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="has not written or loaded, step-000001: call"):
        other.save(tmp_path, 1)
    one.save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "lock", "step-000001", "step-000002"]
    assert other.load(tmp_path)["step"] == 2  # and goes on from there
    other.save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step-000003: call"):
        one.save(tmp_path, 3, block=False)


def test_gradients_that_are_not_summed_yet_are_not_left_behind(tmp_path: Path) -> None:
    """Of one replica and of several alike, whatever the next call is going to do."""
    run = Trained()
    run.model.set_requires_gradient_sync(False)
    run.save(tmp_path, 0)  # there are none
    run.model(torch.randn(4, 4))
    for sync in (False, True):
        run.model.set_requires_gradient_sync(sync)
        with pytest.raises(CheckpointError, match=r"would be lost: save behind the call that sums them and optimizer"):
            run.save(tmp_path, 1)
    run.model(torch.randn(4, 4))  # which sums them
    run.save(tmp_path, 1)
    run.model.set_requires_gradient_sync(False)
    run.model(torch.randn(4, 4))
    run.optimizer.zero_grad()
    run.save(tmp_path, 2)


# --- while training goes on


def full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_what_could_not_be_written_later_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trained()
    monkeypatch.setattr(os, "fsync", full)
    fxpipe.save(tmp_path, run.model, run.optimizer, step=1, block=False)
    with pytest.raises(
        CheckpointError, match=r"before this one could not be written: .*step-000001\.partial: No space left"
    ):
        run.save(tmp_path, 2)
    monkeypatch.undo()
    run.save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "lock", "step-000003"]


def test_what_could_not_be_written_later_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    run = Trained()
    monkeypatch.setattr(os, "fsync", full)
    later = fxpipe.save(tmp_path, run.model, run.optimizer, step=1, block=False)
    while not later.done():
        pass
    saving._report_failed()
    told = f"CheckpointError: {tmp_path}/step-000001.partial: No space left on device"
    assert f"fxpipe: a checkpoint could not be written: {told}" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="the checkpoint before this one"):
        run.save(tmp_path, 2)
    saving._report_failed()
    assert capsys.readouterr().err == ""


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    run = Trained()
    for step in range(1, 5):
        run.step()
        later = fxpipe.save(tmp_path, run.model, run.optimizer, step=step, block=False)
    later.result(60)
    assert names(tmp_path) == ["latest", "lock", "step-000002", "step-000003", "step-000004"]


@pytest.mark.parametrize(("alive", "then"), [(True, "load"), (False, "save")])
def test_another_model_of_the_process_waits_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool, then: str
) -> None:
    """As where train() returns and evaluate() begins: the one before was loaded, and a save deleted what was there."""

    run, waited_for, fsync = Trained(), threading.Event(), os.fsync
    run.save(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", lambda handle: (waited_for.wait(60), fsync(handle))[1])
    monkeypatch.setattr(saving, "wait", lambda *args: (waited_for.set(), wait(*args))[1])
    later = fxpipe.save(tmp_path, run.model, run.optimizer, step=2, scheduler=run.scheduler, block=False)
    if not alive:
        del run
        gc.collect()
    other = Trained(1)
    try:
        if then == "save":  # which is refused, for it was not loaded from there, and deletes nothing
            with pytest.raises(fxpipe.CheckpointError, match="has not written or loaded, step-000002"):
                other.save(tmp_path, 3)
        else:
            assert other.load(tmp_path)["step"] == 2
    finally:
        waited_for.set()
    assert later.result(60) == tmp_path / "step-000002"
    assert names(tmp_path)[2:4] == ["step-000001", "step-000002"]


def ended(function: Callable[..., None], *args: Any) -> int | None:
    """How a process ends that runs it; none is left, whatever happens."""
    process = forking().Process(target=function, args=args)
    process.start()
    try:
        process.join(280)
        return process.exitcode
    finally:
        process.kill()
        process.join()


def save_and_end(folder: Path) -> None:
    """The program is over while its checkpoint is being written."""
    run = Trained()
    fxpipe.save(folder, run.model, run.optimizer, step=1, scheduler=run.scheduler, block=False)


def test_a_program_that_ends_completes_what_is_being_written(tmp_path: Path) -> None:
    assert ended(save_and_end, tmp_path) == 0
    assert Trained(1).load(tmp_path)["step"] == 1


# --- not in the middle, and not a part


def test_a_save_from_inside_of_a_call_or_a_step_is_refused(tmp_path: Path) -> None:
    """A handler of signals comes at any moment: what was saved would be neither one step nor the next."""
    asked: list[Trained] = []
    run = Trained(loss_weight=lambda x: (asked and asked[0].save(tmp_path, 1), len(x))[1])
    run.step()
    asked.append(run)
    with pytest.raises(fxpipe.FxpipeError, match=r"while a call of it runs, .* save behind optimizer\.step\(\)"):
        run.step()
    assert not names(tmp_path)
    handle = run.optimizer._inner.register_step_post_hook(lambda *_: run.save(tmp_path, 1))
    asked.clear()
    with pytest.raises(CheckpointError, match="or a step of its optimizer: from a hook, a signal handler"):
        run.step()
    handle.remove()
    run.step()


def test_a_copy_in_which_the_latest_is_a_folder_is_refused(tmp_path: Path) -> None:
    run = Trained()
    run.save(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert run.load(tmp_path / "copy")["step"] == 1
    with pytest.raises(CheckpointError, match=r"latest is a folder, and no link to a checkpoint; delete it"):
        run.save(tmp_path / "copy", 2)


class Counting(Two):
    """With a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_extra_state_that_no_checkpoint_would_hold_is_refused_before_the_first_step() -> None:
    topology = fxpipe.Topology([("pipe", 2)])
    for make in (fxpipe.compile, fxpipe.preview):
        with pytest.raises(fxpipe.RunError, match=r"^_extra_state is the state of Counting\.get_extra_state"):
            make(Counting(), topology)
    with pytest.raises(fxpipe.RunError, match=r"^a\._extra_state .*write Counting\.get_extra_state = torch\.nn\.Mod"):
        fxpipe.compile(Two(), topology, loss_fn=nn.ModuleDict({"a": Counting()}), boundaries=["last"])
    change = lambda stage, mesh: setattr(stage, "first", Counting())  # noqa: E731
    with pytest.raises(fxpipe.RunError, match="_extra_state"):
        fxpipe.compile(Two(), topology, parallelize=change, example_args=(torch.ones(2, 4),))


# --- killed


def counted(calls: Iterator[int], last: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, before which the process is killed where it is that number."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return run


def save_and_die(run: Trained, folder: Path, block: bool, last: int) -> None:
    """Is killed in front of the call number ``last`` of those that change what is on the disk."""
    calls = iter(range(10**6))
    for name in ("fsync", "unlink", "rmdir"):
        setattr(os, name, counted(calls, last, getattr(os, name)))
    for name in ("mkdir", "rename", "replace", "symlink_to"):
        setattr(Path, name, counted(calls, last, getattr(Path, name)))
    options = {"scheduler": run.scheduler, "block": block, "best": True}
    fxpipe.save(folder, run.model, run.optimizer, step=2, keep=1, **options).result()
    os._exit(0)


def killed_everywhere(folder: Path, block: bool) -> None:
    """For each such call a folder with step 1, and a process that is killed in front of it while it saves step 2."""
    torch.set_num_threads(1)
    run, last, status = Trained(), 0, 1
    while status:
        run.save(folder / f"{last:02}", 1, keep=1, best=True)
        child = os.fork()
        if not child:
            save_and_die(run, folder / f"{last:02}", block, last)
        _, status = os.waitpid(child, 0)
        last += 1
    os._exit(0)


@pytest.mark.parametrize("block", every(2, [False, True]))  # the same calls, on the writer's own thread or not
def test_killed_at_any_moment_there_are_a_latest_and_a_best_that_load(tmp_path: Path, block: bool) -> None:
    assert ended(killed_everywhere, tmp_path, block) == 0
    run, steps = Trained(1), []
    for folder in sorted(tmp_path.iterdir()):
        steps.append(run.load(folder)["step"])
        assert steps[-1] == 2 or run.load(folder / "latest")["step"] == 1
        assert run.load(folder / "best")["step"] == steps[-1]
        run.save(folder, 3, keep=1)  # and the run goes on in it
        assert names(folder) == ["best", "latest", "lock", f"step-00000{steps[-1]}", "step-000003"]
        assert os.readlink(folder / "best") == f"step-00000{steps[-1]}"
    assert len(steps) > 12
    assert set(steps) == {1, 2}
    assert steps == sorted(steps)
