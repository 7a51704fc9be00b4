"""The tests of pools, stores, rotations, quantising and lists that run on a GPU, on the emulated one."""

from __future__ import annotations

import inspect

import emulator
import pytest
import test_lists
import test_pool
import test_quantize
import test_store

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not emulator.available(), reason="the emulator is compiled with g++")


@pytest.fixture
def gpu(monkeypatch):
    from emulator import gpu as device

    made = device.Gpu()
    device.install(monkeypatch, made)
    yield made
    device.forget()


def parameters(function):
    """The sets of arguments that the test is parametrised by, None if none of it is for a GPU."""
    sets = None
    for mark in function.pytestmark:
        if mark.name != "parametrize":
            continue
        names, values = mark.args
        if names == "backend":
            names, values, sets = [names], [("cupy",)], sets or [{}]
        elif isinstance(names, str):
            names, values = [names], [(v,) for v in values]
        sets = [s | dict(zip(names, v, strict=True)) for s in sets or [{}] for v in values]
    return sets if sets and "backend" in sets[0] else None


CASES = []
for module in (test_lists, test_pool, test_quantize, test_store):
    for name, function in vars(module).items():
        if name.startswith("test_") and hasattr(function, "pytestmark"):
            for i, arguments in enumerate(parameters(function) or []):
                marks = [pytest.mark.slow] if i or "random" in name else []
                CASES.append(pytest.param(function, arguments, marks=marks, id=f"{module.__name__[5:]}-{name[5:]}-{i}"))


@pytest.mark.parametrize(("function", "arguments"), CASES)
def test_as_on_a_gpu(gpu, function, arguments, tmp_path):
    if "tmp_path" in inspect.signature(function).parameters:
        arguments = arguments | {"tmp_path": tmp_path}
    function(**arguments)
