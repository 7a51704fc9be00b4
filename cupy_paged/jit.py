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
    nvrtc = _nvrtc()
    flags = [*options(constants), "-ftz=true", f"-arch=sm_{arch}", "--ptxas-options=-v", *_include_flags()]
    program = nvrtc.createProgram(source(file), file, (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            raise compile_error(file, arch, nvrtc.getProgramLog(program)) from error
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


def _nvrtc() -> Any:
    """CuPy's binding of the compiler, or an ImportError that says how to get the library it binds."""
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy loads the library at the first call; what it raises differs by version
        raise ImportError(f"NVRTC, CUDA's run-time compiler, cannot be loaded: {error}\n{_REMEDY}") from error
    return nvrtc


_REMEDY = (
    "Install it with pip, for CuPy's CUDA major: 'cuda-toolkit[nvrtc,cudart]==13.*' or 'cuda-toolkit[nvrtc,cudart]==12.9.*' "
    "(part of cupy-paged[cuda13] and cupy-paged[cuda12]), or set CUDA_PATH to a CUDA toolkit"
)
_NO_HEADER = re.compile(r'(?:could not|cannot) open source file "(\w+\.h\w*)"')


def compile_error(file: str, arch: str, log: str) -> Exception:
    """The compiler's log as an exception: ImportError where CUDA's own headers are missing."""
    header = _NO_HEADER.search(log)
    if header:
        return ImportError(f"{header[1]}, one of CUDA's headers, was not found. {_REMEDY}")
    return RuntimeError(f"{file} does not compile for sm_{arch}:\n{log}")


def _cuda_version() -> tuple[int, int]:
    return _nvrtc().getVersion()


class _Module:
    """A compiled file loaded on the current device, through CuPy's disk cache where that can be used."""

    def __init__(self, file: str, constants: Constants, arch: str) -> None:
        import cupy

        _nvrtc()
        flags = options(constants)
        if arch.endswith("a"):
            flags += (f"-arch=sm_{arch}",)  # CuPy adds the plain architecture; the later, narrower one holds
        module = cupy.RawModule(code=source(file), options=flags, backend="nvrtc")
        try:
            module.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise compile_error(file, arch, str(error)) from None
        except OSError:  # the cache folder is read-only, full or unreadable
            cubin, _ = compile_cubin(file, constants, arch)
            module = cupy.cuda.function.Module()
            module.load(cubin)
        self._module = module
        self._shared_bytes: dict[str, int] = {}  # allowed so far: a smaller request must not take it back

    def function(self, entry: str, shared_bytes: int) -> int:
        """CUfunction handle, allowed to use `shared_bytes` of dynamic shared memory."""
        from cupy.cuda import driver

        kernel = self._module.get_function(entry)
        handle: int = getattr(kernel, "kernel", kernel).ptr
        if shared_bytes > self._shared_bytes.get(entry, 48 * 1024):
            driver.funcSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            self._shared_bytes[entry] = shared_bytes
        return handle


_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute


@functools.cache
def _module(file: str, constants: Constants, arch: str, device: int) -> _Module:
    return _Module(file, constants, arch)


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
    with _lock:  # one compilation at a time, and never the same one twice
        return _module(file, constants, arch, device).function(entry, shared_bytes)


@atexit.register
def _unload() -> None:
    """Give the modules back while CuPy can still unload them; at interpreter exit it is too late."""
    load.cache_clear()
    _module.cache_clear()
