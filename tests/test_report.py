"""A runtime's report as text: what it leaves out on the CPU, and that it fits a terminal."""

from __future__ import annotations

import pytest

from graphmoe.report import BucketReport, RuntimeReport

LONG = "gathered down_rows=128 down_stages=2 down_warps=4 tile=32 up_rows=128 up_stages=3 up_warps=4"


def report(*, emulated: bool, layers: int = 2) -> RuntimeReport:
    buckets = (
        BucketReport(1, LONG, "asked for", 8, 3 << 19, 4, 0 if emulated else 2048, 0.0 if emulated else 0.25),
        BucketReport(512, "psum block_e=64", "auto: no profile, psum with block_e 64", 1234567, 3 << 30, 6, 0, 0.5),
        BucketReport(1024, "psum block_e=64", "auto: no profile, psum with block_e 64", 12345678, 3 << 31, 6, 0, 0.5),
    )
    device, graphs = ("cpu", 0) if emulated else ("cuda:0", layers * len(buckets))
    return RuntimeReport(device, emulated, "fp8_block", "torch", layers, graphs, 6 << 30, 0, 0.1, False, "f" * 64, buckets)


def rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


def test_the_cpu_has_no_graphs_and_shows_none() -> None:
    text = str(report(emulated=True))
    assert rows(text)["1"] == ["gathered", "8", "1.50", "4", "-", "-"]
    assert "graphs emulated" in text
    assert "in capture" not in text


def test_a_gpu_shows_what_capture_took() -> None:
    text = str(report(emulated=False))
    assert rows(text)["1"] == ["gathered", "8", "1.50", "4", "2", "0.250"]
    assert "2 layers on cuda:0" in " ".join(text.split())
    assert "6 graphs" in text
    assert "0 allocations in capture" in " ".join(text.split())
    assert "1 layer on" in str(report(emulated=False, layers=1))


@pytest.mark.parametrize(("columns", "widest"), [(40, 80), (80, 80), (113, 113), (160, 160), (400, 160)])
def test_it_fits_the_terminal(columns: int, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between 80 and 160 columns, every number in one piece, every recipe with the buckets that have it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(report(emulated=False))
    assert max(map(len, text.splitlines())) <= widest
    assert rows(text)["1024"] == ["psum", "12345678", "6144.00", "6", "0", "0.500"]
    words = " ".join(text.split())
    assert f"bucket 1: {LONG} (asked for)" in words
    assert "buckets 512, 1024: psum block_e=64 (auto: no profile, psum with block_e 64)" in words
