"""A data file: a listed file of a corpus, local or in a store."""

import io
import os
from dataclasses import dataclass

from harness import base
from harness.data import stores

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix: Arrow's name
LFS_BEGINNING = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer
LFS_MAX_BYTES = 1024  # pointers are shorter


@dataclass(frozen=True)
class DataFile:
    """A file of a corpus, as listed."""

    path: str  # local, or a URL
    size: int  # bytes
    version: tuple[str, str]  # (name, value) that changes with the content: the mtime, an ETag

    @classmethod
    def from_path(cls, path: str) -> "DataFile":
        status = os.stat(path)
        return cls(path, status.st_size, ("mtime", str(status.st_mtime_ns)))

    @classmethod
    def from_store(cls, url: str, info: dict) -> "DataFile":
        """Make it from the store's information on a file."""
        return cls(url, *stores.size_and_version(url, info))

    def __str__(self) -> str:
        return stores.without_query(self.path)

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def compression(self) -> str | None:
        """Arrow's name of its compression, by its suffix; None without one."""
        return COMPRESSIONS.get(os.path.splitext(self.name)[1].lower())

    @property
    def is_remote(self) -> bool:
        return base.is_url(self.path)

    def open(self) -> io.RawIOBase:
        """Open it unbuffered. A UserError if it has changed since it was listed, or is a pointer of Git LFS; an OSError
        if it cannot be read."""
        if self.is_remote:
            return stores.RangeReader(self.path, self.size, self.version)
        opened = open(self.path, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
        if os.fstat(opened.fileno()).st_size != self.size:  # a copy on another node may have another mtime
            opened.close()
            raise stores.changed_error(self.path)
        if self.size < LFS_MAX_BYTES:
            if opened.read(len(LFS_BEGINNING)) == LFS_BEGINNING:
                opened.close()
                raise base.UserError(f"--dataset {self}: it is a Git LFS pointer, not the file; run git lfs pull")
            opened.seek(0)
        return opened

    @property
    def real_path(self) -> str:
        """Its URL, or its path without links."""
        return self.path if self.is_remote else os.path.realpath(self.path)

    def identity(self) -> list:
        """Return its real path, size and version, which no other file and no other content of it has."""
        return [self.real_path, self.size, self.version]
