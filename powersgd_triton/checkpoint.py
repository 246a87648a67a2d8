"""Save a state to a file and load it again. Files are written completely or not at all, and checked when read.

from powersgd_triton import checkpoint
saved = state.state_dict()                      # collective: on all workers
if worker == 0:
    checkpoint.save(saved, "powersgd.pt")       # or "powersgd.safetensors"
state.load_state_dict("powersgd.pt")            # collective: on all workers
"""

import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

StateDict = Mapping[str, Any] | str | os.PathLike[str]
"""Result of a ``state_dict()``, or the path of a file that holds it."""

FORMAT = "powersgd_triton state"
SAFETENSORS = ".safetensors"


def save(state_dict: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a saved state to a file. Call it on one worker. An interrupted call leaves an old file unchanged.

    Args:
        state_dict: Result of ``state_dict()`` of any state but those for ``torch.distributed.checkpoint``.
        path: File in an existing folder. With the suffix .safetensors it has that format, which requires the package
            safetensors. Otherwise it is written by ``torch.save``.

    Raises:
        TypeError: The state has values that are neither tensors nor plain values.
        OSError: The file cannot be written.
    """
    path = Path(path)
    tensors, text = flatten(state_dict)
    checksum = str(_checksum(tensors, text))
    if path.suffix == SAFETENSORS:
        from safetensors.torch import save as to_bytes

        content = to_bytes(tensors, metadata={FORMAT: text, "checksum": checksum})
    else:
        content = pickled({FORMAT: text, "checksum": checksum, "tensors": tensors})
    _write(path, content)


def opened(state_dict: StateDict) -> Any:
    """Return a saved state. A path is read with ``load``."""
    return load(state_dict) if isinstance(state_dict, (str, os.PathLike)) else state_dict


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that ``save`` wrote. Tensors are on the CPU. Nothing in the file is executed.

    Raises:
        ValueError: The file was not written by ``save``, or it is incomplete or damaged.
        OSError: The file cannot be read.
    """
    path = Path(path)
    content = path.read_bytes()
    try:
        tensors, values = (_from_safetensors if path.suffix == SAFETENSORS else _from_torch)(content)
        _check_sizes(tensors.values(), len(content))
        if values["checksum"] != str(_checksum(tensors, values[FORMAT])):
            raise ValueError("its checksum does not match its content")
        state: dict[str, Any] = json.loads(values[FORMAT])
        state["matrices"] = {name: {} for name in state["matrices"]}
        for key, tensor in tensors.items():
            name, _, part = key.rpartition("/")
            state["matrices"][name][part] = tensor
        return state
    # A damaged file can make the readers raise anything.
    except Exception as error:
        raise ValueError(f"{path} is not a saved PowerSGD state, or it is damaged: {error!r}") from error


def flatten(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Split a saved state into its tensors, {"name/part": tensor}, and all other values as JSON."""
    matrices: Mapping[str, Mapping[str, Tensor]] = state_dict.get("matrices", {})
    tensors = {
        f"{name}/{part}": tensor.detach().cpu().contiguous()
        for name, parts in matrices.items()
        for part, tensor in parts.items()
    }
    return tensors, json.dumps({**state_dict, "matrices": list(matrices)})


def pickled(value: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpickled(content: bytes) -> Any:
    """Return what ``torch.save`` wrote, executing nothing. ValueError: Another file, or tensors that claim more."""
    # torch.load() allocates what the file claims, also for compressed entries and in its older formats.
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it has compressed entries, which torch.save() does not write")
    if sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("its entries claim more bytes than the file has")
    found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    _check_sizes(_tensors(found), len(content))
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _check_sizes(tensors: Iterable[Tensor], available: int) -> None:
    """Check that tensors, for example expanded ones, take no more memory than a file has bytes."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
            raise ValueError(f"it has a tensor that is not dense: {tensor.layout}")
        available -= tensor.nbytes
        if available < 0:
            raise ValueError(f"its tensors claim more bytes than the file has; one is {tuple(tensor.shape)}")


def _from_torch(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    saved = unpickled(content)
    if "format_version" in saved:
        raise ValueError("it was written by torch.save(): pass torch.load(path) in place of the path")
    return saved.pop("tensors"), saved


def _from_safetensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors.torch import load as from_bytes

    tensors: dict[str, Tensor] = from_bytes(content)
    # The library does not return the metadata of bytes. The file begins with the length of its JSON header, in 8 bytes.
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return tensors, header["__metadata__"]


def _checksum(tensors: Mapping[str, Tensor], text: str) -> int:
    total = zlib.crc32(text.encode())
    for key in sorted(tensors):
        total = zlib.crc32(f"{key} {tensors[key].dtype} {tuple(tensors[key].shape)}".encode(), total)
        total = zlib.crc32(tensors[key].contiguous().view(-1).view(torch.uint8).numpy().data, total)
    return total


def _write(path: Path, content: bytes) -> None:
    """Write a temporary file, flush it to the disk, and move it over the old one."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
