#!/usr/bin/env bash
# transformers 5.23.0 with torch 2.13.0: torch.manual_seed does not reproduce a training forward of Wav2Vec2. SpecAugment,
# which is on by default, draws its masks from NumPy's global generator.
# A good guess: a model that is all torch draws from torch, so that torch.manual_seed before each call gives equal outputs.
# Seen: four calls, each behind torch.manual_seed(0), give different outputs; behind numpy.random.seed(0) they are equal;
# with mask_time_prob=0 torch.manual_seed gives equal ones, dropout included.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cat > "$folder/main.py" <<'PY'
import numpy
import torch
from transformers import Wav2Vec2Config, Wav2Vec2Model

sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4}
config = Wav2Vec2Config(**sizes, **convolutions, num_conv_pos_embedding_groups=2, layerdrop=0.0)
assert config.apply_spec_augment and config.mask_time_prob > 0
torch.manual_seed(0)
model, sound = Wav2Vec2Model(config).train(), torch.randn(2, 3200)


def different(numpy_too):
    """The number of different outputs of four calls, each behind the same seed."""
    outputs = set()
    for _ in range(4):
        torch.manual_seed(0)
        if numpy_too:
            numpy.random.seed(0)
        outputs.add(model(sound).last_hidden_state.abs().sum().item())
    return len(outputs)


by_torch, by_both = different(False), different(True)
model.config.mask_time_prob = 0.0
without = different(False)
print(by_torch, by_both, without)
assert by_torch > 1 and by_both == 1 and without == 1
PY
OMP_NUM_THREADS=1 timeout 240 "$folder/venv/bin/python" "$folder/main.py"
