"""An unchanged LightningModule trains under PipelineStrategy as under a plain Trainer in one process."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from torchmetrics import Accuracy  # noqa: E402

import fxpipe  # noqa: E402
from fxpipe.loops.lightning import PipelineStrategy  # noqa: E402
from tests.gpus import Gpus  # noqa: E402
from tests.pool import Pool, RankFailed  # noqa: E402

ROWS, WIDTH, CLASSES = 16, 8, 4
schedulers = torch.optim.lr_scheduler


class Classifier(LightningModule):
    """What a user of Lightning writes; it knows nothing of fxpipe."""

    def __init__(self, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.below, self.above = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.below(x).relu()) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        self.log("hits", (output.argmax(-1) == y).sum())
        return {"loss": loss, "right": (output.argmax(-1) == y).float().mean()}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self.above(self.below(x).relu()) * self.scale
        self.log_dict({"val_loss": F.cross_entropy(output, y)}, sync_dist=True)
        return output

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.accuracy(outputs, batch[1])
        self.log("val_accuracy", self.accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y) * 2)

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.scale], "weight_decay": 0.0}, {"params": [*self.below.parameters()], "lr": 0.02}]
        optimizer = torch.optim.AdamW([*groups, {"params": self.above.parameters()}], lr=self.hparams["rate"])
        warm = schedulers.LinearLR(optimizer, 0.1, total_iters=3)
        steps = schedulers.SequentialLR(optimizer, [warm, schedulers.StepLR(optimizer, 2)], [3])
        return [optimizer], [{"scheduler": steps, "interval": "step"}]


class ByPlateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.named_parameters(), lr=0.1, momentum=0.9, nesterov=True)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self.log("seen", float(batch_idx))
        optimizer.step(closure=optimizer_closure)


class Numbers(Callback):
    """The numbers of a run, in their order: of each step, each rate, and what was logged at each validation."""

    def __init__(self) -> None:
        self.of: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        hits = trainer.callback_metrics.get("hits", 0.0)
        self.of += [float(outputs["loss"]), float(outputs["right"]), float(hits), *rates]

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.of += [float(trainer.callback_metrics[name]) for name in ("val_loss", "val_accuracy")]

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.of.append(float(trainer.callback_metrics["loss_epoch"]))


@dataclass(frozen=True)
class Case:
    module: type[Classifier] = Classifier
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    rtol: float = 1e-5


CASES = {
    "as it comes": Case(),
    "accumulated": Case(
        trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "max_epochs": 3}, pipeline={"zero": 1}
    ),
    "by plateau": Case(ByPlateau, callbacks=lambda: [GradientAccumulationScheduler({0: 2, 1: 1})]),
    "bf16": Case(
        trainer={"precision": "bf16-mixed", "limit_train_batches": 3, "val_check_interval": 2, "max_epochs": 6},
        callbacks=lambda: [EarlyStopping("val_loss", min_delta=0.5)],
        rtol=2e-2,
    ),
}


def rows(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(-1))


def trained(case: Case, ranks: int | None, folder: Path | None = None, **others: Any) -> tuple[Trainer, list[float]]:
    """A Trainer that has fitted the case, on so many processes, or plain; and its numbers.

    ``others``: of the Trainer, and ``resumes`` from the last checkpoint.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    replicas = max(1, (ranks or 0) // 2)
    batch = [torch.zeros(ROWS // replicas, WIDTH), torch.zeros(ROWS // replicas, dtype=torch.int64)]
    pipeline = {"boundaries": ["above"], "microbatches": 4, **case.pipeline}
    topo = fxpipe.Topology([("data", replicas), ("pipe", 2)])
    numbers, saving = Numbers(), ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
    }
    resumes = "last" if others.pop("resumes", False) else None
    trainer = Trainer(
        devices=ranks or 1,
        strategy=PipelineStrategy(topo, example_args=(batch,), **pipeline) if ranks else "auto",
        callbacks=[numbers, *case.callbacks(), *([saving] if folder else [])],
        enable_checkpointing=folder is not None,
        **{**quiet, **case.trainer, **others},
    )
    training, held_out = rows(4 * ROWS, 1), rows(2 * ROWS, 2)
    # Lightning deals rows over replicas by this sampler, and does so for one replica, too.
    sampler = None if ranks else DistributedSampler(training, 1, 0)
    loaders = DataLoader(training, ROWS // replicas, sampler=sampler), DataLoader(held_out, ROWS // replicas)
    trainer.fit(case.module(), *loaders, ckpt_path=resumes)
    return trainer, numbers.of


@functools.cache
def plainly(name: str) -> list[float]:
    return trained(CASES[name], None)[1]


def numbers_of(name: str, ranks: int) -> list[float]:
    return trained(CASES[name], ranks)[1]


def check(name: str, numbers: list[float]) -> None:
    assert len(numbers) > 20
    torch.testing.assert_close(numbers, plainly(name), rtol=CASES[name].rtol, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_one_process_trains_as_a_plain_trainer(name: str) -> None:
    check(name, numbers_of(name, 1))


def test_two_ranks_train_as_a_plain_trainer(pool: Pool) -> None:
    first, second = pool.run(numbers_of, "as it comes", 2, ranks=2)
    assert first == second
    check("as it comes", first)


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_train_as_a_plain_trainer(pool: Pool, name: str) -> None:
    for numbers in pool.run(numbers_of, name, 4, ranks=4):
        check(name, numbers)


def test_two_gpus_train_as_a_plain_trainer(gpus: Gpus) -> None:
    for numbers in gpus.run(_numbers_on_gpus, ranks=2):
        torch.testing.assert_close(numbers, plainly("as it comes"), rtol=1e-4, atol=1e-6)


def _numbers_on_gpus() -> list[float]:
    return trained(CASES["as it comes"], 2, accelerator="cuda")[1]


# --- checkpoints, tests and predictions


def resumed(folder: Path) -> tuple[list[float], list[float], dict[str, float], list[Any]]:
    case, whole = Case(), {"max_epochs": 3, "num_sanity_val_steps": 0}
    _, undisturbed = trained(case, 4, folder / "whole", **whole)
    _, first = trained(case, 4, folder / "parts", max_epochs=2, num_sanity_val_steps=0)
    trainer, second = trained(case, 4, folder / "parts", resumes=True, **whole)
    loader = DataLoader(rows(2 * ROWS, 3), ROWS // 2)
    (tested,) = trainer.test(dataloaders=loader, ckpt_path="best", verbose=False)
    return undisturbed, first + second, tested, trainer.predict(dataloaders=loader, ckpt_path="best")


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.run(resumed, tmp_path, ranks=4)
    for undisturbed, in_parts, _, _ in outcomes:
        assert in_parts == undisturbed
    best = tmp_path / "parts" / "epoch=2-step=12.ckpt"
    beside = [f"{path.name}.pipeline" for path in (best, best.with_name("last.ckpt"))]
    assert sorted(path.name for path in best.parent.iterdir()) == sorted([best.name, "last.ckpt", *beside])

    plain = Classifier.load_from_checkpoint(best).eval()  # the file is Lightning's own
    x, y = rows(2 * ROWS, 3).tensors
    with torch.no_grad():
        wanted = plain(x)
    for rank, (_, _, tested, predicted) in enumerate(outcomes):
        torch.testing.assert_close(tested["test_loss"], 2 * F.cross_entropy(wanted, y).item())
        torch.testing.assert_close(torch.cat(predicted), wanted.softmax(-1)[rank // 2 :: 2])

    shutil.copytree(best.parent, tmp_path / "alone")  # the workers still have the others
    _, alone = trained(Case(), 1, tmp_path / "alone", resumes=True, max_epochs=4)  # on other ranks
    _, goes_on = trained(Case(), None, max_epochs=4)
    torch.testing.assert_close(alone[-5:], goes_on[-5:], rtol=1e-4, atol=1e-6)


def test_a_plain_checkpoint_is_not_resumed_without_its_optimizer(tmp_path: Path) -> None:
    trained(Case(), None, tmp_path, max_epochs=1)
    with pytest.raises(fxpipe.CheckpointError, match=r"last\.ckpt has no .*last\.ckpt\.pipeline/step-000004 beside it"):
        trained(Case(), 1, tmp_path, resumes=True)


# --- what a pipeline does not have


class Adversarial(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.below, self.above)]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_one_message_lists_what_cannot_be_had() -> None:
    case = Case(Adversarial, callbacks=lambda: [EMAWeightAveraging()])
    clipping = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    with pytest.raises(fxpipe.RunError) as caught:
        trained(case, 1, precision="16-true", sync_batchnorm=True, **clipping)
    message = str(caught.value)
    for part in ("precision='16-true'", "sync_batchnorm", '"value"', "backward()", "EMAWeightAveraging", "optimizers"):
        assert part in message


class Scaled(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, scale: float = 1.0) -> None:
        super().__init__(params, lr * scale)


def test_an_optimizer_that_cannot_be_made_again_is_refused() -> None:
    made = {"configure_optimizers": lambda self: Scaled(self.parameters(), 0.1, scale=2.0)}
    with pytest.raises(fxpipe.RunError, match="Scaled: its defaults lack scale"):
        trained(Case(type("Changed", (Classifier,), made)), 1)


def _step(body: Callable[[Any, Tensor, int], Any]) -> type[Classifier]:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        returned = body(self, loss, batch_idx)
        return loss if returned is None else returned

    return type("Changed", (Classifier,), {"training_step": training_step})


REFUSED = {
    "batch_idx is read": lambda self, loss, index: loss * (index % 2),
    "self.trainer .* is read": lambda self, loss, index: loss * self.current_epoch,
    r"self.log\('a'\) is given a number": lambda self, loss, index: self.log("a", loss.item()),
    "self.log.* is given a number": lambda self, loss, index: self.log("a", 1.0),
    "the metric accuracy is used": lambda self, loss, index: self.accuracy(loss, loss),
    "training_step returns rows, which is no scalar": lambda self, loss, index: {"loss": loss, "rows": loss.expand(4)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_step_that_a_capture_would_get_wrong_is_refused(message: str) -> None:
    with pytest.raises(fxpipe.FxpipeError, match=message):
        trained(Case(_step(REFUSED[message])), 1)


def test_a_wrong_number_of_processes_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"2 processes: the topology has 4 ranks; write devices=4"):
        pool.run(_too_few, ranks=2)


def _too_few() -> None:
    batch = [torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.int64)]
    strategy = PipelineStrategy(fxpipe.Topology([("pipe", 4)]), example_args=(batch,))
    Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False).fit(Classifier(), DataLoader(rows(8, 1), 4))
