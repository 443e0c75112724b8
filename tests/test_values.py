"""Before ``run``, state is a value: dataclasses are frozen, but for those that one capture or one step fills."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from importlib.util import find_spec

import fxpipe

LIGHTNING = "fxpipe.loops.lightning"  # may be absent
WITH_STATE = ("fxpipe.run", "fxpipe.sharding", "fxpipe.distributed")
FILLED = {
    "Balancing": "remembers the costs of the program that it was asked for last",
    "Conversion": "a builder: it lives while one exported graph becomes a program",
    "Emitter": "a builder: it lives while one tape becomes a graph",
    "ExportedCall": "it lives while torch.export traces it, and keeps what it has seen",
    "ListOfTensors": "one capture notes whether forward opens the list",
    "OnHost": "a copy to the host notes its event, and a copy back another",
    "Operation": "an entry of a tape, which the recorder of one capture completes",
    "OwnGenerator": "a step notes the generator that the user has put in place of another",
    "Saved": "a stage's forward leaves it to the backward, which needs a seed beside it",
    "SavedTensor": "offload lets go of the tensor that it refers to",
    "Touched": "an entry of a tape: what operations of one capture read and write",
    "_ModesInGraph": "a builder: it follows the modes through one graph",
    "_Writer": "a builder: it writes one graph",
    "_Traced": "a builder: it lives while the repeats of one export are expanded",
    "_Named": "one capture counts the calls of a submodule that is cut",
}
"""Class → why it is filled after it was made, and by whom."""


def test_dataclasses_are_frozen() -> None:
    names = [each.name for each in pkgutil.walk_packages(fxpipe.__path__, "fxpipe.")]
    modules = [importlib.import_module(name) for name in names if name != LIGHTNING or find_spec("lightning")]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__.startswith("fxpipe.")
    }
    values = [each for each in classes if not each.__module__.startswith(WITH_STATE)]
    assert len(values) > 100
    assert {each.__name__ for each in values if not each.__dataclass_params__.frozen} == FILLED.keys()  # type: ignore[attr-defined]
