"""The README's code runs as it stands."""

from __future__ import annotations

import re

import gpu_record
import numpy as np
import oracle
import pytest

README = (gpu_record.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_example(library):
    assert len(BLOCKS) == 1
    scope: dict = {}
    exec(BLOCKS[0].replace("import cupy as xp", f"import {library} as xp"), scope)
    arrays = {
        name: value if isinstance(value, np.ndarray) else value.get()
        for name, value in scope.items()
        if name in ("q", "codes", "scales", "kv_indices", "kv_indptr", "out")
    }
    rows = oracle.dequantized(arrays["codes"], arrays["scales"])
    expected, _ = oracle.attention(arrays["q"], rows, arrays["kv_indices"], arrays["kv_indptr"])
    oracle.compare(arrays["out"], expected, 2.5e-3)
