"""``torch.cuda`` and storages over the simulated device, where a CPU build of torch has them empty.

``torch.accelerator`` needs nothing: it asks the device's guard and allocator. What is private to torch, but for what
distributed needs (nccl.py), is named here: a CPU build lacks the C++ functions behind ``torch.cuda``, and its storages
ask what was compiled in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.storage

from tests.simulated_gpu import _device, reports

COUNT = _device.device_count()
MEMORY = 32 << 30


def index_of(device: Any = None) -> int:
    """The number of a device, given as ``torch.cuda`` takes it."""
    if device is None or (isinstance(device, int) and device < 0):
        return torch._C._accelerator_getDeviceIndex()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return torch._C._accelerator_getDeviceIndex() if device.index is None else device.index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        return self.stream_id + 1


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3

    @property
    def at(self) -> float:
        """Its virtual time in seconds."""
        return _device.event_time(self.event_id)  # type: ignore[no-any-return]


class StreamContext:
    """``torch.Stream`` is a context of its own; this one may be of None."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._context = contextlib.nullcontext() if stream is None else stream

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


def current_stream(device: Any = None) -> Stream:
    stream = torch._C._accelerator_getStream(index_of(device))
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def default_stream(device: Any = None) -> Stream:
    stream = current_stream(device)
    return Stream(stream_id=0, device_index=stream.device_index, device_type=stream.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch._C._accelerator_setStream(stream)


class Properties:
    name = uuid = "simulated"
    gcnArchName = ""
    major, minor, multi_processor_count, total_memory = 9, 0, 132, MEMORY
    warp_size, max_threads_per_multi_processor, regs_per_multiprocessor = 32, 2048, 65536


def patch() -> None:
    _patch_devices()
    _patch_streams()
    _patch_memory()
    _patch_generators()
    _patch_storages()


def _patch_devices() -> None:
    cuda, c = torch.cuda, torch._C
    cuda._initialized = True
    cuda._lazy_init = cuda.init = lambda: None
    cuda.is_initialized = cuda.is_available = lambda: True
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.device_count = lambda: COUNT
    cuda.current_device = c._accelerator_getDeviceIndex
    cuda.set_device = lambda device: c._accelerator_setDeviceIndex(index_of(device))
    cuda._exchange_device = c._accelerator_exchangeDevice
    cuda._maybe_exchange_device = c._accelerator_maybeExchangeDevice
    cuda.synchronize = lambda device=None: c._accelerator_synchronizeDevice(index_of(device))
    cuda.get_device_name = lambda device=None: Properties.name
    cuda.get_device_capability = lambda device=None: (Properties.major, Properties.minor)
    cuda.get_device_properties = lambda device=None: Properties
    cuda.set_sync_debug_mode, cuda.get_sync_debug_mode = reports.set_debug_mode, reports.debug_mode


def _patch_streams() -> None:
    cuda = torch.cuda
    cuda.Stream, cuda.Event, cuda.StreamContext, cuda.stream = Stream, Event, StreamContext, StreamContext
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.current_stream, cuda.default_stream, cuda.set_stream = current_stream, default_stream, set_stream
    cuda.is_current_stream_capturing = torch._C._cuda_isCurrentStreamCapturing = lambda: False


def _patch_memory() -> None:
    names = "memory_stats memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    for name in [*names.split(), "reset_peak_memory_stats"]:
        asked = functools.partial(_of_device, getattr(torch.accelerator, name))
        setattr(torch.cuda, name, asked)
        setattr(torch.cuda.memory, name, asked)
    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = torch.accelerator.empty_cache
    torch.cuda.mem_get_info = functools.partial(_of_device, torch.accelerator.get_memory_info)


def _of_device(call: Callable[[int], Any], device: Any = None) -> Any:
    return call(index_of(device))


def _patch_generators() -> None:
    generators = tuple(_device.default_generator(index) for index in range(COUNT))
    torch.cuda.default_generators = generators

    def put_states(states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
        module.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
        module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
        module.set_rng_state_all = put_states
        module.manual_seed = lambda seed: generators[index_of()].manual_seed(int(seed))
        module.manual_seed_all = seed_all
        module.initial_seed = lambda: generators[index_of()].initial_seed()


def _patch_storages() -> None:
    plain_to, plain_resize = torch.storage._to, torch.UntypedStorage.resize_

    def tensor_of(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def to(storage: Any, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if device.type != "cuda" or storage.device == device:
            return plain_to(storage, device, non_blocking)
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        return copy.copy_(tensor_of(storage), non_blocking).untyped_storage()

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return plain_resize(storage, size)
        _device.resize_storage(tensor_of(storage), size)
        return storage

    torch.storage._to, torch.UntypedStorage.resize_ = to, resize_
