"""What worker processes need of transformers, which imports a model's code, and scipy for it, when it is first used."""

import torch

from tests.hf import MODELS

with torch.device("meta"):  # draws no numbers
    for case in MODELS.values():
        case.build()
