"""Builds the device's C++ once for each torch, Python and content of ``src/``, into a folder outside of the checkout.

``$FXPIPE_GPU_CACHE``, or ``fxpipe-simulated-gpu`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, keeps what is built.
Processes that build at once wait for the first of them. Nothing but ``load`` imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", "-DTORCH_API_INCLUDE_EXTENSION_H"]
LIBRARIES = ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
NAME = "tests.simulated_gpu._device"


class Unavailable(ImportError):
    """The simulated device cannot be built here."""


def library() -> Path:
    """The extension module, which is built where it is not there; Unavailable where it cannot be."""
    if torch_has_cuda():
        raise Unavailable("the simulated GPU needs a CPU build of torch, and this one has CUDA")
    folder = _cache() / _key()
    module = folder / f"_device{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if module.exists():
        return module
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise Unavailable("the simulated GPU needs a C++ compiler: install g++, or name one in CXX")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not module.exists():
            _build(compiler, module)
    return module


def load() -> None:
    """Makes the extension module NAME. torch is imported behind its code: it asks once whether there is CUDA."""
    file = str(library())
    ctypes.CDLL(file)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


@functools.cache
def reason() -> str:
    """Why it cannot be built, or an empty string; it is built now where it can be."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return ""


def torch_has_cuda() -> bool:
    return runpy.run_path(str(_torch() / "version.py"))["cuda"] is not None


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise Unavailable("the simulated GPU needs torch")
    return Path(found.submodule_search_locations[0])


def _key() -> str:
    content = hashlib.sha256(repr((FLAGS, _torch().resolve())).encode())  # it is linked to this folder's libraries
    content.update((_torch() / "version.py").read_bytes())
    for file in sorted(SOURCE.iterdir()):
        content.update(file.name.encode() + file.read_bytes())
    return f"{sys.implementation.cache_tag}-{content.hexdigest()[:16]}"


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FXPIPE_GPU_CACHE") or f"{home}/fxpipe-simulated-gpu")


def _build(compiler: str, module: Path) -> None:
    """One translation unit, since most of what the compiler reads is torch's; the module appears when it is whole."""
    torch = _torch()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    with tempfile.TemporaryDirectory(dir=module.parent) as scratch:
        made = Path(scratch) / module.name
        command = [compiler, *FLAGS, *(f"-isystem{folder}" for folder in includes), str(SOURCE / "module.cpp")]
        command += ["-shared", "-o", str(made), f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"the simulated GPU does not build: {' '.join(command)}\n{done.stderr}")
        made.replace(module)
