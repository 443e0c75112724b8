"""What worker processes need, imported once, by the server that they are forked from: torch takes seconds to import.

None of it starts a thread or draws a number.
"""

import torch._dynamo
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel
import torch.export

import fxpipe

for name in fxpipe.__all__:
    getattr(fxpipe, name)
torch.export.export(torch.nn.Identity(), (torch.ones(1),))  # imports what it works with
