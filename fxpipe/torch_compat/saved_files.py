"""Saved files: the content of torch.distributed.checkpoint's ``.metadata``, and the records of a ``torch.save`` file.

The names are the same in 2.13 to 2.15.
"""

from __future__ import annotations

from typing import IO, Any

import torch

from fxpipe.small_file import Budget

METADATA_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "MetadataIndex StorageMeta".split()
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""(module, name) of the classes whose instances are pickled in ``.metadata`` with their attributes."""
METADATA_FUNCTIONS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}
"""(module, name) of the functions that the pickle calls with a single argument."""


def checked_zip(file: IO[bytes]) -> IO[bytes]:
    """Returns a ``torch.save`` file, at its start. ValueError if its unpacked records have more bytes than the file."""
    file.seek(0, 2)
    budget = Budget(file.tell(), "bytes")
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)
    budget.spend(sum(map(reader.get_record_size, reader.get_all_records())))
    file.seek(0)
    return file


def storage_info(file: str, offset: int, length: int) -> Any:
    """The file, offset and length in bytes of a part of a tensor. Imports torch.distributed.checkpoint at the call."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
