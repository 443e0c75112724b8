"""``python -m fxpipe doctor``: its figures are those of the cluster, and a part that fails stops no other."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fxpipe
from fxpipe import Hardware, Topology
from fxpipe.__main__ import main
from fxpipe.compiler import compile
from fxpipe.doctor import verdict
from fxpipe.hardware import sheet_of
from fxpipe.progress import progress
from fxpipe.run.forward_backward import ForwardBackward
from tests import simulated_gpu
from tests.device import DEVICE
from tests.gpus import Gpus
from tests.pool import Pool

US, MS = 1e-6, 1e-3
SMALL = {
    "fxpipe.hardware.ON_A_CPU": (32, 2**10),
    "fxpipe.hardware.ON_A_GPU": (32, 2**10),
    "fxpipe.doctor.ON_A_CPU": (2**12, 16, 4),
    "fxpipe.doctor.ON_A_GPU": (2**12, 16, 4),
}
"""What is measured, small enough for a test."""
LINK = {"p2p_latency": 20 * US, "p2p_bytes": 1e9, "ring_latency": 30 * US, "ring_bytes": 2e9}

Found = tuple[int, str, dict[str, Any]]
"""Of a rank: the exit code, what it printed, and the file."""


def doctor_with(broken: str, path: Path, *arguments: str) -> Found:
    """``broken``: a function that raises on rank 1."""
    with contextlib.ExitStack() as patched:
        for name, size in SMALL.items():
            patched.enter_context(mock.patch(name, size))
        if broken and os.environ["RANK"] == "1":
            patched.enter_context(mock.patch(broken, side_effect=ValueError("a loose cable")))
        printed = patched.enter_context(contextlib.redirect_stdout(io.StringIO()))
        code = main(["doctor", *arguments, "--json", str(path)])
        found = json.loads(path.read_text()) if os.environ.get("RANK", "0") == "0" else {}  # which writes it
        return code, printed.getvalue(), found


def doctor(path: Path, *arguments: str) -> Found:
    return doctor_with("", path, *arguments)


def in_virtual_time(path: Path, *arguments: str) -> Found:
    """Kernels take no time but for products, which take 1 ms each. Ranks compare their hosts' clocks, too."""
    simulated_gpu.costs(**{**simulated_gpu.STRUCTURE, **LINK})
    simulated_gpu.fix({"aten::addmm": MS, "aten::mm": MS})
    clock = SimpleNamespace(perf_counter=simulated_gpu.host_now)
    with (
        mock.patch("fxpipe.distributed.stopwatch.time", clock),
        mock.patch("fxpipe.run.timeline_recorder.time", clock),
    ):
        return doctor(path, *arguments)


def figures(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """By rank."""
    assert not any(found["parts"][part]["errors"]), found["parts"][part]
    return list(found["parts"][part]["ranks"])


def check_hardware(printed: str, path: Path) -> Hardware:
    """The printed line is that of the file, and ``preview`` counts with it."""
    line = printed.splitlines()[-1]
    hardware = eval(line, {"Hardware": Hardware})
    assert isinstance(hardware, Hardware)
    assert hardware == Hardware.read(path)
    found = json.loads(path.read_text())
    found["hardware"]["device"] = "another"
    path.with_stem("other").write_text(json.dumps(found))
    with pytest.raises(fxpipe.RunError, match="was measured on 'another'"):
        Hardware.measured(path.with_stem("other"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    preview = fxpipe.preview(
        model,
        Topology([("pipe", 2)]),
        loss_fn=torch.nn.functional.mse_loss,
        boundaries="auto",
        example_args=(torch.randn(8, 4),),
        example_kwargs={"target": torch.randn(8, 4)},
        hardware=hardware,
    )
    assert len(preview.schedule.rows) == 2
    return hardware


def test_two_ranks(pool: Pool, tmp_path: Path) -> None:
    (code, printed, found), other = pool.run(doctor, tmp_path / "doctor.json", ranks=2)
    assert (code, other[:2]) == (0, (0, ""))
    assert list(found["parts"]) == ["versions", "nodes", "device", "links", "plain", "pipeline", "overlap"]
    assert [each["torch"] for each in figures(found, "versions")] == [torch.__version__] * 2
    assert [each["ranks in a node"] for each in figures(found, "nodes")] == [2, 2]
    assert [each["beside plain PyTorch"] for each in figures(found, "pipeline")] == ["equal bits"] * 2
    latency, bandwidth = "message inside nodes: latency [µs]", "message inside nodes: bandwidth [GB/s]"
    first, last = figures(found, "links")
    assert (latency in first, latency in last) == (True, False)  # one pair, and its first rank reports
    # "pipe" and "data", of a GPU's host, too, and a pair in both directions
    assert first["process groups"] == (4 if DEVICE == "cuda" else 2) + 2
    hardware = check_hardware(printed, tmp_path / "doctor.json")
    assert hardware.latency == pytest.approx(first[latency] * US, rel=1e-3)
    assert hardware.link == pytest.approx(first[bandwidth] * 1e9, rel=1e-3)
    assert hardware.link_between is None
    timed = figures(found, "overlap")[0]
    assert timed["longer [%]"] == pytest.approx((timed["makespan [ms]"] / timed["planned at these [ms]"] - 1) * 100)


def test_nodes_and_replicas(pool: Pool, tmp_path: Path) -> None:
    """Two nodes of two ranks each: a pipeline crosses, replicas do not, and sums of them are equal to rounding."""
    arguments = "--pipe", "2", "--ranks-per-node", "2"
    code, printed, found = pool.run(doctor, tmp_path / "doctor.json", *arguments, ranks=4)[0]
    assert (code, found["topology"]) == (0, "Topology([('pipe', 2), ('data', 2)], ranks_per_node=2)")
    kinds = [{name.partition(":")[0] for name in each if ":" in name} for each in figures(found, "links")]
    reductions = {"all_reduce inside nodes", "reduce_scatter inside nodes"}
    assert kinds == [{"message between nodes", *reductions}] * 2 + [reductions] * 2
    for each in figures(found, "pipeline"):
        assert re.match(r"equal bits|at most \d\.\de-0[678] of the largest", each["beside plain PyTorch"])
    hardware = check_hardware(printed, tmp_path / "doctor.json")
    assert hardware.link
    assert hardware.link_between


@pytest.mark.parametrize(
    ("part", "function"),
    [
        ("nodes", "fxpipe.doctor.platform.machine"),
        ("device", "fxpipe.doctor.measure"),
        ("links", "fxpipe.distributed.link_speed._seconds"),
        ("plain", "fxpipe.doctor.torch.autograd.backward"),
        ("overlap", "fxpipe.doctor.compare"),
    ],
)
def test_a_part_that_fails_on_a_rank_names_itself_and_stops_no_other(
    part: str, function: str, pool: Pool, tmp_path: Path
) -> None:
    code, printed, found = pool.run(doctor_with, function, tmp_path / "doctor.json", ranks=2)[0]
    assert code == 1
    errors = {name: one["errors"] for name, one in found["parts"].items() if any(one["errors"])}
    assert errors[part][1].startswith("ValueError: a loose cable")
    # Without plain PyTorch's gradients there is nothing to compare with, and without a pipeline nothing to time.
    assert set(errors) == {part, *["pipeline", "overlap"] * (part == "plain")}
    assert re.search(r"FAILED .*ValueError: a loose cable, ranks \[1\]", printed, re.DOTALL)


def test_one_process_has_no_links_and_a_part_that_takes_long_shows_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, enter = list[str](), progress.__enter__
    monkeypatch.setattr(progress, "__enter__", lambda self: (shown.append(str(self)), enter(self))[1])
    path = tmp_path / "doctor.json"
    code, printed, found = doctor(path)
    assert code == 0
    assert list(found["parts"]) == ["versions", "nodes", "device", "plain", "pipeline", "overlap"]
    assert [what for what in shown if what.startswith("checking ")] == [f"checking {part}" for part in found["parts"]]
    assert figures(found, "pipeline")[0]["beside plain PyTorch"] == "equal bits"
    assert "links need several processes" in printed
    assert Hardware.read(path).link is None


def test_other_bits_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pipeline's parameters are others than plain PyTorch's."""

    def other(model: torch.nn.Module, *rest: Any, **options: Any) -> Any:
        for parameter in model.parameters():
            parameter.data *= 2
        return compile(model, *rest, **options)

    with mock.patch("fxpipe.doctor.compile", other):
        code, printed, found = doctor(tmp_path / "doctor.json")
    assert code == 1
    assert found["parts"]["pipeline"]["errors"] == ["RunError: loss or gradients are not those of plain PyTorch"]
    assert found["parts"]["overlap"]["errors"] == [""]
    assert re.search(r"beside plain PyTorch +at most \d.* apart +wrong\n", printed)
    assert capsys.readouterr().err.endswith("fxpipe: failed: pipeline\n")


def test_on_gpus_the_figures_are_those_of_the_device(gpus: Gpus, tmp_path: Path) -> None:
    """A message of n bytes takes a latency and n over the bandwidth; so does a ring, with n(k − 1)/k a round."""
    path = tmp_path / "doctor.json"
    arguments = "--pipe", "2", "--ranks-per-node", "2"
    code, printed, found = gpus.run(in_virtual_time, path, *arguments, ranks=4)[0]
    assert code == 0
    links, least = figures(found, "links")[0], 2 * 4  # bytes: a number for each replica
    near = partial(pytest.approx, rel=1e-5)
    assert links["message between nodes: bandwidth [GB/s]"] == near(1.0)
    assert links["message between nodes: latency [µs]"] == near(20 + least / 1e9 * 1e6)
    assert links["all_reduce inside nodes: bandwidth [GB/s]"] == near(2.0)
    assert links["all_reduce inside nodes: latency [µs]"] == near(30 + least / 2e9 * 1e6)
    assert links["reduce_scatter inside nodes: bandwidth [GB/s]"] == near(2.0)
    assert links["reduce_scatter inside nodes: latency [µs]"] == near(30 + least / 2 / 2e9 * 1e6)
    hardware = check_hardware(printed, path)
    assert (hardware.link, hardware.link_between) == (2e9, 1e9)


def test_on_gpus_a_step_takes_what_its_plan_says(gpus: Gpus, tmp_path: Path) -> None:
    """A forward has one product, and a backward two."""
    code, _, found = gpus.run(in_virtual_time, tmp_path / "doctor.json", ranks=2)[0]
    assert code == 0
    assert [each["beside plain PyTorch"] for each in figures(found, "pipeline")] == ["equal bits"] * 2
    for each in figures(found, "overlap"):
        assert each["forward, median stage [ms]"] == pytest.approx(1.0, rel=1e-5)
        assert each["longer [%]"] == pytest.approx(0.0, abs=1e-3)


def with_a_wait(path: Path) -> Found:
    call = ForwardBackward.__call__

    def waiting(step: ForwardBackward, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = call(step, *args, **kwargs)
        loss.item()
        return loss

    with mock.patch.object(ForwardBackward, "__call__", waiting):
        return doctor(path)


def test_on_gpus_a_wait_of_the_host_is_found(gpus: Gpus, tmp_path: Path) -> None:
    found = gpus.run(with_a_wait, tmp_path / "doctor.json", ranks=2)[0][2]
    assert all("test_doctor.py:" in each["host waits"] for each in figures(found, "overlap"))


@pytest.mark.parametrize(
    ("part", "what", "values", "expected"),
    [
        ("versions", "torch", ["2.13", "2.13"], "good"),
        ("versions", "torch", ["2.13", "2.14"], "wrong: the ranks differ"),
        ("nodes", "host", ["a", "b"], ""),
        ("device", "flops_16 [TFLOP/s]", [10.0, 10.0, 10.0, 6.0], "slow: rank 3 takes 1.7 × the median"),
        ("device", "launch [µs]", [4.0, 4.1, 4.2], "good"),
        ("device", "launch [µs]", [4.0], ""),
        ("device", "memory [GB]", [80.0, 40.0], ""),
        ("device", "flops_16, of the data sheet of l4 [%]", [60, 49], "slow: rank 1 is below half of the data sheet"),
        ("links", "message: bandwidth [GB/s]", [9, 1, 9, 3], "slow: ranks [1, 3] take up to 9.0 × the median"),
        ("pipeline", "beside plain PyTorch", ["equal bits"], "good"),
        ("overlap", "longer [%]", [1107.0, 1107.0], "slow: 12.1 × the plan"),
        ("overlap", "longer [%]", [12.0], "good"),
        ("overlap", "exposed: gradients [ms]", [1.0, 50.0], ""),
        ("overlap", "host waits", ["train.py:3", "train.py:3"], "slow: the host waits for the device"),
        ("overlap", "host waits", ["none, as far as the device tells"], ""),
    ],
)  # fmt: skip
def test_a_verdict_compares_with_other_ranks_a_data_sheet_or_a_plan(
    part: str, what: str, values: list[Any], expected: str
) -> None:
    """A rank is slow from 1.5 times the time of the median on; of two ranks, the faster is the median."""
    assert verdict(part, what, dict(enumerate(values))) == expected


@pytest.mark.parametrize(
    ("device", "sheet"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a10040gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H100 PCIe", None),  # the sheet is of SXM
        ("NVIDIA GH200 480GB", None),
        ("x86_64 with 2 threads", None),
    ],
)
def test_a_devices_name_leads_to_its_data_sheet(device: str, sheet: str | None) -> None:
    assert sheet_of(device) == sheet


def test_a_slow_step_on_a_cpu_is_explained(pool: Pool, tmp_path: Path) -> None:
    """With more processes than cores, where any step counts as slow."""
    code, printed, found = pool.run(crowded, tmp_path / "doctor.json", ranks=2)[0]
    assert code == 0
    longer = figures(found, "overlap")[0]["longer [%]"]
    words = "2 processes take turns on 1 core, and in the plan they compute at once"
    assert (
        figures(found, "overlap")[0]["why"] == f"{words}: {1 + longer / 100:.1f} × the plan says nothing of a cluster"
    )
    assert re.search(r"torch +2\.\S+ +good\n", printed)
    assert found["parts"]["pipeline"]["verdicts"] == {"beside plain PyTorch": "good"}


def crowded(path: Path) -> Found:
    with mock.patch("fxpipe.doctor.cores", return_value=1), mock.patch("fxpipe.doctor.SLOW", -1.0):
        return doctor(path)
