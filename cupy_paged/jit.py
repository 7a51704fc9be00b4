"""From (kernel file, constants, architecture) to a loaded kernel, once per device.

Sources are handed to CuPy as one text with the project's own headers inlined, so that CuPy's disk cache notices
a change in any of them. Nothing is compiled or read at import.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INCLUDE = re.compile(r'^#include "([\w.]+)"[^\n]*\n', re.MULTILINE)
_OPTIONS = ("-std=c++17", "-default-device")
_lock = threading.Lock()

Constants = tuple[tuple[str, int], ...]


def kernels_dir() -> Path:
    """Where the CUDA C sources are: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for place in (package / "kernels", package.parent / "kernels"):
        if place.is_dir():
            return place
    raise ImportError(f"the kernels folder is missing from {package}; reinstall cupy-paged")


@functools.cache
def source(file: str) -> str:
    """The text of a kernel file with the headers it includes from kernels/ inlined, each once."""
    folder, seen = kernels_dir(), set()

    def expand(name: str) -> str:
        text = (folder / name).read_text(encoding="utf-8").replace("#pragma once\n", "")

        def header(match: re.Match[str]) -> str:
            inner = match.group(1)
            if inner in seen:
                return ""
            seen.add(inner)
            return expand(inner)

        return _INCLUDE.sub(header, text)

    return expand(file)


def options(constants: Constants) -> tuple[str, ...]:
    return _OPTIONS + tuple(f"-D{name}={value}" for name, value in constants)


def digest(files: Mapping[str, bytes]) -> str:
    """A digest of named contents: the same for the same files, in any order of naming them."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{len(files[name])}\0".encode())
        total.update(files[name])
    return total.hexdigest()


def compile_cubin(file: str, constants: Constants, arch: str) -> tuple[bytes, str]:
    """Compile without a GPU; returns the cubin and the assembler's log (registers, spills).

    Parameters
    ----------
    arch : str
        ``'80'``, ``'90a'``, ...
    """
    from cupy.cuda import nvrtc

    flags = [*options(constants), "-ftz=true", f"-arch=sm_{arch}", "--ptxas-options=-v", *_include_flags()]
    program = nvrtc.createProgram(source(file), file, (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{file} does not compile for sm_{arch}:\n{nvrtc.getProgramLog(program)}") from error
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _include_flags() -> list[str]:
    """-I for CUDA's own headers (cuda_fp16.h ...), where CuPy finds them."""
    from cupy import _environment as environment

    flags = []
    for attribute in ("_get_include_dir_from_conda_or_wheel", "get_cuda_path"):
        finder = getattr(environment, attribute, None)
        if finder is None:
            continue
        try:
            found = finder(*_cuda_version()) if attribute.startswith("_get_include") else finder()
        except Exception:
            continue
        for place in [found] if isinstance(found, str) else found or []:
            include = Path(place) if attribute.startswith("_get_include") else Path(place) / "include"
            if include.is_dir():
                flags.append(f"-I{include}")
    return flags


def _cuda_version() -> tuple[int, int]:
    from cupy.cuda import nvrtc

    return nvrtc.getVersion()


@functools.cache
def _module(file: str, constants: Constants, arch: str, device: int) -> Any:
    import cupy

    flags = options(constants)
    if arch.endswith("a"):
        flags += (f"-arch=sm_{arch}",)  # CuPy adds the plain architecture; the later, narrower one holds
    return cupy.RawModule(code=source(file), options=flags, backend="nvrtc")


@functools.cache
def load(file: str, entry: str, constants: Constants, arch: str, device: int, shared_bytes: int = 0) -> int:
    """Compile (or take from CuPy's cache) and load one kernel on the current device.

    Parameters
    ----------
    file, entry : str
        File in kernels/ and its ``extern "C"`` kernel.
    constants : tuple of (str, int)
        ``-D`` macros.
    arch : str
        Architecture of `device`, ``'90a'`` for instance.
    device : int
        The current CUDA device; part of the key because a kernel belongs to a device's context.
    shared_bytes : int
        Dynamic shared memory that launches will ask for.

    Returns
    -------
    int
        The CUfunction handle, valid for the life of the process.
    """
    with _lock:  # CuPy's RawModule compiles lazily and not under a lock of its own
        kernel = _module(file, constants, arch, device).get_function(entry)
        if shared_bytes > 48 * 1024:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        _loaded.append(kernel)
        return kernel.kernel.ptr


_loaded: list[Any] = []  # keeps the modules of the handles alive


@atexit.register
def _unload() -> None:
    """Give the modules back while CuPy can still unload them; at interpreter exit it is too late."""
    load.cache_clear()
    _module.cache_clear()
    _loaded.clear()
