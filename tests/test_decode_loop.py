"""The whole decode loop on real numbers: every step against float64, on both backends."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_paged import decode_loop


@pytest.mark.parametrize("on_cuda", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_every_step_of_the_loop(on_cuda):
    steps = decode_loop.run(on_cuda)
    assert len(steps) == decode_loop.STEPS + 1
    assert steps[-1].positions == tuple(n + decode_loop.STEPS - 1 for n in decode_loop.PREFILL)
    assert len({step.num_pages for step in steps}) == 3  # grown twice
    assert max(step.exact_error for step in steps) < 2.5e-3
    # What FP8 rows cost: a few per cent, more where two keys of almost equal score share the weight.
    true = [step.true_error for step in steps]
    assert 2e-3 < np.median(true) < 3e-2
    assert max(true) < 0.2


def test_command(capsys):
    assert decode_loop.main(["--backend", "numpy"]) == 0
    assert "161 steps on NumPy, pool grown 2 times" in capsys.readouterr().out
