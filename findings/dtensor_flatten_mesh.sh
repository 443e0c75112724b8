#!/usr/bin/env bash
# torch 2.13.0 (CPU): `__tensor_flatten__` of a DTensor names its DeviceMesh among the inner parts, beside the local tensor.
# Code that moves a tensor subclass by its parts (offload of saved tensors, checkpoint staging) meets a part without storage.
# A good guess: the names are of inner tensors, as the protocol of traceable wrapper subclasses is described and as nested
# tensors have it. Seen: DTensor {'_local_tensor': 'Tensor', 'device_mesh': 'DeviceMesh'}; a nested tensor has tensors alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def parts(tensor):
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


spread = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
of_spread, context = parts(spread)
of_ragged, _ = parts(ragged)
for name, found in (("DTensor", of_spread), ("nested", of_ragged)):
    print(torch.__version__, name, {key: type(value).__name__ for key, value in found.items()})
assert isinstance(of_spread["device_mesh"], DeviceMesh), of_spread
assert not isinstance(of_spread["device_mesh"], Tensor)
assert isinstance(of_spread["_local_tensor"], Tensor)
assert all(isinstance(value, Tensor) for value in of_ragged.values()), of_ragged
# The mesh has to be handed back as a part, too.
again = DTensor.__tensor_unflatten__(of_spread, context, spread.size(), spread.stride())
assert torch.equal(again.to_local(), spread.to_local())
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py"
