"""transformers' Trainer over a pipeline logs, predicts, stops and writes what a plain one in one process does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxpipe
from tests.gpus import Gpus
from tests.loops.trainers import Batchwise, Scenario, Trained, accuracy, given, masked, padded, piped, plainly
from tests.pool import Pool
from tests.whole.test_readme import ROOT, blocks

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 2}
ACCUMULATED = Scenario(
    {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "include_num_input_tokens_seen": "non_padding",
        **EVALUATED,
    },
    metrics=accuracy,
    chosen=True,
    collate=padded,
)
BEST = Scenario(  # the loss falls: what is best is the first, and two that are worse end it
    {
        "label_smoothing_factor": 0.1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        **EVALUATED,
        **SAVED,
    },
    early=2,
    model="frozen",
)
SMALL_STEP = Scenario({"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}, rows=7 * 16 + 1, metrics=accuracy)
"""The last step of an epoch has a batch of 16 rows and a batch of 1, fewer than replicas."""
SMOOTHED = Scenario(
    {"label_smoothing_factor": 0.1, "max_steps": 4, "batch_eval_metrics": True, **EVALUATED}, metrics=Batchwise()
)
UNCOUNTED = Scenario({"max_steps": 4, **EVALUATED}, model="bert")
SHORT = Scenario({"max_steps": 2, **EVALUATED}, rows=64, held_out=8, predicts=False)
SCENARIOS = {
    "short": SHORT,
    "accumulated": ACCUMULATED,
    "best": BEST,
    "small step": SMALL_STEP,
    "smoothed": SMOOTHED,
    "uncounted": UNCOUNTED,
}


def check_same(got: Trained, wanted: Trained, tolerance: float = 2e-5) -> None:
    """Everything but times, and operations where rows are drawn twice."""
    untimed = [
        [{k: v for k, v in entry.items() if not any(each in k for each in ("time", "second", "flos"))} for entry in log]
        for log in (got.history, wanted.history)
    ]
    assert len(wanted.history) > 3
    assert untimed[0] == [pytest.approx(entry, rel=tolerance, abs=tolerance) for entry in untimed[1]]
    assert got.predictions == pytest.approx(wanted.predictions, rel=tolerance, abs=10 * tolerance)
    assert [got.best[0] or 0.0] == pytest.approx([wanted.best[0] or 0.0], rel=tolerance)
    assert (got.best[1], got.tokens) == (wanted.best[1], wanted.tokens)
    torch.testing.assert_close(got.parameters, wanted.parameters, rtol=tolerance, atol=10 * tolerance)


def on(pool: Pool | None, ranks: int, scenario: Scenario, folder: Path, **pipeline: Any) -> Trained:
    scenario = dataclasses.replace(scenario, folder=str(folder))
    if ranks == 1 or pool is None:
        return piped(scenario, **pipeline)
    first, *others = pool.run(_piped, scenario, pipeline, ranks=ranks)
    for other in others:  # losses, metrics and decisions are the same on all ranks
        assert (other.best, len(other.history)) == (first.best, len(first.history))
    return first


def _piped(scenario: Scenario, pipeline: dict[str, Any]) -> Trained:
    return piped(scenario, **pipeline)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("short", 2), ("best", 2), ("accumulated", 4), ("small step", 4), ("best", 4), ("smoothed", 1), ("uncounted", 2)],
)
def test_it_trains_as_the_trainer_does(name: str, ranks: int, pool: Pool, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    got = on(pool, ranks, scenario, tmp_path / "piped")
    check_same(got, plainly(dataclasses.replace(scenario, folder=str(tmp_path / "plain"))))
    if name == "best":
        assert got.best[1] == "checkpoint-2"
        assert got.history[-1]["step"] == 6  # of 14


def test_a_resumed_run_has_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    """In the middle of an epoch, with words that are replaced at random and two batches a step."""
    scenario = Scenario({"gradient_accumulation_steps": 2, **EVALUATED, **SAVED}, collate=masked)
    whole = on(pool, 4, scenario, tmp_path)
    for resume in (str(tmp_path / "checkpoint-2"), True):
        resumed = on(pool, 4, dataclasses.replace(scenario, resume=resume), tmp_path)
        check_same(
            dataclasses.replace(resumed, history=resumed.history[:-1] * 2),
            dataclasses.replace(whole, history=whole.history[:-1] * 2),
            0,
        )


def test_it_goes_on_with_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    """From the middle of an epoch into the next one."""
    scenario = dataclasses.replace(ACCUMULATED, options=ACCUMULATED.options | SAVED | {"max_steps": 5})
    whole = on(pool, 4, scenario, tmp_path)
    resumed = on(None, 1, dataclasses.replace(scenario, resume=str(tmp_path / "checkpoint-2")), tmp_path)
    last = len(whole.history) - 1  # its mean loss is that of the steps made here
    check_same(*(dataclasses.replace(each, history=each.history[:last]) for each in (resumed, whole)))


def test_random_words_are_the_same_on_all_ranks_of_a_replica_and_in_workers(pool: Pool, tmp_path: Path) -> None:
    scenario = Scenario({"max_steps": 4, **EVALUATED}, collate=masked)
    in_workers = dataclasses.replace(scenario, options=scenario.options | {"dataloader_num_workers": 2})
    check_same(on(pool, 2, scenario, tmp_path / "two"), on(None, 1, in_workers, tmp_path / "one"))


def test_bf16_is_the_precision_of_the_pipeline(pool: Pool, tmp_path: Path) -> None:
    scenario = Scenario({"bf16": True, "max_steps": 6, **EVALUATED})
    got = on(pool, 2, scenario, tmp_path / "piped")
    assert {parameter.dtype for parameter in got.parameters.values()} == {torch.bfloat16}
    wanted = plainly(dataclasses.replace(scenario, folder=str(tmp_path / "plain")))
    losses = [
        [entry.get("loss", entry.get("eval_loss", 0.0)) for entry in log] for log in (got.history, wanted.history)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_on_gpus(gpus: Gpus, tmp_path: Path) -> None:
    scenario = dataclasses.replace(SMOOTHED, options=SMOOTHED.options | SAVED)
    got = on(gpus, 2, scenario, tmp_path / "piped")
    check_same(got, plainly(dataclasses.replace(scenario, folder=str(tmp_path / "plain"))))


def test_the_page_shows_lines_of_the_script() -> None:
    (shown,) = blocks(ROOT / "examples" / "loops_transformers.md", "diff")
    script = [line.strip() for line in (ROOT / "examples" / "hf_trainer.py").read_text().splitlines()]
    added = [line[1:].strip() for line in shown.splitlines() if line[:1] in ("+", " ")]
    assert [line for line in added if line not in script] == []


# --- what is refused


def test_what_a_pipeline_cannot_do_is_listed_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import IterableDataset

    from fxpipe.loops.transformers import OVERRIDDEN, REFUSED, PipelineTrainer

    class Endless(IterableDataset[Any]):
        __iter__ = None  # type: ignore[assignment]

    monkeypatch.setattr(fxpipe, "compile", lambda *_, **__: pytest.fail("it is compiled"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    others = given(Scenario({"label_smoothing_factor": 0.1, "save_only_model": True}, folder=str(tmp_path)), 1)
    args = others["args"]
    names = " ".join(REFUSED).split()
    settings = {"optim": SimpleNamespace(value="galore_adamw"), "train_sampling_strategy": "group_by_length"}
    settings |= {"mixed_precision": "fp8", "load_best_model_at_end": True}
    for name, value in (dict.fromkeys(names, True) | settings).items():
        setattr(args, name, value)
    args.accelerator_config.split_batches = True
    own = dict.fromkeys(OVERRIDDEN, lambda *_: None)
    others |= {"train_dataset": Endless(), "model_init": len, "optimizers": (object(), None), "compute_loss_func": len}
    with pytest.raises(fxpipe.RunError) as error:
        type("Mine", (PipelineTrainer,), own)(
            topo=fxpipe.Topology([("pipe", 2), ("context", 2)]), pipeline={"loss_fn": len}, **others
        )
    lines = str(error.value).splitlines()
    assert lines[0] == f"PipelineTrainer cannot do {len(lines) - 1} of what it is given:"
    listed = {line.split()[0].strip(":,").partition("=")[0] for line in lines[1:]}
    wanted = {*names, *settings, "split_batches", "model_init", "optimizers", "compute_loss_func"}
    assert listed == wanted | {"FSDP", "label_smoothing_factor", "compute_loss", "a"}
    assert "  a dataset without __len__: replicas could not divide its rows" in lines


def test_a_plain_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    from fxpipe.loops.transformers import PipelineTrainer

    with pytest.raises(fxpipe.RunError, match=r"has no folder pipeline, .* from_pretrained"):
        PipelineTrainer._load_from_checkpoint(None, str(tmp_path))
