"""The benchmark's arithmetic and tables; no GPU needed."""

from __future__ import annotations

import pytest

from cupy_paged import bench

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
