"""Distributed: ranks and groups, processes, and how bytes move between them. Here torch.distributed is named."""
