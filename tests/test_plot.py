"""Pictures of a benchmark record, drawn from synthetic rows into a temporary folder."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from cupy_paged import bench, plot


def synthetic():
    """A record whose times are twice the floor plus 5 us: of no GPU, for these tests alone."""
    ceilings = bench.Ceilings(4000.0, 800.0)
    rows = []
    for case in bench.PRESETS["full"]:
        least, bound = bench.floor_us(case, ceilings)
        us = 2 * least + 5
        tflops, gbs = bench.flops(case) / us / 1e6, bench.moved_bytes(case) / us / 1e3
        row = bench.Row(*case, us, us, us, tflops, gbs, least, bound, 100 * least / us, 10.0, 1.7e-3, None)
        rows.append(bench.asdict(row))
    return {
        "schema": bench.SCHEMA,
        "backend": "cuda",
        "gpu": {"device": "synthetic"},
        "ceilings": bench.asdict(ceilings),
        "rows": rows,
    }


def test_intensity_is_flops_for_each_byte():
    row = {"num_heads": 16, "num_tokens": 2, "length": 10}
    assert plot.intensity(row) == pytest.approx(655360 / (10880 + 65536))


def test_series_have_two_points_or_more_in_order():
    rows = synthetic()["rows"]
    series = {(h, v): points for h, v, points in plot.lines_of(rows, "num_tokens", "length")}
    assert [t for t, _ in series[16, 2176]] == [8, 32, 64, 128, 256, 512]
    assert (16, 65536) not in series


def test_rivals_are_paired_by_case():
    record = synthetic()
    first = record["rows"][0]
    first["peer_us"] = 99.0
    case = {k: first[k] for k in ("num_heads", "num_tokens", "length")}
    record["alternatives"] = [
        {"name": "torch", **case, "us": 50.0},
        {"name": "torch", **case, "num_tokens": 12345, "us": 50.0},
        {"name": "sglang", **case, "failed": "no"},
    ]
    found = plot.rivals(record)
    assert found == {"best peer (recorded on an H200)": [(first["us"], 99.0)], "torch": [(first["us"], 50.0)]}


@pytest.mark.parametrize("record", [{}, {"schema": bench.SCHEMA, "rows": []}, {"schema": 0, "rows": [1]}])
def test_a_record_that_cannot_be_drawn_is_named(record, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    assert plot.main([str(path), "--folder", str(tmp_path)]) == 1
    assert "record" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.svg"))


def test_without_matplotlib_it_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(synthetic()))
    assert plot.main([str(path)]) == 1
    assert "cupy-paged[bench]" in capsys.readouterr().err


def luminance(colour):
    """Relative luminance of '#rrggbb', as the Web Content Accessibility Guidelines define it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", [plot.INK, *plot.COLOURS])
@pytest.mark.parametrize("ground", ["#ffffff", "#1e2129"])
def test_colours_stand_out_on_light_and_dark(colour, ground):
    a, b = sorted((luminance(colour), luminance(ground)))
    assert (b + 0.05) / (a + 0.05) >= 3  # the least for graphics in the guidelines


def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = synthetic()
    record["rows"][0]["peer_us"] = 9.0
    path = tmp_path / "gpu_record.json"
    path.write_text(json.dumps({"benchmark": record}))  # as the GPU record holds it
    assert plot.main([str(path), "--folder", str(tmp_path / "a")]) == 0
    names = [line.rsplit("/", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert names == ["roofline.svg", "latency-slots.svg", "latency-tokens.svg", "alternatives.svg"]
    plot.draw(record, tmp_path / "b")
    for name in names:
        text = (tmp_path / "a" / name).read_text()
        ElementTree.fromstring(text)
        assert text == (tmp_path / "b" / name).read_text(), "equal records give equal files"
        assert not re.search(r"fill: #ffffff", text), "the ground is transparent"
    for heads in (8, 16, 32, 64, 128):
        assert f"H = {heads}" in (tmp_path / "a" / "roofline.svg").read_text()
    assert "800 TFLOP/s" in (tmp_path / "a" / "roofline.svg").read_text()
