"""PagedKV: its operations, files, the four ways in which codes and scales used to part, and random sequences of all of it."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import BACKENDS, BF16, E4M3, get, put, rows, same_bits

from cupy_paged import PagedKV, dequantize_kv, paged_decode, quantize_kv, store_kv

DTYPES = ["float8_e4m3fn", "bfloat16", "float16"]
DEVICE = {"numpy": "cpu", "cupy": "cuda"}


def filled(backend, num_pages=6, page_size=1, head_dim=64, dtype="float8_e4m3fn", **options):
    pool = PagedKV(num_pages, page_size, head_dim, dtype=dtype, device=DEVICE[backend], **options)
    kv = rows("normal", pool.num_slots, head_dim, BF16 if dtype != "float16" else np.float16)
    pool.store(put(backend, np.arange(pool.num_slots)), put(backend, kv))
    return pool, kv


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_shapes_and_contents_of_a_new_pool(backend, dtype, page_size):
    pool = PagedKV(6, page_size, 128, dtype=dtype, group_size=32, device=DEVICE[backend])
    assert pool.codes.shape == ((6, 128) if page_size == 1 else (6, 4, 128))
    assert (pool.num_pages, pool.page_size, pool.head_dim, pool.num_slots) == (6, page_size, 128, 6 * page_size)
    assert pool.dtype == dtype
    assert type(pool.codes).__module__.startswith(backend)
    if dtype == "float8_e4m3fn":
        assert pool.scales.shape == (6, 4)
        assert pool.scales.dtype == np.float32
        assert pool.nbytes == 6 * page_size * 128 + 6 * 4 * 4
        assert (get(pool.scales) > 0).all()
    else:
        assert pool.scales is None
        assert pool.nbytes == 6 * page_size * 256
    assert (get(pool.dequantize()) == 0).all()
    assert dtype in repr(pool)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_store_grow_copy_dequantize(backend, dtype, page_size):
    pool, kv = filled(backend, page_size=page_size, dtype=dtype)
    before = get(pool.dequantize())
    tolerance = 2.0**-4 if dtype == "float8_e4m3fn" else 0
    assert np.abs(before - kv.astype(np.float32)).max() <= tolerance * np.abs(kv.astype(np.float32)).max()
    if dtype != "float8_e4m3fn":
        same_bits(pool.dequantize(None, dtype), kv)

    slots = pool.num_slots
    pool.grow(9)
    assert pool.num_pages == 9
    same_bits(get(pool.dequantize())[:slots], before)
    assert not get(pool.dequantize())[slots:].any()

    src, dst = np.array([1, 0, 5, -1, 3, 12], np.int32), np.array([0, 1, 7, 2, 7, 2], np.int32)
    pool.copy_pages(put(backend, src), put(backend, dst))
    want = np.concatenate([before, np.zeros((3 * page_size, 64), np.float32)]).reshape(9, page_size, 64)
    old = want.copy()
    want[0], want[1], want[7] = old[1], old[0], old[3]
    same_bits(pool.dequantize(), want.reshape(-1, 64))

    picked = get(pool.dequantize(put(backend, np.array([3, -1, 0, 10**12])), "bfloat16"))
    assert np.isnan(picked[[1, 3]].astype(np.float32)).all()
    same_bits(picked[[0, 2]], get(pool.dequantize(None, "bfloat16"))[[3, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_copy_slots(backend, dtype, page_size):
    pool, _ = filled(backend, page_size=page_size, dtype=dtype)
    before = get(pool.dequantize())
    n = pool.num_slots
    src, dst = np.array([1, 0, 5, -1, 3, n, 2]), np.array([0, 1, 2, 3, 2, 4, -7])
    pool.copy_slots(put(backend, src), put(backend, dst))
    want = before.copy()
    want[0], want[1], want[2] = before[1], before[0], before[3]
    if dtype == "float8_e4m3fn" and page_size > 1:
        assert np.abs(get(pool.dequantize()) - want).max() <= 2.0**-4 * np.abs(want).max()
        untouched = np.arange(n) >= page_size
        same_bits(get(pool.dequantize())[untouched], want[untouched])
    else:
        same_bits(pool.dequantize(), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_is_paged_decode_of_the_pool(backend, dtype):
    pool, kv = filled(backend, num_pages=12, page_size=4, head_dim=128, dtype=dtype, group_size=32)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 128)).astype(kv.dtype)
    indices, indptr = np.array([5, 40, -1, 7, 47, 0], np.int32), np.array([0, 4, 6], np.int32)
    given_ = [put(backend, a) for a in (q, indices, indptr)]
    sink = put(backend, np.array([0.5, -1, 2], np.float32))
    out, lse = pool.decode(*given_, sink, 0.11, return_lse=True)
    want, want_lse = paged_decode(
        given_[0], pool.codes, *given_[1:], sink, 0.11, pool.scales, group_size=32, return_lse=True
    )
    same_bits(out, want)
    same_bits(lse, want_lse)


def attention(q, rows_, indices, indptr, scale):
    """float64, one token at a time."""
    out = np.zeros(q.shape)
    for t in range(len(q)):
        listed = [s for s in indices[indptr[t] : indptr[t + 1]] if 0 <= s < len(rows_)]
        if listed:
            kv = rows_[listed].astype(np.float64)
            score = q[t].astype(np.float64) @ kv.T * scale
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            out[t] = weight @ kv / weight.sum(axis=1, keepdims=True)
    return out


# One step of a random sequence; numbers are taken modulo what the pool has by then, plus a few that miss it.
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"),
            st.lists(st.integers(-2, 60), min_size=0, max_size=12),
            st.integers(0, 2**31),
            st.floats(2.0**-12, 2.0**12),
        ),
        st.tuples(st.just("grow"), st.integers(0, 3)),
        st.tuples(st.just("copy_slots"), st.lists(st.tuples(st.integers(-2, 60), st.integers(-2, 60)), max_size=6)),
        st.tuples(st.just("copy_pages"), st.lists(st.tuples(st.integers(-2, 20), st.integers(-2, 20)), max_size=4)),
        st.tuples(st.just("decode"), st.lists(st.integers(-2, 60), max_size=12), st.integers(0, 2**31)),
    ),
    max_size=14,
)


class Model:
    """What the pool should hold: float64 rows by slot, each with the error its codes may have, element by element."""

    def __init__(self, pool, backend):
        self.pool, self.backend = pool, backend
        self.rows, self.error = {}, {}

    def unit(self, slot, x):
        """Half a unit in the last place of x's code under its present scale."""
        if self.pool.scales is None:
            return np.zeros(x.shape)
        scale = np.repeat(get(self.pool.scales)[slot // self.pool.page_size].astype(np.float64), 64)
        size = np.maximum(np.abs(x) / scale, 2.0**-9)
        return 0.5 * np.exp2(np.maximum(np.floor(np.log2(size)), -6) - 3) * scale * (1 + 1e-6)

    def put(self, *arrays):
        return [put(self.backend, a) for a in arrays]

    def store(self, slots, seed, size):
        kv = (rows("normal", len(slots), self.pool.head_dim, np.float32, seed) * np.float32(size)).astype(
            np.float16 if self.pool.dtype == "float16" else BF16
        )
        self.pool.store(*self.put(np.array(slots, np.int64), kv))
        for slot, row in zip(slots, kv.astype(np.float64), strict=True):
            if 0 <= slot < self.pool.num_slots:
                self.rows[slot] = row
        for slot in {s for s in slots if 0 <= s < self.pool.num_slots}:
            self.error[slot] = self.unit(slot, self.rows[slot])

    def grow(self, more):
        self.pool.grow(self.pool.num_pages + more)

    def copy_slots(self, pairs):
        src, dst = (np.array([p[i] for p in pairs], np.int32) for i in (0, 1))
        old_rows, old_error = dict(self.rows), dict(self.error)
        self.pool.copy_slots(*self.put(src, dst))
        n = self.pool.num_slots
        kept = [(s, d) for s, d in pairs if 0 <= s < n and 0 <= d < n]
        nothing = np.zeros(self.pool.head_dim)
        for s, d in kept:
            self.rows[d] = old_rows.get(s, nothing)
            self.error[d] = old_error.get(s, nothing)
        if self.pool.page_size > 1:
            for d in {d for _, d in kept}:
                reach = np.abs(self.rows[d]) + self.error[d]
                self.error[d] = self.error[d] + self.settled(d) + self.unit(d, reach)

    def copy_pages(self, pairs):
        src, dst = (np.array([p[i] for p in pairs], np.int32) for i in (0, 1))
        old_rows, old_error = dict(self.rows), dict(self.error)
        self.pool.copy_pages(*self.put(src, dst))
        n, size = self.pool.num_pages, self.pool.page_size
        for s, d in pairs:
            if 0 <= s < n and 0 <= d < n:
                for offset in range(size):
                    for to, old in ((self.rows, old_rows), (self.error, old_error)):
                        to.pop(d * size + offset, None)
                        if s * size + offset in old:
                            to[d * size + offset] = old[s * size + offset]

    def settled(self, slot):
        """What later growth of the page's scale may have cost: half the least code, twice over for earlier growths."""
        if self.pool.scales is None or self.pool.page_size == 1:
            return 0.0
        scale = get(self.pool.scales)[slot // self.pool.page_size].astype(np.float64)
        return np.repeat(scale, 64) * 2.0**-9

    def check(self):
        values = get(self.pool.dequantize()).astype(np.float64)
        assert values.shape == (self.pool.num_slots, self.pool.head_dim)
        for slot in range(self.pool.num_slots):
            if slot in self.rows:
                wrong = np.abs(values[slot] - self.rows[slot])
                assert (wrong <= self.error[slot] + self.settled(slot)).all(), f"slot {slot}"
            else:
                assert not values[slot].any(), f"slot {slot} was never written"

    def decode(self, slots, seed):
        dtype = np.float16 if self.pool.dtype == "float16" else BF16
        q = np.random.default_rng(seed).standard_normal((2, 2, self.pool.head_dim)).astype(dtype)
        indices = np.array(slots, np.int32)
        indptr = np.array([0, len(slots) // 3, len(slots)], np.int32)
        scale = 2.0**-12  # rows reach 2**14
        out = get(self.pool.decode(*self.put(q, indices, indptr), None, scale)).astype(np.float64)
        want = attention(q, get(self.pool.dequantize()), indices, indptr, scale)
        assert np.linalg.norm(out - want) <= 4e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(steps=STEPS)
def test_random_sequences_against_a_dictionary_of_rows(backend, dtype, page_size, steps):
    model = Model(PagedKV(8 // page_size, page_size, 64, dtype=dtype, device=DEVICE[backend]), backend)
    for name, *arguments in steps:
        getattr(model, name)(*arguments)
    model.check()


# The founding error, "kv_scales shape does not match", and its four situations.


def test_grown_cache():
    pool, kv = filled("numpy", num_pages=4, head_dim=512)
    codes, scales = pool.codes, pool.scales
    grown = np.concatenate([codes, np.zeros((4, 512), E4M3)])
    q = np.ones((1, 1, 512), BF16)
    for call in (
        lambda: paged_decode(q, grown, np.zeros(1, np.int32), np.array([0, 1], np.int32), kv_scales=scales),
        lambda: store_kv(grown, scales, np.array([5]), kv[:1]),
        lambda: dequantize_kv(grown, scales),
        lambda: PagedKV.from_arrays(grown, scales),
    ):
        with pytest.raises(ValueError, match=r"grew without its scales \(4 rows of scales for 8 pages\)"):
            call()
    pool.grow(8)
    assert pool.scales.shape == (8, 8)
    pool.store(np.array([5]), kv[:1])
    pool.decode(q, np.array([5], np.int32), np.array([0, 1], np.int32))


def test_other_page_layout():
    """Codes in pages of four, scales one row a slot."""
    pool, kv = filled("numpy", num_pages=8, head_dim=512)
    paged = pool.codes.reshape(2, 4, 512)
    for call in (
        lambda: dequantize_kv(paged, pool.scales),
        lambda: store_kv(paged, pool.scales, np.array([5]), kv[:1]),
        lambda: PagedKV.from_arrays(paged, pool.scales),
    ):
        with pytest.raises(ValueError, match="one row of scales per slot"):
            call()
    made = PagedKV(2, 4, 512)
    assert made.codes.shape == (2, 4, 512)
    assert made.scales.shape == (2, 8)


def test_per_token_scales():
    pool, kv = filled("numpy", num_pages=8, head_dim=512)
    for call in (
        lambda: dequantize_kv(pool.codes, pool.scales[:, :1]),
        lambda: store_kv(pool.codes, pool.scales[:, :1], np.array([5]), kv[:1]),
        lambda: PagedKV.from_arrays(pool.codes, pool.scales[:, :1]),
    ):
        with pytest.raises(ValueError, match="one scale per row"):
            call()


def test_changed_head_dim():
    pool, kv = filled("numpy", num_pages=8, head_dim=512)
    other = quantize_kv(np.ones((8, 256), np.float32))
    for call in (
        lambda: dequantize_kv(other.codes, pool.scales),
        lambda: store_kv(other.codes, pool.scales, np.array([5]), kv[:1, :256].copy()),
        lambda: PagedKV.from_arrays(other.codes, pool.scales),
    ):
        with pytest.raises(ValueError, match="8 groups a row, as for a head dimension of 512"):
            call()
    with pytest.raises(ValueError, match="same head dimension, got 256 and 512"):
        pool.store(np.array([0]), kv[:1, :256].copy())


def test_codes_and_scales_cannot_be_replaced_apart():
    pool, _ = filled("numpy")
    for name in ("codes", "scales"):
        with pytest.raises(AttributeError):
            setattr(pool, name, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_save_and_load(backend, dtype, page_size, tmp_path):
    pool, _ = filled(backend, page_size=page_size, dtype=dtype, group_size=32, scale_format="pow2")
    path = tmp_path / "pool.safetensors"
    path.write_bytes(b"an older file")
    pool.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    for device in {"cpu", DEVICE[backend]}:
        again = PagedKV.load(path, device=device)
        same_bits(again.codes, pool.codes)
        assert (again.page_size, again.dtype, again.scale_format) == (page_size, dtype, "pow2")
        if pool.scales is not None:
            same_bits(again.scales, pool.scales)
            assert again.group_size == 32


def test_file_is_plain_safetensors(tmp_path):
    """Read by hand after the published format: 8 bytes of header length, JSON, then the tensors' bytes."""
    pool, _ = filled("numpy", num_pages=3)
    pool.save(tmp_path / "pool")
    data = (tmp_path / "pool").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header["codes"]["dtype"] == "F8_E4M3"
    assert header["codes"]["shape"] == [3, 64]
    begin, end = header["scales"]["data_offsets"]
    assert np.array_equal(np.frombuffer(data[8 + length :][begin:end], np.float32).reshape(3, 1), pool.scales)
    assert all(isinstance(v, str) for v in header["__metadata__"].values())


def test_damaged_and_foreign_files_are_refused(tmp_path):
    pool, _ = filled("numpy", page_size=4)
    path = tmp_path / "pool"
    pool.save(path)
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    def with_header(change):
        altered = json.loads(json.dumps(header))
        change(altered)
        text = json.dumps(altered).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    damaged = [good[:n] for n in (0, 4, 8, 60, 8 + length, len(good) - 1)]
    damaged += [good + b"\0", b"PK\x03\x04" + good, b"\xff" * 200, good[:8] + b"\xff" * length + good[8 + length :]]
    damaged += [
        with_header(lambda h: h.pop("scales")),
        with_header(lambda h: h.pop("codes")),
        with_header(lambda h: h.pop("__metadata__")),
        with_header(lambda h: h["__metadata__"].update(format="another")),
        with_header(lambda h: h["__metadata__"].update(page_size="2")),
        with_header(lambda h: h["__metadata__"].update(page_size="x")),
        with_header(lambda h: h["__metadata__"].update(group_size="32")),
        with_header(lambda h: h["codes"].update(shape=[12, 2, 64])),
        with_header(lambda h: h["codes"].update(shape=[6, 4, 63])),
        with_header(lambda h: h["codes"].update(shape=[-6, -4, 64])),
        with_header(lambda h: h["codes"].update(dtype="F64")),
        with_header(lambda h: h["codes"].update(dtype=["F32"])),
        with_header(lambda h: h["codes"].update(data_offsets=[1, 1537])),
        with_header(lambda h: h["scales"].update(data_offsets=[0, 24])),
        with_header(lambda h: h.update(codes=7)),
        with_header(lambda h: h.update(__metadata__=[])),
        b"\x02" + bytes(7) + b"[]",
    ]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ValueError, match="pool"):
            PagedKV.load(path)
    with pytest.raises(FileNotFoundError):
        PagedKV.load(tmp_path / "nothing")
    np.savez(tmp_path / "other.npz", codes=pool.codes.view(np.uint8))
    with pytest.raises(ValueError, match="pool"):
        PagedKV.load(tmp_path / "other.npz")


@pytest.mark.gpu
def test_wide_pool_of_torch_tensors():
    torch = pytest.importorskip("torch")
    codes = torch.zeros((6, 4, 512), dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.full((6, 8), 2.0**-80, device="cuda")
    pool = PagedKV.from_arrays(codes, scales)
    kv = torch.randn(24, 512, device="cuda", dtype=torch.bfloat16)
    pool.store(torch.arange(24, device="cuda"), kv)
    assert pool.codes is codes
    twin = PagedKV(6, 4, 512)
    twin.store(np.arange(24), kv.view(torch.uint16).cpu().numpy().view(BF16))
    for change in (
        lambda p, put_: p.copy_slots(put_([0, 5]), put_([9, -1])),
        lambda p, put_: p.copy_pages(put_([0, 5]), put_([2, 9])),
        lambda p, put_: p.grow(8),
    ):
        change(pool, lambda a: torch.tensor(a, device="cuda"))
        change(twin, np.array)
        assert isinstance(pool.codes, torch.Tensor)
        same_bits(pool.codes.view(torch.uint8).cpu().numpy(), twin.codes)
        same_bits(pool.scales.cpu().numpy(), twin.scales)
    rows_ = pool.dequantize(None, torch.bfloat16)
    assert rows_.dtype == torch.bfloat16
    same_bits(rows_.view(torch.uint16).cpu().numpy().view(BF16), twin.dequantize(None, "bfloat16"))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: PagedKV(2, 1, 500), ValueError, "multiple of 64"),
        (lambda: PagedKV(-1), ValueError, "num_pages"),
        (lambda: PagedKV(2, 0), ValueError, "page_size"),
        (lambda: PagedKV(2, dtype="float32"), TypeError, "float32"),
        (lambda: PagedKV(2, dtype=ml_dtypes.float8_e5m2), TypeError, "float8_e5m2"),
        (lambda: PagedKV(2, 1, 192, group_size=128), ValueError, "D = 192, group_size = 128"),
        (lambda: PagedKV(2, device="gpu"), ValueError, "'gpu'"),
        (lambda: PagedKV(2, scale_format="e8m0"), ValueError, "e8m0"),
        (lambda: PagedKV.from_arrays(np.zeros((2, 64), np.uint8)), ValueError, "scales is missing"),
        (
            lambda: PagedKV.from_arrays(np.zeros((2, 64), ml_dtypes.float8_e4m3fnuz), SCALE),
            TypeError,
            "float8_e4m3fnuz",
        ),
        (lambda: PagedKV(4).grow(3), ValueError, "it has 4 pages, got 3"),
        (lambda: PagedKV(4).copy_pages(np.zeros(2, np.int32), np.zeros(3, np.int32)), ValueError, "same length"),
        (lambda: PagedKV(4).copy_slots(np.zeros(2, np.int32), np.zeros(2, np.int64)), TypeError, "same dtype"),
        (lambda: PagedKV(4).copy_slots(np.zeros(2), np.zeros(2)), TypeError, "float64"),
        (lambda: PagedKV(4).dequantize(np.zeros(2)), TypeError, "float64"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


SCALE = np.ones((2, 1), np.float32)
