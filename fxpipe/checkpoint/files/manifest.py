"""Manifest: the names, sizes in bytes and crc32s of a checkpoint's files, which reveal a cut or altered file."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fxpipe.errors import CheckpointError
from fxpipe.progress import progress
from fxpipe.small_file import read_small
from fxpipe.validation import shown

MANIFEST = "fxpipe.json"
FORMAT = 1
PIECE = 2**24
"""Bytes per crc32: a file has a crc32 per piece, so that several threads and ranks can check the same file."""
_BUFFER = 2**18
_THREADS = 4
_MOST = 2**28  # bytes of a manifest


Piece = tuple[str, int]
"""A file's name and a piece's number in the file."""


class Written(NamedTuple):
    """A file as it was written: its size in bytes, and the crc32 of each piece."""

    size: int
    crc32s: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description, with the size and the crc32s of every file.

    ``number``: counts the checkpoints of a run's folder, across restarts. ``axes``: the topology that saved the
    checkpoint. ``ties``: further names of tied parameters → the first name, under which an optimizer holds the state.
    ``best``: whether ``save`` was called with ``best=True``.
    """

    step: int
    number: int
    saved_at: str
    run: str
    axes: tuple[tuple[str, int], ...]
    versions: Mapping[str, str]
    files: Mapping[str, Written] = field(repr=False)
    ties: Mapping[str, str] = field(default_factory=dict, repr=False)
    best: bool = False

    def write(self, folder: Path) -> None:
        """Writes the manifest, after all other files, and waits until the manifest is on the disk."""
        # The manifest has its own crc32, since all other checksums come from the manifest.
        content = asdict(self)
        text = json.dumps({"format": FORMAT, "crc32": _crc_of(content), "checkpoint": content}, indent=1)
        write_text(folder / MANIFEST, text)

    @staticmethod
    def read(folder: Path, sizes: bool = False) -> Manifest:
        """Reads the manifest of a checkpoint's folder. ``sizes``: whether to compare the sizes of the files with it.

        Raises:
            CheckpointError: the manifest is missing, altered, or of another format; or a file is missing or cut.
        """
        path = folder / MANIFEST
        try:
            manifest = _parsed(path, json.loads(read_small(path, _MOST, os.O_NOFOLLOW)))
        except OSError as error:
            raise CheckpointError(
                f"{folder} is no checkpoint of fxpipe.save, or not a whole one: {MANIFEST}: {error.strerror}"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} was cut or altered: {type(error).__name__} {str(error)[:100]}") from error
        if sizes:
            manifest.check_sizes(folder)
        return manifest

    def check_sizes(self, folder: Path) -> None:
        """Raises CheckpointError if a file is missing, or its size in bytes differs from the manifest's."""
        for name, written in self.files.items():
            try:
                status = os.lstat(folder / name)
            except OSError as error:
                raise CheckpointError(
                    f"{folder / name} cannot be read ({error.strerror}), and its manifest expects {written.size} bytes"
                ) from error
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{folder / name} is a link, a pipe or a device, and no file of this folder")
            if size != written.size:
                raise CheckpointError(f"{folder / name} has {size} bytes, and its manifest expects {written.size}")

    def check_contents(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """Checks the crc32 of every ``ranks``-th piece, from piece ``rank`` on; CheckpointError if a crc32 differs."""
        # Ranks take pieces in turn, so that all ranks share the work of large files.
        pieces = [(name, number) for name in sorted(self.files) for number in range(len(self.files[name].crc32s))]
        self.check_pieces(folder, pieces[rank::ranks])

    def check_pieces(self, folder: Path, pieces: Iterable[Piece]) -> None:
        """Raises CheckpointError if a piece's crc32 differs from the manifest's, or the manifest lacks its file."""
        pieces = list(pieces)
        sizes = [min(PIECE, self.files[name].size - PIECE * at) if name in self.files else 0 for name, at in pieces]
        threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
        with progress("checking", sum(sizes), "bytes") as advance, threads:
            for size, _ in zip(sizes, threads.map(partial(self._check_piece, folder), pieces), strict=True):
                advance(size)

    def _check_piece(self, folder: Path, piece: Piece) -> None:
        name, number = piece
        if name not in self.files:
            raise CheckpointError(f"{folder / name} is none of the files that its manifest names")
        try:
            crc32 = crc32_of(folder / name, number)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        wanted = self.files[name].crc32s[number]
        if crc32 != wanted:
            raise CheckpointError(
                f"{folder / name} was altered: the crc32 from byte {number * PIECE} on is {crc32:08x}, and its "
                f"manifest expects {wanted:08x}"
            )


def pieces_of(name: str, start: int, length: int) -> list[Piece]:
    """The pieces of a file that hold ``length`` bytes from byte ``start`` on."""
    return [(name, number) for number in range(start // PIECE, -(-(start + length) // PIECE))]


def write_text(path: Path, text: str) -> None:
    """Writes a file, and waits until its bytes are on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def written_of(path: Path) -> Written:
    """The size in bytes and the crc32s of a file."""
    size = path.stat().st_size
    return Written(size, tuple(crc32_of(path, number) for number in range(-(-size // PIECE))))


def crc32_of(path: Path, number: int) -> int:
    """The crc32 of a piece of a file; reads ``_BUFFER`` bytes at a time, which fit a cache."""
    crc, left, buffer = 0, PIECE, memoryview(bytearray(_BUFFER))
    with path.open("rb", buffering=0) as file:
        file.seek(number * PIECE)
        while left and (count := file.readinto(buffer[:left])):
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


def _crc_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _parsed(path: Path, read: Any) -> Manifest:
    """Builds a manifest from parsed JSON; raises ValueError or similar for content that ``write`` does not write."""
    if read["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {str(read['format'])[:20]}; this fxpipe reads {FORMAT}")
    content = read["checkpoint"]
    if read["crc32"] != _crc_of(content):
        raise ValueError(f"its crc32 is {_crc_of(content):08x}, and it says {int(read['crc32']):08x}")
    return Manifest(
        step=natural(content["step"]),
        number=natural(content["number"]),
        saved_at=str(content["saved_at"])[:100],
        run=str(content["run"])[:100],
        axes=tuple((str(name), natural(size)) for name, size in content["axes"]),
        versions={str(name): str(version) for name, version in content["versions"].items()},
        files={_plain_name(name): _written(*sizes) for name, sizes in content["files"].items()},
        ties={str(name): str(first) for name, first in content.get("ties", {}).items()},
        best=content.get("best") is True,
    )


def _written(size: Any, crc32s: Any) -> Written:
    written = Written(natural(size), tuple(map(natural, crc32s)))
    if len(written.crc32s) != -(-written.size // PIECE):
        raise ValueError(f"{written.size} bytes have {len(written.crc32s)} checksums")
    return written


def natural(value: Any) -> int:
    """Returns a number that was read; ValueError if the value is no int or could not be a size on a disk."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{shown(value)[:40]!r} stands where a number should")
    return value


def _plain_name(name: str) -> str:
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"{name[:80]!r} is no file of its folder")
    return name
