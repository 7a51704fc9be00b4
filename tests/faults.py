"""What the tests of the fault cases share: the two backends, the base case with its relatives, and its verdicts."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import oracle
import pytest
from calls import decode_call

import cupy_paged
from cupy_paged import paged_decode

BF16, FP16, F32, FP8 = ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn
NAN_CODE = 0x7F
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

# Relative Frobenius error allowed against float64 on the dequantised pool: 2.5e-3 is the contract's bound, of which
# the output's own rounding to bf16 (relative error up to 2**-9, 1.7e-3 in the mean square) is the larger part; fp16
# rounds eight times finer. 16-bit pools round the probabilities to the pool's type too.
BOUND = {("bfloat16", "fp8"): 2.5e-3, ("float16", "fp8"): 1e-3, ("bfloat16", "16"): 2.8e-3, ("float16", "16"): 1e-3}
LSE_BOUND = dict.fromkeys(BOUND, 1e-3)  # absolute error allowed of lse, as the cases say


class Config(NamedTuple):
    """A relative of the base case: one kernel, dtype, shape or page layout each."""

    num_heads: int = 16
    head_dim: int = 512
    page_size: int = 1
    q_dtype: type = BF16
    kv: str = "fp8"
    group_size: int = 64

    def __str__(self):
        pages = f"-page{self.page_size}" if self.page_size > 1 else ""
        group = f"-group{self.group_size}" if self.kv == "fp8" and self.group_size != 64 else ""
        return f"h{self.num_heads}-d{self.head_dim}-{np.dtype(self.q_dtype).name}-{self.kv}{group}{pages}"


BASE = Config()
CONFIGS = [
    BASE,
    Config(num_heads=64),
    Config(num_heads=128),
    Config(num_heads=1, head_dim=64, page_size=4, q_dtype=FP16),
    Config(num_heads=5, head_dim=448, group_size=32),
    Config(num_heads=33, head_dim=256, page_size=64, group_size=128),
    Config(num_heads=16, kv="16"),
    Config(num_heads=24, head_dim=128, page_size=3, q_dtype=FP16, kv="16"),
]
MODES = [{}, {"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True}]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)
some_configs = pytest.mark.parametrize("config", [CONFIGS[i] for i in (0, 2, 3, 6)], ids=str)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(f"{k}={v}" for k, v in m.items()) or "auto")


class Backend(NamedTuple):
    """Where a test runs: NumPy arrays, or CuPy arrays with FP8 codes as uint8."""

    name: str

    @property
    def cuda(self):
        return self.name == "cuda"

    def put(self, a):
        """An array or a call's arguments where the backend wants them; arrays that are there stay as they are."""
        if isinstance(a, dict):
            return {name: self.put(value) for name, value in a.items()}
        if not self.cuda or not isinstance(a, np.ndarray):
            return a
        import cupy

        return cupy.asarray(a.view(np.uint8) if a.dtype == FP8 else a)

    def get(self, a):
        return a.get() if hasattr(a, "get") else np.asarray(a)

    def copy(self, a):
        return a.copy()

    def decode(self, call, **options):
        """(out, lse) as NumPy arrays of a call given by NumPy or the backend's arrays."""
        out, lse = paged_decode(**self.put(call), **self.put(options), return_lse=True)
        return self.get(out), self.get(lse)

    def full(self, shape, value, dtype):
        return self.put(np.full(shape, value, dtype))

    def zero_workspace(self, size):
        """{'workspace': `size` zero bytes} on a GPU; NumPy needs none."""
        if not self.cuda:
            return {}
        import cupy

        return {"workspace": cupy.zeros(size, "uint8")}


def base(config=BASE, lengths=(64, 64, 64, 64), seed=0, num_slots=1024):
    """NumPy arguments: N(0, 1) rows quantised, N(0, 1) queries, every list of distinct random slots."""
    rng = np.random.default_rng(seed)
    h, d, page_size = config.num_heads, config.head_dim, config.page_size
    num_pages = -(-num_slots // page_size)
    rows = rng.standard_normal((num_pages, page_size, d)).astype(F32)
    if page_size == 1:
        rows = rows[:, 0]
    call = {"q": rng.standard_normal((len(lengths), h, d)).astype(config.q_dtype)}
    if config.kv == "fp8":
        codes, scales = cupy_paged.quantize_kv(rows, group_size=config.group_size)
        call |= {"unified_kv": codes, "kv_scales": scales, "group_size": config.group_size}
    else:
        call["unified_kv"] = rows.astype(config.q_dtype)
    slots = num_pages * page_size
    lists = [rng.choice(slots, n, replace=n > slots) for n in lengths]
    call["kv_indices"] = np.concatenate([*lists, np.empty(0)]).astype(np.int32)
    call["kv_indptr"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return call


def num_slots(call):
    pool = call["unified_kv"]
    return pool.shape[0] * (pool.shape[1] if pool.ndim == 3 else 1)


def kind(call):
    return call["q"].dtype.name, "fp8" if "kv_scales" in call else "16"


def near_reference(call, out, lse, sink=None, softmax_scale=None):
    """~REF of the cases: within 1 % of the largest element and 1e-3 of lse, and the package's own tighter bound."""
    exact, exact_lse = decode_call(call, sink, softmax_scale)
    near(out, exact, BOUND[kind(call)])
    near_lse(lse, exact_lse, LSE_BOUND[kind(call)])


def near(out, exact, bound):
    out, exact = np.asarray(out).astype(np.float64), np.asarray(exact).astype(np.float64)
    oracle.compare(out, exact, bound)
    if out.size:
        assert np.abs(out - exact).max() <= 0.01 * np.abs(exact).max()


def near_lse(lse, exact, bound):
    """Beside the bound, 2**-20 of lse itself: scores are float32 sums."""
    np.testing.assert_allclose(lse, exact, atol=bound, rtol=2.0**-20)


def empty(out, lse):
    """EMPTY of the cases: zero bits (not -0, not NaN), and lse -inf."""
    assert not np.ascontiguousarray(out).view(np.uint8).any()
    assert np.isneginf(lse).all()


def same_bits(a, b):
    a, b = (x.get() if hasattr(x, "get") else np.asarray(x) for x in (a, b))
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def poison(call, slots):
    """Make the rows of these slots NaN, and their pages' scales infinite where pages hold one slot."""
    pool = call["unified_kv"]
    flat = pool.reshape(num_slots(call), pool.shape[-1])
    if "kv_scales" in call:
        flat.view(np.uint8)[slots] = NAN_CODE
        if pool.ndim == 2:
            call["kv_scales"][slots] = np.inf
    else:
        flat[slots] = np.nan
    return call


class Guarded:
    """A device or host array between two canaries of its own memory: `intact()` says whether they are untouched."""

    PAD = 4096

    def __init__(self, backend, a, canary=0xA5):
        a = np.ascontiguousarray(a.view(np.uint8) if a.dtype == FP8 else a)
        room = -(-a.nbytes // 256) * 256
        whole = np.full(2 * self.PAD + room, canary, np.uint8)
        whole[self.PAD : self.PAD + a.nbytes] = a.reshape(-1).view(np.uint8)
        self._canary, self._nbytes, self._backend = canary, a.nbytes, backend
        self.whole = backend.put(whole)
        self.array = self.whole[self.PAD : self.PAD + a.nbytes].view(a.dtype).reshape(a.shape)

    def intact(self):
        whole = self._backend.get(self.whole)
        around = np.concatenate([whole[: self.PAD], whole[self.PAD + self._nbytes :]])
        return bool((around == self._canary).all())


def guard(backend, call, canary=0xFF):
    """The call's arrays as `Guarded` ones: 0xFF is NaN in every floating dtype and -1 among slot ids."""
    return {name: Guarded(backend, a, canary) if isinstance(a, np.ndarray) else a for name, a in call.items()}


def unguard(guarded):
    return {name: g.array if isinstance(g, Guarded) else g for name, g in guarded.items()}


def captured(gpu, stream, out, workspace, **options):
    """A graph of one call, captured on the stream, which is current."""
    stream.begin_capture()
    paged_decode(**gpu, out=out, workspace=workspace, **options)
    return stream.end_capture()
