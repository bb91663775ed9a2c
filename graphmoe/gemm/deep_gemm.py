"""deep_gemm's grouped GEMMs: found, judged, and called under one lock with their process-wide setting scoped.

A wheel can import and still be wrong for the installed torch, so a pair is judged by a table of what was run and by a tiny numeric self-check
at first use, never by import success. Facts about layouts and versions: the package's headers and README, and runs on an H200.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from graphmoe.errors import MissingBackend, WrongBackend
from graphmoe.formats import ue8m0
from graphmoe.formats.fp8_block import quantize_rows, quantize_weight
from graphmoe.gemm.torch import TorchGemm
from graphmoe.layout import LayoutKind, RowLayout

PROVEN = {"2.11": ("0.1.5", "0.1.5.post1"), "2.13": ("0.1.5.post3", "0.1.6", "0.1.7", "0.2.0"), "2.14": ("0.2.2", "0.2.3.post2", "0.2.5")}
"""torch minor version -> `sgl-deep-gemm` versions whose symbols load with it. Run here: torch 2.11 with 0.1.5."""

_REMEDY = "install the pair that is known to work: pip install 'graphmoe[hopper]' (torch 2.11 with sgl-deep-gemm 0.1.5)"
_NAMES = {
    "fp8_masked": ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"),
    "fp8_contiguous": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    "bf16_masked": ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"),
    "bf16_contiguous": ("m_grouped_bf16_gemm_nt_contiguous",),
}

# deep_gemm's settings and launch attributes are process-global and not thread-safe: every call of it goes through this lock.
_LOCK = threading.RLock()
_CHECKED: set[tuple[str, str, int]] = set()


class DeepGemm:
    """Grouped GEMMs of the installed deep_gemm: on SM90 with float32 scales, on SM100 with packed ones (that one has not been run).

    Args:
        fmt: weight format it will be called with.
        device: a CUDA device.
        layouts: row layouts it will be called with; the self-check runs that format in each of them.

    Raises:
        MissingBackend: not installed, does not load, or lacks a function; the message says what to install.
        WrongBackend: it loads, but a tiny GEMM comes out wrong.
    """

    name = "deep_gemm"

    def __init__(self, fmt: str, device: torch.device, layouts: Iterable[LayoutKind] = ("masked", "compact", "psum")) -> None:
        self._module = _import()
        kind = "bf16" if fmt == "bf16" else "fp8"
        self._masked = _resolve(self._module, f"{kind}_masked")
        self._contiguous = _resolve(self._module, f"{kind}_contiguous")
        major, minor = torch.cuda.get_device_capability(device)
        if major not in (9, 10):
            raise MissingBackend(f"deep_gemm's grouped GEMMs are for SM90 and SM100, this device is SM{major}{minor}")
        with _LOCK:
            for layout in layouts:
                key = (kind, layout, device.index or 0)
                if key not in _CHECKED:
                    self._self_check(kind, layout, device)
                    _CHECKED.add(key)

    def __call__(
        self,
        layout: RowLayout,
        a: Tensor,
        a_scales: Tensor | None,
        b: Tensor,
        b_scales: Tensor | None,
        groups: Tensor,
        out: Tensor,
        expected_rows: int,
    ) -> None:
        """See `graphmoe.gemm.GroupedGemm`. Scales pass in the strides that SM90 takes untouched: no copy, no extra kernel."""
        if layout.kind == "masked":
            left = a if a_scales is None else (a, a_scales.transpose(1, 2))
            arguments: tuple[Any, ...] = (left, b if b_scales is None else (b, b_scales), out, groups, expected_rows)
            with _LOCK:
                self._masked(*arguments)
            return
        left = a[0] if a_scales is None else (a[0], a_scales[0].T)
        psum = {"use_psum_layout": True, "expected_m_for_psum_layout": expected_rows} if layout.kind == "psum" else {}
        with _LOCK, _alignment(self._module, layout.align):
            self._contiguous(left, b if b_scales is None else (b, b_scales), out[0], groups, **psum)

    def _self_check(self, kind: str, layout_kind: LayoutKind, device: torch.device) -> None:
        """Two experts with 40 and 64 rows, in tiles of 64 (masked: slots of 128), against the same GEMM in torch."""
        counts, k, n = (40, 64), 256, 128
        slots, segments, segment_rows = (128, 2, 128) if layout_kind == "masked" else (64, 1, 128)
        layout = RowLayout(layout_kind, 2, slots, segments, segment_rows)
        groups = {
            "masked": torch.tensor(counts),
            "psum": torch.tensor([counts[0], 64 + counts[1]]),
            "compact": torch.cat([torch.full((counts[0],), 0), torch.full((64 - counts[0],), -1), torch.full((64,), 1)]),
        }[layout_kind].to(device, torch.int32)
        generator = torch.Generator(device=device).manual_seed(0)
        a, b = (torch.randn(shape, generator=generator, device=device) for shape in ((segments, segment_rows, k), (2, n, k)))
        out, want = (torch.full((segments, segment_rows, n), torch.nan, device=device, dtype=torch.bfloat16) for _ in range(2))
        if kind == "bf16":
            a, b = a.bfloat16(), b.bfloat16()
            a_scales = b_scales = None
        elif torch.cuda.get_device_capability(device)[0] == 10:
            (a, a_rows), (b, b_scales) = ue8m0.quantize_rows(a), ue8m0.requantize_ue8m0(*quantize_weight(b))
            a_scales, b_scales = ue8m0.pack(a_rows).transpose(1, 2), ue8m0.pack_weight_scale(b_scales, n)
        else:
            (a, a_rows), (b, b_scales) = quantize_rows(a), quantize_weight(b)
            a_scales = a_rows.transpose(1, 2).contiguous()
        try:
            self(layout, a, a_scales, b, b_scales, groups, out, 64)
            torch.cuda.synchronize(device)
        except Exception as error:
            raise MissingBackend(f"{diagnosis()}; a first tiny {layout_kind} GEMM failed: {error}; {_REMEDY}") from error
        TorchGemm()(layout, a, a_scales, b, b_scales, groups, want, 64)
        live = [slice(e * slots, e * slots + count) for e, count in enumerate(counts)]
        got, wanted = (torch.cat([rows.flatten(0, 1)[part] for part in live]).double() for rows in (out, want))
        error_ratio = float((got - wanted).norm() / wanted.norm())
        if not error_ratio < 0.01:
            raise WrongBackend(
                f"{diagnosis()}; a first tiny {kind} {layout_kind} GEMM is off by {error_ratio:.3g} of its norm (limit 0.01); {_REMEDY}"
            )


def diagnosis() -> str:
    """One sentence about the installed pair: versions, and what the table says of them."""
    minor = ".".join(torch.__version__.split(".")[:2])
    version = _wheel_version()
    if version is None:
        return f"deep_gemm is not installed (torch {torch.__version__})"
    known = PROVEN.get(minor)
    if known is None:
        verdict = f"no deep_gemm wheel is known for torch {minor}"
    else:
        verdict = "a known pair" if version in known else f"not a known pair: torch {minor} goes with {', '.join(known)}"
    return f"deep_gemm {version} with torch {torch.__version__} is {verdict}"


def _wheel_version() -> str | None:
    for distribution in ("sgl-deep-gemm", "deep-gemm", "deep_gemm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _import() -> ModuleType:
    try:
        return importlib.import_module("deep_gemm")
    except ModuleNotFoundError as error:
        if error.name == "deep_gemm":
            raise MissingBackend(f"deep_gemm is not installed; {_REMEDY}") from error
        raise MissingBackend(f"{diagnosis()}; it needs the module {error.name!r}; {_REMEDY}") from error
    except Exception as error:
        raise MissingBackend(f"{diagnosis()}; it does not load: {error}; {_REMEDY}") from error


def _resolve(module: ModuleType, function: str) -> Callable[..., None]:
    for name in _NAMES[function]:
        found = getattr(module, name, None)
        if found is not None:
            return found
    raise MissingBackend(f"{diagnosis()}; it has none of {', '.join(_NAMES[function])}; {_REMEDY}")


@contextmanager
def _alignment(module: ModuleType, rows: int) -> Iterator[None]:
    """Scope the process-wide row alignment of contiguous layouts (on SM90 it is also the tile height)."""
    before = module.get_mk_alignment_for_contiguous_layout()
    module.set_mk_alignment_for_contiguous_layout(rows)
    try:
        yield
    finally:
        module.set_mk_alignment_for_contiguous_layout(before)
