"""How deep_gemm is called, judged and refused, with a stand-in for the library that computes in torch on the CPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.errors import MissingBackend, WrongBackend
from graphmoe.formats import ue8m0
from graphmoe.formats.fp8_block import quantize_rows, quantize_weight
from graphmoe.gemm import deep_gemm
from graphmoe.gemm.deep_gemm import DeepGemm
from graphmoe.gemm.torch import TorchGemm
from graphmoe.layout import LayoutKind, RowLayout

CPU = torch.device("cpu")
KINDS: tuple[LayoutKind, ...] = ("masked", "compact", "psum")
OWN_ALIGNMENT = 7
"""What the process had set before: no alignment that a layout has."""
Rows = Tensor | tuple[Tensor, Tensor]


class Library(ModuleType):
    """deep_gemm's grouped functions. `calls` holds what each call was given; `fails` and `wrong` are layouts that raise or come out wrong."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.alignment = OWN_ALIGNMENT
        self.calls: list[dict[str, Any]] = []
        self.fails: tuple[str, ...] = ()
        self.wrong: tuple[str, ...] = ()
        self.m_grouped_fp8_gemm_nt_masked = self.m_grouped_bf16_gemm_nt_masked = self._masked
        self.m_grouped_fp8_gemm_nt_contiguous = self.m_grouped_bf16_gemm_nt_contiguous = self._contiguous

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def set_mk_alignment_for_contiguous_layout(self, rows: int) -> None:
        self.alignment = rows

    def _masked(self, left: Rows, right: Rows, out: Tensor, masked_m: Tensor, expected_m: int) -> None:
        experts, slots = out.shape[:2]
        self._run(RowLayout("masked", experts, slots, experts, slots), left, right, out, masked_m, {"expected_m": expected_m})

    def _contiguous(self, left: Rows, right: Rows, out: Tensor, groups: Tensor, **options: Any) -> None:
        kind: LayoutKind = "psum" if options.get("use_psum_layout") else "compact"
        weight = right[0] if isinstance(right, tuple) else right
        one_segment = (left[0][None], left[1][None]) if isinstance(left, tuple) else left[None]
        self._run(RowLayout(kind, weight.shape[0], self.alignment, 1, out.shape[0]), one_segment, right, out[None], groups, options)

    def _run(self, layout: RowLayout, left: Rows, right: Rows, out: Tensor, groups: Tensor, options: dict[str, Any]) -> None:
        a, a_scales = left if isinstance(left, tuple) else (left, None)
        b, b_scales = right if isinstance(right, tuple) else (right, None)
        self.calls.append({"kind": layout.kind, "a_scales": a_scales, "b_scales": b_scales, "options": options, "alignment": self.alignment})
        if layout.kind in self.fails:
            raise RuntimeError("no kernel image")
        TorchGemm()(layout, a, None if a_scales is None else a_scales.transpose(1, 2), b, b_scales, groups, out, 1)
        if layout.kind in self.wrong:
            out *= 1.02


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in, installed on an SM90 whose library nobody has judged yet."""
    made = Library()
    monkeypatch.setitem(sys.modules, "deep_gemm", made)
    monkeypatch.setattr(deep_gemm, "_CHECKED", set())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    on_sm(monkeypatch, 9)
    return made


def on_sm(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))


def run(gemm: Any, kind: LayoutKind, align: int, fmt: str, *, expected_rows: int = 37) -> tuple[Tensor, Tensor | None]:
    """One GEMM of three experts with 1, 0 and `align` rows; its result and the scales of its rows."""
    counts, (n, k) = (1, 0, align), (128, 384)
    slots, segments, segment_rows = (align, 3, align) if kind == "masked" else (align, 1, 3 * align)
    layout = RowLayout(kind, 3, slots, segments, segment_rows)
    groups = {
        "masked": torch.tensor(counts),
        "psum": torch.tensor([1, align, 2 * align]),
        "compact": torch.cat([torch.tensor([0]), torch.full((align - 1,), -1), torch.full((align,), 2), torch.full((align,), -1)]),
    }[kind].int()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(segments, segment_rows, k, generator=generator).bfloat16(), torch.randn(3, n, k, generator=generator).bfloat16()
    a_scales = b_scales = None
    if fmt != "bf16":
        (a, a_scales), (b, b_scales) = quantize_rows(a), quantize_weight(b)
        a_scales = a_scales.transpose(1, 2).contiguous()
    out = torch.zeros(segments, segment_rows, n, dtype=torch.bfloat16)
    gemm(layout, a, a_scales, b, b_scales, groups, out, expected_rows)
    return out, a_scales


@pytest.mark.parametrize("align", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["fp8_block", "bf16"])
def test_every_layout_reaches_the_library_as_it_is_meant(fmt: str, kind: LayoutKind, align: int, library: Library) -> None:
    gemm = DeepGemm(fmt, CPU)
    library.calls.clear()
    got, _ = run(gemm, kind, align, fmt)
    want, _ = run(TorchGemm(), kind, align, fmt)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    [call] = library.calls
    assert call["kind"] == kind
    assert (
        call["options"]
        == {
            "masked": {"expected_m": 37},
            "compact": {},
            "psum": {"use_psum_layout": True, "expected_m_for_psum_layout": 37},
        }[kind]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_passed_where_they_lie_with_neighbouring_rows_next_to_each_other(kind: LayoutKind, library: Library) -> None:
    gemm = DeepGemm("fp8_block", CPU)
    library.calls.clear()
    _, stored = run(gemm, kind, 64, "fp8_block")
    [call] = library.calls
    passed = call["a_scales"]
    rows = stored.shape[2]
    assert passed.shape == (stored.shape[0], rows, 3)
    assert passed.stride()[1:] == (1, rows)
    assert passed.data_ptr() == stored.data_ptr()
    assert call["b_scales"].shape == (3, 1, 3)
    assert call["b_scales"].is_contiguous()


@pytest.mark.parametrize("kind", ["compact", "psum"])
@pytest.mark.parametrize("align", [64, 128])
def test_the_alignment_of_the_process_is_the_layouts_during_a_call_alone(kind: LayoutKind, align: int, library: Library) -> None:
    gemm = DeepGemm("bf16", CPU)
    assert library.alignment == OWN_ALIGNMENT, "the self-check restores it too"
    library.calls.clear()
    run(gemm, kind, align, "bf16")
    assert [call["alignment"] for call in library.calls] == [align]
    assert library.alignment == OWN_ALIGNMENT
    library.fails = KINDS
    with pytest.raises(RuntimeError, match="no kernel image"):
        run(gemm, kind, align, "bf16")
    assert [call["alignment"] for call in library.calls] == [align, align]
    assert library.alignment == OWN_ALIGNMENT


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize("fmt", ["fp8_block", "ue8m0", "bf16"])
def test_a_library_that_computes_right_is_judged_once(fmt: str, major: int, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    on_sm(monkeypatch, major)
    DeepGemm(fmt, CPU)
    assert {call["kind"] for call in library.calls} == set(KINDS)
    scales = [call["a_scales"] for call in library.calls]
    assert {None if scale is None else scale.dtype for scale in scales} == {None if fmt == "bf16" else torch.int32 if major == 10 else torch.float32}
    assert all(scale is None or scale.stride(1) == 1 for scale in scales)
    judged = len(library.calls)
    DeepGemm(fmt, CPU)
    assert len(library.calls) == judged
    DeepGemm("fp8_block" if fmt == "bf16" else "bf16", CPU)
    assert len(library.calls) == 2 * judged, "the other kind has functions of its own"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["fp8_block", "bf16"])
def test_a_library_that_computes_wrong_is_refused_each_time(fmt: str, kind: LayoutKind, library: Library) -> None:
    library.wrong = (kind,)
    for _ in range(2):
        with pytest.raises(WrongBackend, match=rf"{kind}.*off by 0\.02"):
            DeepGemm(fmt, CPU)
    library.wrong = ()
    DeepGemm(fmt, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_a_library_that_fails_its_first_gemm_is_missing_and_says_why(kind: LayoutKind, library: Library) -> None:
    library.fails = (kind,)
    for _ in range(2):
        with pytest.raises(MissingBackend, match=rf"{kind}.*no kernel image.*pip install 'graphmoe\[hopper\]'"):
            DeepGemm("bf16", CPU)
    assert library.alignment == OWN_ALIGNMENT
    library.fails = ()
    DeepGemm("bf16", CPU)


def test_a_failure_that_only_shows_when_the_device_is_waited_for_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(MissingBackend, match="illegal memory access"):
        DeepGemm("bf16", CPU)


@pytest.mark.parametrize("layout", KINDS)
def test_only_layouts_that_are_used_are_judged(layout: LayoutKind, library: Library) -> None:
    library.wrong = tuple(kind for kind in KINDS if kind != layout)
    DeepGemm("fp8_block", CPU, [layout])
    assert [call["kind"] for call in library.calls] == [layout]
    for other in library.wrong:
        with pytest.raises(WrongBackend, match=other):
            DeepGemm("fp8_block", CPU, [layout, other])


def test_a_device_or_a_version_without_grouped_gemms_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    on_sm(monkeypatch, 8)
    with pytest.raises(MissingBackend, match="SM80"):
        DeepGemm("bf16", CPU)
    on_sm(monkeypatch, 9)
    library.bf16_m_grouped_gemm_nt_masked = library.m_grouped_bf16_gemm_nt_masked
    del library.m_grouped_bf16_gemm_nt_masked
    DeepGemm("bf16", CPU)  # other versions call it so
    del library.m_grouped_bf16_gemm_nt_contiguous
    with pytest.raises(MissingBackend, match="none of m_grouped_bf16_gemm_nt_contiguous"):
        DeepGemm("bf16", CPU)


def test_packed_scales_reach_the_library_in_its_own_layout(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    on_sm(monkeypatch, 10)
    gemm = DeepGemm("ue8m0", CPU)
    library.calls.clear()
    (a, a_rows), (b, b_scales) = ue8m0.quantize_rows(torch.randn(1, 64, 640)), ue8m0.quantize_weight(torch.randn(1, 128, 640))
    words = ue8m0.pack(a_rows)
    out = torch.empty(1, 64, 128, dtype=torch.bfloat16)
    ends = torch.tensor([64], dtype=torch.int32)
    gemm(RowLayout("psum", 1, 64, 1, 64), a, words.transpose(1, 2), b, ue8m0.pack_weight_scale(b_scales, 128), ends, out, 64)
    [call] = library.calls
    assert torch.equal(call["a_scales"], words)
    assert call["a_scales"].stride()[1:] == (1, 64)
