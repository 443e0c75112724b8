"""``torch.cuda`` and storages over the simulated device, where a CPU build of torch has them empty.

``torch.accelerator`` needs nothing: it asks the device's guard and allocator. What is private to torch, but for what
distributed needs (nccl.py), is named here: a CPU build lacks the C++ functions behind ``torch.cuda``, and its storages
ask what was compiled in.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.simulated_gpu import _device, reports

COUNT = _device.device_count()


class Stream(torch.Stream):
    cuda_stream = torch.Stream.native_handle

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3

    @property
    def at(self) -> float:
        """Its virtual time in seconds."""
        return _device.event_time(self.event_id)  # type: ignore[no-any-return]


class Properties:
    name = uuid = "simulated"
    gcnArchName = ""
    major, minor, multi_processor_count, total_memory = 9, 0, 132, 32 << 30
    warp_size, max_threads_per_multi_processor, regs_per_multiprocessor = 32, 2048, 65536


def _current_stream(index: int) -> tuple[int, int, int]:
    stream = torch._C._accelerator_getStream(index)
    return stream.stream_id, stream.device_index, stream.device_type


def _resize(storage: Any, size: int) -> Any:
    if storage.device.type != "cuda":
        return _plain_resize(storage, size)
    _device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
    return storage


def _new_storage(cls: Any, *args: Any, **known: Any) -> Any:
    if torch.device(known.get("device") or "cpu").type != "cuda":
        return _plain_new_storage(cls, *args, **known)
    return torch.empty(*args, dtype=torch.uint8, device=known["device"]).untyped_storage()


_plain_resize, _plain_new_storage = torch.UntypedStorage.resize_, torch.UntypedStorage.__new__

# ``torch._C._cuda_*``, which torch's own Python calls: but getDeviceCount, by which it knows a build with CUDA.
FUNCTIONS = {
    "getDevice": torch._C._accelerator_getDeviceIndex,
    "setDevice": torch._C._accelerator_setDeviceIndex,
    "synchronize": torch.accelerator.synchronize,
    "getCurrentStream": _current_stream,
    "getDefaultStream": lambda index: (0, index, 1),
    "setStream": lambda **ids: torch._C._accelerator_setStream(torch.Stream(**ids)),
    "isCurrentStreamCapturing": lambda: False,
    "memoryStats": torch._C._accelerator_getDeviceStats,
    "resetPeakMemoryStats": torch._C._accelerator_resetPeakStats,
    "emptyCache": torch._C._accelerator_emptyCache,
    "set_sync_debug_mode": reports.set_debug_mode,
    "get_sync_debug_mode": reports.debug_mode,
}
# ``torch.cuda.*``, which was bound to what is missing.
NAMES = {
    "_initialized": True,
    "is_available": lambda: True,
    "device_count": lambda: COUNT,
    "_exchange_device": torch._C._accelerator_exchangeDevice,
    "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
    "Stream": Stream,
    "Event": Event,
    "is_current_stream_capturing": lambda: False,
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_device_properties": lambda device=None: Properties,
    "mem_get_info": torch.accelerator.get_memory_info,
    "default_generators": tuple(map(_device.default_generator, range(COUNT))),
}
# Recurrent layers, as torch decomposes them: CUDA has kernels for a cell that the CPU lacks.
RECURRENT = {
    "lstm.input": "lstm_impl",
    "lstm.data": "lstm_data_impl",
    "gru.input": "gru_impl",
    "gru.data": "gru_impl_data",
}
_library = torch.library.Library("aten", "IMPL")


def _decomposed(name: str, *args: Any, **options: Any) -> Any:
    from torch._decomp import decompositions  # not before it is asked for: the import takes long

    return getattr(decompositions, name)(*args, **options)


def patch() -> None:
    for name, function in FUNCTIONS.items():
        setattr(torch._C, f"_cuda_{name}", function)
    for name, value in NAMES.items():
        setattr(torch.cuda, name, value)
    torch.cuda.streams.Stream, torch.cuda.streams.Event = Stream, Event
    torch.cuda.random.device_count = torch.cuda.device_count
    torch.UntypedStorage.resize_ = _resize
    torch.UntypedStorage.__new__ = _new_storage  # type: ignore[assignment]
    for overload, name in RECURRENT.items():
        for key in ("AutogradCUDA", "CUDA"):
            _library.impl(overload, functools.partial(_decomposed, name), key)
