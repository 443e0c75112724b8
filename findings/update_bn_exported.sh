#!/usr/bin/env bash
# torch 2.13.0: swa_utils.update_bn on a module from torch.export returns without a word and changes nothing. It looks for
# BatchNorm modules, and the exported module has none: its batch norm is an operation on buffers of the same names.
# A good guess: it works, since the module has running_mean and updates it when it is called, or it warns.
# Seen: running_mean stays [0, 0]; a call of the same exported module moves it, and update_bn on the original gives 5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import copy
import warnings

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

warnings.simplefilter("error", UserWarning)
x = torch.tensor([[4.0, 4.0], [6.0, 6.0]])


def mean(model):
    return model.state_dict()["0.running_mean"].tolist()


plain = nn.Sequential(nn.BatchNorm1d(2)).train()
exported = torch.export.export(copy.deepcopy(plain), (x,)).module()  # without the copy they would share buffers
update_bn([x], plain)
update_bn([x], exported)
found = mean(plain), mean(exported)
exported(x)
called = mean(exported)
print(found, called)
assert found == ([5.0, 5.0], [0.0, 0.0]), found
assert called == [0.5, 0.5], called  # the momentum is 0.1
PY
OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py"
