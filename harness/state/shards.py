"""Shards: DCP's reader, restricted to harmless pickles, and its writer."""

import hashlib
import pathlib
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import WriteResult

from harness import base

# Classes that a checkpoint's index may unpickle: plain records, no code. BytesStorageMetadata is not among them: DCP
# would unpickle such an entry without restriction, and a state of tensors has none.
INDEX_RECORDS = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata ChunkStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size float64 float32 float16 bfloat16 uint8 int8 int16 int32 int64 bool",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
}


class Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in INDEX_RECORDS.get(module, "").split():
            raise pickle.UnpicklingError(f"the index names {module}.{name}")
        return super().find_class(module, name)


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, but its index, a pickle, may only have INDEX_RECORDS and regular files of the checkpoint. `index`
    is one that was read this way."""

    def __init__(self, folder: pathlib.Path, index: dcp.Metadata | None = None):
        super().__init__(folder)
        self.index = index

    @base.working()
    def read_data(self, *args: Any, **kwargs: Any) -> torch.futures.Future[None]:
        return super().read_data(*args, **kwargs)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        if self.index:
            return self.index
        path = pathlib.Path(self.path, ".metadata")
        if not path.is_file():
            raise OSError(0, "not a regular file", str(path))
        with path.open("rb") as file:
            metadata = Records(file).load()
        for name in {record.relative_path for record in metadata.storage_data.values()}:
            if pathlib.PurePath(name).name != name or not pathlib.Path(self.path, name).is_file():
                raise pickle.UnpicklingError(f"the index names {name}, which is no file of the checkpoint")
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Writer(dcp.FileSystemWriter):
    """DCP's writer. A failed write raises the disk's error, not the RuntimeError of the archive left open."""

    def __init__(self, folder: pathlib.Path):
        # staged tensors are on the host: with 0 the writer neither copies them nor waits for a stream
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, *args: Any, **kwargs: Any) -> torch.futures.Future[list[WriteResult]]:
        try:
            with base.working(lambda: size_in_words(pathlib.Path(self.path))):
                return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            raise error.__context__ or error from None


def checkpoint_error(error: BaseException) -> str:
    """Return the error in one line. DCP wraps it by rank in a CheckpointException, which is no Exception."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return base.first_line(error)


def size_in_words(folder: pathlib.Path) -> str:
    """Return `1.234 GB written`: the size of the files in a folder so far, of all ranks."""
    return f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e9:,.3f} GB written"


@base.working()
def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
