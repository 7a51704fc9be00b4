"""A pool in a file: codes, scales, page size and group size together, in the safetensors format.

Layout: 8 bytes little-endian header length, a JSON header (tensor names, dtypes, shapes, byte ranges, and string
metadata), then the tensors' bytes. Any safetensors reader opens it; nothing in it is executed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
_FORMAT = "cupy_paged.pool.1"
_TO_FILE = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FROM_FILE: dict[str, Any] = {
    "F8_E4M3": E4M3,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
}
_MAX_HEADER = 1 << 20


def write(path: str | os.PathLike[str], codes: np.ndarray, scales: np.ndarray | None, metadata: dict[str, str]) -> None:
    """Write a pool; an existing file is replaced only once the new one is whole."""
    tensors = {"codes": codes} if scales is None else {"codes": codes, "scales": scales}
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT, **metadata}}
    end = 0
    for name, a in tensors.items():
        header[name] = {
            "dtype": _TO_FILE[a.dtype.name],
            "shape": list(a.shape),
            "data_offsets": [end, end + a.nbytes],
        }
        end += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for a in tensors.values():
                file.write(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray | None, dict[str, str]]:
    """Codes, scales and metadata of a pool file; ValueError for anything that is not a whole one."""
    try:
        return _read(Path(path))
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, OverflowError) as error:
        raise ValueError(f"{path} is not a pool file: its header is malformed ({error!r})") from error


def _read(path: Path) -> tuple[np.ndarray, np.ndarray | None, dict[str, str]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ValueError(f"{path} is not a pool file, or is truncated ({size} bytes)")
        header = json.loads(file.read(length).decode())
        if not isinstance(header, dict):
            raise TypeError("header is not an object")
        metadata = header.pop("__metadata__", None) or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a pool file: format is {metadata.get('format')!r}, expected {_FORMAT!r}")
        if set(header) not in ({"codes"}, {"codes", "scales"}):
            raise ValueError(f"{path} must hold codes, and scales if FP8; it holds {sorted(header)}")
        found: dict[str, np.ndarray] = {}
        end = 0
        for name in sorted(header):  # codes, then scales: as written, without gaps
            dtype = np.dtype(_FROM_FILE[header[name]["dtype"]])
            shape = tuple(int(n) for n in header[name]["shape"])
            begin, stop = header[name]["data_offsets"]
            count = 1
            for n in shape:
                count *= n
            if min(shape, default=0) < 0 or begin != end or stop - begin != count * dtype.itemsize:
                raise ValueError(f"{path} is malformed: {name} of shape {shape} does not fill bytes {begin} to {stop}")
            end = stop
            if size - 8 - length < end:
                raise ValueError(f"{path} is truncated: {name} ends at byte {8 + length + end}, the file at {size}")
            found[name] = np.fromfile(file, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)
        if size != 8 + length + end:
            raise ValueError(f"{path} has {size - 8 - length - end} bytes after its last tensor")
    return found["codes"], found.get("scales"), metadata
