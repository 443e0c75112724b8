"""Hardware: seconds from figures, data sheets by name, and figures measured once and kept."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe import Hardware, RunError
from fxpipe.hardware import REFERENCE


def test_seconds_are_those_of_the_roofline_at_what_is_reached_of_the_peak() -> None:
    hardware = Hardware(flops=100.0, flops_16=200.0, bandwidth=10.0, reached=0.5, launch=0.25)
    assert hardware.seconds(100, 1, 4) == 2.0
    assert hardware.seconds(100, 1, 2) == 1.0
    assert hardware.seconds(100, 50, 2) == 10.0
    assert hardware.seconds(0, 0, 4) == 0.25


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    hardware = Hardware(link=10.0, link_between=2.0, latency=0.5)
    assert hardware.hop(20) == 2.5
    assert (hardware.wire(crosses=False), hardware.wire(crosses=True)) == (10.0, 2.0)


@pytest.mark.parametrize("name", ["H100", "RTX 4090"])
def test_a_gpu_has_a_name_however_it_is_written(name: str) -> None:
    assert Hardware.named(name).memory


def test_what_stands_in_the_data_sheet_of_an_h100() -> None:
    """989 TFLOP/s in bfloat16 without sparsity, 3.35 TB/s, NVLink 900 GB/s both ways together; 400 Gbit/s a GPU."""
    found = Hardware.named("h100")
    assert (found.peak(2), found.bandwidth, found.link, found.link_between) == (989e12, 3.35e12, 450e9, 50e9)
    assert found.memory == 80e9


def test_figures_that_are_given_replace_those_of_the_data_sheet() -> None:
    sheet, found = Hardware.named("h100"), Hardware.named("h100", memory=60e9, reached=0.4)
    assert found == dataclasses.replace(sheet, memory=60e9, reached=0.4)
    assert Hardware.named("h100", memory=None).memory is None
    assert (Hardware.named("H100", memory=60e9).source, found.source) == ("h100", "the hardware given")


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, "an A100 (no hardware= given)"),
        ({"memory": 80e9}, "an A100 (hardware= has no speeds)"),
        ({"flops": 1e12, "link": 1e9}, "the hardware given (flops_16, bandwidth of an A100)"),
        ({**vars(REFERENCE), "flops": 1e12}, "the hardware given"),
    ],
)
def test_speeds_that_are_not_given_are_those_of_the_reference(given: dict[str, Any], source: str) -> None:
    hardware = Hardware(**given)
    beside_link = {"link_between": None} if list(given) == ["flops", "link"] else {}  # no network faster than the link
    wanted = {**vars(REFERENCE), **given, **beside_link}
    assert vars(hardware.completed) == wanted
    assert hardware.source == source
    assert hardware.has_speeds == ("flops" in given)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Hardware.named("h100", memry=6e10), "has 'memry', which is no figure; did you mean \"memory\"?"),
        (lambda: Hardware(memory=0), "Hardware(memory=0) is no number above 0, bytes"),
        (lambda: Hardware.named("h1000"), "hardware is 'h1000'; write one of v100, a100,"),
        (lambda: Hardware(flops="fast"), "Hardware(flops='fast') is no number above 0, operations a second"),  # type: ignore[arg-type]
        (lambda: Hardware(bandwidth=float("nan")), "Hardware(bandwidth=nan)"),
        (lambda: Hardware(reached=50), "Hardware(reached=50) is a part of the peak, at most 1; write 0.5 for a half"),
        (lambda: Hardware.measured("never", lnk=1.0), "has 'lnk', which is no figure; did you mean \"link\"?"),
        (lambda: Hardware(flops=1.0).seconds(1, 1, 2), "has no flops_16, operations a second, which a product in a"),
        (
            lambda: Hardware.named("l40s").completed.wire(crosses=True),
            "no link_between, bytes a second, which a message between",
        ),
    ],
)
def test_what_is_wrong_or_missing_is_told(make: Any, told: str) -> None:
    with pytest.raises(RunError, match=re.escape(told)):
        make()


def test_what_was_measured_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, measured = tmp_path / "here.json", []
    figures = {"flops": 1e12, "flops_16": 2e12, "bandwidth": 1e11, "launch": 1e-6}
    monkeypatch.setattr("fxpipe.hardware.measure", lambda: measured.append(1) or figures)
    for _ in range(2):
        assert Hardware.measured(file, link=1e9) == Hardware(**figures, link=1e9)
    assert len(measured) == 1
    found = json.loads(file.read_text())
    assert found.pop("device")
    assert found == figures
    file.write_text(json.dumps({"device": "another", **figures}))
    assert Hardware.read(file) == Hardware(**figures)
    with pytest.raises(RunError, match="was measured on 'another', and this is"):
        Hardware.measured(file)


def test_the_device_at_hand_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in ("ON_A_CPU", "ON_A_GPU"):
        monkeypatch.setattr(f"fxpipe.hardware.{sizes}", (64, 2**12))
    state = torch.get_rng_state()
    found = Hardware.measured(tmp_path / "here.json")
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tmp_path.iterdir()) == [tmp_path / "here.json"]
    assert found.seconds(1e9, 1e6, 4) > 0
    assert found.seconds(1e9, 1e6, 2) > 0
    assert found.reached == 1.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no", "is no JSON"),
        ("[1]", "holds [1]; it is a dict figure -> number"),
        ('{"flop": 1}', "has 'flop', which is no figure; did you mean \"flops\"?"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "here.json").write_text(text)
    with pytest.raises(RunError, match=re.escape(told)):
        Hardware.measured(tmp_path / "here.json")
