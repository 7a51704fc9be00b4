"""The examples of docs/pages/libraries.md, each on its own, where its library is installed."""

from __future__ import annotations

import re

import gpu_record
import pytest

PAGE = gpu_record.ROOT / "docs" / "pages" / "libraries.md"
BLOCKS = re.findall(r"^## (\w+)\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
ON_A_GPU = ("torch", "Numba")


def test_every_library_has_an_example():
    assert [name for name, _ in BLOCKS] == ["torch", "JAX", "Numba"]


def test_fp8_example():
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    exec(block[1], {})


@pytest.mark.parametrize(
    ("library", "block"),
    [pytest.param(*b, id=b[0], marks=pytest.mark.gpu if b[0] in ON_A_GPU else ()) for b in BLOCKS],
)
def test_example(library, block):
    pytest.importorskip(library.lower())
    assert block.count("assert ") >= 1
    exec(compile(block, f"{library} example", "exec"), {"__name__": "example"})


@pytest.mark.gpu
def test_jax_example_on_a_gpu():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    exec(compile(dict(BLOCKS)["JAX"], "JAX example", "exec"), {"__name__": "example"})
