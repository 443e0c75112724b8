"""Plain data: what is told to other ranks comes back as it was, and a message brings no class and runs no code."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from fxpipe.errors import RunError
from fxpipe.graph.packing import Meta, TensorMeta, pack
from fxpipe.plain_data import MOST_BYTES, check_length, decode, encode, encode_for_all
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import Kind
from fxpipe.specs import TensorSpec
from tests.thinned import ALL


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Size(enum.IntFlag):
    SMALL = 1
    LARGE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclass
class Registered:
    a: Any
    b: Any = None


@dataclass
class Plain:
    a: int = 1


torch.export.register_dataclass(Registered)


VALUES = [
    None,
    False,
    -1,
    2**70,
    0.1,
    -0.0,
    math.inf,
    "",
    'text with "quotes", é, 𝄞, \x00 and a lone \ud800',
    bytes(range(256)),
    1 - 2j,
    (),
    {},
    (1, (2,), [3]),
    {1: "one", (1, 2): None, False: 0.5},
    frozenset([(1,)]),
    slice(None, torch.Size([1])),
    range(3, 9, 2),
    ...,
    torch.float32,
    torch.channels_last,
    torch.device("cuda", 3),
    torch.Size([2, 3]),
    Colour.GREEN,
    Size.LARGE,
    Point(1, (2, Point(None))),
    OrderedDict(b=1, a=[2]),
    defaultdict(list, {"a": [1]}),
    deque([1, 2], maxlen=3),
    Registered({"x": (1,)}, Registered(2)),
    Action(3, Kind.F, 4),
    TensorSpec((2, 3), torch.float16, (3, 1), "cpu", True),
    TensorMeta((2, 3), (3, 1), torch.bfloat16, False, "cuda", 16, True),
    ["refused", "tuple", ["value", "TensorMeta"]],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {value!a:.30}")
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    again = decode(encode(value), "rank 1")
    assert again == value
    assert type(again) is type(value)
    assert repr(again) == repr(value)  # -0.0, True beside 1, the order of a dict


def test_a_number_that_is_none_comes_back() -> None:
    assert math.isnan(decode(encode(math.nan), "rank 1"))


def test_containers_keep_what_beside_their_children_belongs_to_them() -> None:
    again = decode(encode([deque([1], maxlen=2), defaultdict(list)]), "rank 1")
    assert again[0].maxlen == 2
    assert again[1]["new"] == []


def test_a_model_s_output_is_one_again() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    value = BaseModelOutput(last_hidden_state=torch.zeros(2, 3), attentions=(torch.zeros(1),))
    again = Meta.from_tree(decode(encode(pack(value)[0].tree), "rank 1"), "rank 1")
    assert again == pack(value)[0]


# --- what is refused where it is to be sent


class Anything:
    pass


class Text(str):
    pass


def holding_itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def made_in_a_function() -> Any:
    return enum.Enum("Inner", ["ONE"], qualname="made_in_a_function.<locals>.Inner")["ONE"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Anything(), r"test_plain_data\.Anything, which .* cannot be sent .* write tensors .* None, numbers, text"),
        (Text("a"), r"test_plain_data\.Text, which"),
        (Plain(), r"registered on every rank by torch\.export\.register_dataclass"),
        (torch.zeros(1), r"class torch\.Tensor, which"),
        (numpy.float64(1), r"class numpy\.float64, .*torch\.as_tensor"),
        (made_in_a_function(), "enums and named tuples from the top of a module"),
        (Anything, r"class builtins\.type"),
        (Size.SMALL | Size.LARGE, "Size"),
        (defaultdict(Anything), r"class builtins\.type"),
        (holding_itself(), "nested so deeply, or hold themselves"),
        (10**5000, "cannot be sent to other ranks: .*digits"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_data_is_refused_with_what_to_write_instead(value: Any, says: str) -> None:
    with pytest.raises(RunError, match=says):
        encode(value)


def test_a_refusal_is_raised_by_all_who_wait_for_the_value() -> None:
    with pytest.raises(RunError, match=r"rank 3: an object of class .*Anything, which"):
        decode(encode_for_all([Anything()]), "rank 3")


def test_what_is_too_long_is_refused_at_both_ends() -> None:
    with pytest.raises(RunError, match=r"takes 67,108,[0-9]{3} bytes, and at most 67,108,864 are sent"):
        encode("a" * MOST_BYTES)
    for length in (-1, MOST_BYTES + 1, 2**63 - 1):
        with pytest.raises(RunError, match=r"rank 2 announces a description of .* bytes, and none has more"):
            check_length(length, "rank 2")
    assert check_length(MOST_BYTES, "rank 2") == MOST_BYTES


# --- what is refused where it arrives


class Exploit:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch exploited",)


HOSTILE: dict[str, Any] = {
    "a class that is not registered": ["container", f"{__name__}:Plain", None, 1],
    "a function": ["container", "os:system", None, "touch exploited"],
    "a class that is no container": ["container", "subprocess:Popen", None, "touch exploited"],
    "a named tuple that is none": ["named", "subprocess:Popen", "touch exploited"],
    "too few fields": ["named", f"{__name__}:Point", 1],
    "a module that is not imported": ["named", "antigravity:Point", 1, 2],
    "an attribute of an instance": ["named", f"{__name__}:HOSTILE.__class__", 1],
    "a value that was not admitted": ["value", "Plain", 1],
    "a value of other fields": ["value", "TensorMeta", 1],
    "a constant that is none": ["constant", "eval"],
    "no word": [],
    "a list for a word": [["list"], 1],
    "an object": {"a": 1},
    "a key that cannot be one": ["dict", ["list"], 1],
    "a device that is none": ["device", "abacus"],
    "bytes that are none": ["bytes", "%%%"],
}


MESSAGES: dict[str, bytes] = {
    **{name: json.dumps(message).encode() for name, message in HOSTILE.items()},
    "empty": b"",
    "no text": b"\xff",
    "cut": b"[",
    "no JSON": b"nothing",
    "deep": b"[" * 100_000,
    "a pickle": pickle.dumps(Exploit()),
    "thousands of digits": b"[" + b"1" * 5000 + b"]",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_describes_no_value_is_refused(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"^rank 7 has sent what is no description of a value"):
        decode(MESSAGES[name], "rank 7")
    assert list(tmp_path.iterdir()) == []
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("changes"),
    [
        {"shape": (-1, 3)},
        {"shape": (2**62, 2**62)},
        {"shape": [2, 3]},
        {"shape": (2, True)},
        {"dtype": "torch.float32"},
        {"requires_grad": 1},
        {"shift": 2**40},
        {"is_part": None},
    ],
    ids=str,
)
def test_a_description_of_no_tensor_takes_no_memory(changes: dict[str, Any]) -> None:
    sound = {"shape": (2, 3), "stride": (3, 1), "dtype": torch.float32, "requires_grad": False, "device": "cpu"}
    meta = TensorMeta(**{**sound, "shift": 0, "is_part": False, **changes})
    with pytest.raises(RunError, match="rank 7 has sent what describes no tensor"):
        Meta.from_tree([meta], "rank 7")


def test_a_changed_message_is_a_value_or_a_run_error() -> None:
    for seed in range(10_000 if ALL else 300):
        decode_changed(random.Random(seed))


def decode_changed(draw: random.Random) -> None:
    message = bytearray(encode(draw.sample(VALUES, 5)))
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(message))
        message[place : place + draw.randint(0, 3)] = draw.choice(
            [b"", b"[", b"]", b'"', b",", b"-", b"9", b"list", b"\xc3"]
        )
    with contextlib.suppress(RunError):
        decode(bytes(message), "rank 7")
