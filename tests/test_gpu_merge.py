"""merge_states on CUDA against the NumPy backend and against one undivided call."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from calls import BF16, decode_call, draw, to_gpu

from cupy_paged import merge_states, paged_decode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("parts", [1, 2, 7, 64])
@pytest.mark.parametrize("sink", [False, True])
def test_agrees_with_numpy(dtype, parts, sink):
    import cupy

    rng = np.random.default_rng(parts)
    outs = [rng.standard_normal((5, 3, 192)).astype(dtype) for _ in range(parts)]
    lses = [(rng.standard_normal((5, 3)) * 5).astype(np.float32) for _ in range(parts)]
    for e in lses:
        e[1, 1] = -np.inf  # empty everywhere
    outs[0][2], lses[0][2] = np.nan, -np.inf  # an empty part is not read
    logits = rng.standard_normal(3).astype(np.float32) if sink else None
    host, host_lse = merge_states(outs, lses, logits)
    got, got_lse = merge_states(
        [cupy.asarray(o) for o in outs],
        [cupy.asarray(e) for e in lses],
        None if logits is None else cupy.asarray(logits),
    )
    bound = {"bfloat16": 1e-3, "float16": 1e-4, "float32": 1e-6}[outs[0].dtype.name]
    oracle.compare(got.get(), host.astype(np.float64), bound)
    np.testing.assert_allclose(got_lse.get(), host_lse, rtol=1e-6, atol=1e-5)


def test_halves_of_a_list_give_the_whole():
    rng = np.random.default_rng(0)
    call = draw(rng, t=4, h=16, d=512, lengths=[100, 0, 1, 64], pages=300)
    sink = rng.standard_normal(16).astype(np.float32)
    whole, whole_lse = decode_call(call, sink)
    parts = []
    for half in range(2):
        picked = [
            call["kv_indices"][a:b][half::2] for a, b in zip(call["kv_indptr"], call["kv_indptr"][1:], strict=False)
        ]
        indptr = np.concatenate([[0], np.cumsum([len(x) for x in picked])]).astype(np.int32)
        part = {**call, "kv_indices": np.concatenate(picked), "kv_indptr": indptr}
        parts.append(paged_decode(**to_gpu(part), return_lse=True))
    out, lse = merge_states([o for o, _ in parts], [e for _, e in parts], to_gpu({"s": sink})["s"])
    oracle.compare(out.get(), whole, 3e-3)  # each half is rounded to bf16 before it is merged
    np.testing.assert_allclose(lse.get(), whole_lse, rtol=1e-4, atol=2e-3)
