"""The benchmark's arithmetic and tables; no GPU needed."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import oracle
import pytest

from cupy_paged import alternatives, bench

H200 = bench.Ceilings(copy_gbs=4282, matmul_tflops=788)


@pytest.mark.parametrize(
    ("case", "floor", "bound"),
    [  # as published for this GPU
        ((128, 128, 2176), 92.7, "tensor"),
        ((64, 512, 2176), 185.3, "tensor"),
        ((64, 128, 640), 15.9, "memory"),
        ((32, 128, 2176), 41.5, "memory"),
        ((16, 128, 2176), 40.4, "memory"),
        ((16, 512, 2176), 161.6, "memory"),
        ((128, 1, 65536), 21.8, "tensor"),
    ],
)
def test_floors(case, floor, bound):
    least, what = bench.floor_us(bench.Case(*case), H200)
    assert least == pytest.approx(floor, abs=0.06)
    assert what == bound


def test_full_preset_is_the_whole_table():
    assert len(bench.PRESETS["full"]) == 65
    assert len(set(bench.PRESETS["full"])) == 65
    assert set(bench.PEER_US) == {c for c in bench.PRESETS["full"] if c.num_heads != 8}


def test_markdown_has_a_line_for_each_row():
    row = bench.Row(16, 1, 640, 6.5, 6.4, 6.7, 3.2, 54.0, 0.1, "memory", 1.4, 14.0, 1.7e-3, 8.2)
    record = {
        "gpu": {"device": "GPU"},
        "ceilings": bench.asdict(H200),
        "rows": [bench.asdict(row), bench.asdict(row)],
    }
    lines = bench.markdown(record).splitlines()
    assert lines[0] == "GPU: copy 4282 GB/s, bf16 matmul 788 TFLOP/s, in the same run"
    assert lines[4] == lines[5]
    assert lines[4].startswith("| 16 | 1 | 640 | 6.5 | 6.4-6.7 |")


def test_without_a_gpu_it_times_numpy_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(bench, "gpu_missing", lambda: "no CUDA GPU")
    assert bench.main(["--shape", "2,3,10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "NumPy backend" in lines[0]
    assert lines[-1].startswith("| 2 | 3 | 10 |")


def test_numpy_record_is_written_and_compares_with_itself(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "gpu_missing", lambda: "no CUDA GPU")
    path = tmp_path / "numpy.json"
    assert bench.main(["--shape", "2,3,10", "--shape", "1,1,4", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["schema"] == bench.SCHEMA
    assert record["backend"] == "numpy"
    assert [(r["num_heads"], r["num_tokens"], r["length"]) for r in record["rows"]] == [(2, 3, 10), (1, 1, 4)]
    assert all(0 < r["us_min"] <= r["us"] <= r["us_max"] for r in record["rows"])
    assert [(c, v) for c, _, v in bench.compare(record, record)] == [((2, 3, 10), "same"), ((1, 1, 4), "same")]
    capsys.readouterr()
    assert bench.main(["--shape", "2,3,10", "--compare", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| 2 | 3 | 10 |")
    with pytest.raises(ValueError, match="numpy and cuda"):
        bench.compare(record, record_of(60.0))


def test_presets_of_the_models():
    assert {c.num_heads for c in bench.PRESETS["v4-flash"]} == {64}
    assert {c.num_heads for c in bench.PRESETS["v4-pro"]} == {128}
    assert {c.length for c in bench.PRESETS["v4-flash"]} == {128, 128 + 512, 128 + 256}
    assert {c.length for c in bench.PRESETS["v4-pro"]} == {128, 128 + 1024, 128 + 256}


def test_flops_and_bytes_of_a_shape():
    case = bench.Case(num_heads=16, num_tokens=2, length=10)
    assert bench.flops(case) == 2 * 2 * (2 * 16 * 10 * 512)  # two products, a multiplication and an addition each
    assert bench.moved_bytes(case) == 2 * 10 * (512 + 8 * 4) + 2 * (2 * 16 * 512 * 2)


def test_table_of_alternatives_has_times_and_failures():
    ours = [{"num_heads": 16, "num_tokens": 1, "length": 640, "us": 10.0}]
    case = {"num_heads": 16, "num_tokens": 1, "length": 640}
    rows = [
        {"name": "torch", **case, "us": 50.0, "us_min": 49.0, "us_max": 51.0, "error": 3e-3},
        {"name": "sglang", **case, "failed": "no | kernel"},
    ]
    lines = alternatives.table(rows, ours).splitlines()[2:]
    assert lines[0] == "| 16 | 1 | 640 | torch | 50.0 | 10.0 | 5.0 | 3.00e-03 |"
    assert lines[1] == "| 16 | 1 | 640 | sglang | failed: no / kernel | 10.0 | | |"


def test_an_alternative_that_cannot_run_is_a_row_with_the_reason(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(alternatives, "_measure", refuse)
    row = alternatives.measure("torch", bench.Case(16, 1, 640), None, None)
    assert row == {"name": "torch", "num_heads": 16, "num_tokens": 1, "length": 640, "failed": "out of memory"}


def test_torch_alternative_is_attention():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 0x7E, (50, 128)).astype("uint8")
    scales = (0.01 * rng.random((50, 2)) + 0.005).astype("float32")
    slots = rng.integers(0, 50, (3, 20)).astype("int32")
    q = rng.standard_normal((3, 4, 128)).astype("float16")
    out = alternatives.attend(
        torch.from_numpy(q),
        torch.from_numpy(codes).view(torch.float8_e4m3fn),
        torch.from_numpy(scales),
        torch.from_numpy(slots),
    )
    rows = oracle.dequantized(codes.view(ml_dtypes.float8_e4m3fn), scales)
    expected, _ = oracle.attention(q, rows, slots.reshape(-1), np.arange(0, 61, 20, dtype="int32"))
    oracle.compare(out.numpy(), expected, 5e-3)


@pytest.mark.gpu
@pytest.mark.slow
def test_torch_alternative_is_timed_on_the_same_work():
    pytest.importorskip("torch")
    row = alternatives.measure("torch", bench.Case(16, 4, 640), bench.Pool(100_000), bench.flush_buffer())
    assert "failed" not in row, row["failed"]
    assert 0 < row["us_min"] <= row["us"] <= row["us_max"]
    assert row["error"] < 1e-2


def record_of(us, spread=0.1, bound="memory", copy_gbs=4000.0):
    row = bench.Row(16, 128, 2176, us, us - spread, us + spread, 1.0, 1.0, 40.0, bound, 60.0, 14.0, 1.7e-3, None)
    return {
        "schema": bench.SCHEMA,
        "ceilings": {"copy_gbs": copy_gbs, "matmul_tflops": 800.0},
        "rows": [bench.asdict(row)],
    }


@pytest.mark.parametrize(
    ("new", "old", "ratio", "verdict"),
    [
        (record_of(60.0), record_of(60.5), 60 / 60.5, "same"),
        (record_of(60.0, spread=3), record_of(64.0), 60 / 64, "same"),  # within the spread of the new run
        (record_of(60.0), record_of(70.0), 60 / 70, "faster"),
        (record_of(70.0), record_of(60.0), 70 / 60, "slower"),
        (record_of(60.0, copy_gbs=2000.0), record_of(30.0), 1.0, "same"),  # half the bandwidth, twice the time
        (record_of(60.0, bound="tensor", copy_gbs=2000.0), record_of(30.0, bound="tensor"), 2.0, "slower"),
    ],
)
def test_comparison(new, old, ratio, verdict):
    ((case, got, said),) = bench.compare(new, old)
    assert case == (16, 128, 2176)
    assert got == pytest.approx(ratio)
    assert said == verdict
    assert bench.comparison(new, old).endswith(f"| {ratio:.3f} | {verdict} |")


def test_only_shapes_of_both_records_compare():
    other = record_of(60.0)
    other["rows"][0]["length"] = 640
    assert bench.compare(record_of(60.0), other) == []
    with pytest.raises(ValueError, match="schemas"):
        bench.compare(record_of(60.0), {**record_of(60.0), "schema": 0})
