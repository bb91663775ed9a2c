"""`verify` on real kernels: a fault planted into one is caught, each time by a case that reproduces it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphmoe import BucketLadder, ExpertWeights, MoERuntime, kernels
from graphmoe.errors import VerifyFailed
from graphmoe.paths.gathered import GatheredPath
from graphmoe.samples import random_inputs, random_weights
from graphmoe.verify import Case, Verifier, verify
from tests.checks import routings
from tests.gpu.cases import SMALL

SIZES = BucketLadder([1, 4, 16])
Build = Callable[[str], Verifier]


@pytest.fixture
def build() -> Iterator[Build]:
    made: list[Verifier] = []

    def one(path: str) -> Verifier:
        made.append(Verifier(SMALL, "fp8_block", SIZES, path, torch.device("cuda", torch.cuda.current_device())))
        return made[-1]

    yield one
    for verifier in made:
        verifier.close()


def mutant(folder: Path, op: str, sound: str, broken: str) -> Callable[..., None]:
    """The launcher of a kernel in whose source one piece is another."""
    source = Path(str(sys.modules[getattr(kernels, op).__module__].__file__)).read_text()
    assert source.count(sound) == 1
    file = folder / f"broken_{op}.py"
    file.write_text(source.replace(sound, broken))
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None
    assert found.loader is not None
    module: Any = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module
    found.loader.exec_module(module)
    return getattr(module, op)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "op", "sound", "broken"),
    [
        ("psum", "route", "(lane[None, :] < lane[:, None])", "(lane[None, :] <= lane[:, None])"),
        ("masked", "route", "(lane[None, :] < lane[:, None])", "(lane[None, :] <= lane[:, None])"),
        ("gathered", "gather_up", "mask = (slot < count)[:, None]", "mask = (slot >= 0)[:, None]"),
    ],
    ids=["off by one in the row map of psum", "of masked", "no mask on the padding of a tile"],
)
def test_a_broken_kernel_is_caught(
    path: str, op: str, sound: str, broken: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, op, mutant(tmp_path, op, sound, broken))
    verifier = build(path)
    with pytest.raises(VerifyFailed) as found:
        verify(verifier, 400)
    with pytest.raises(VerifyFailed):
        verifier.run(Case.parse(str(found.value).partition(": ")[0]))


def test_a_buffer_that_is_too_small_is_caught_by_its_guard(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = GatheredPath.rows
    monkeypatch.setattr(GatheredPath, "rows", lambda *arguments: rows(*arguments) - 1)
    with pytest.raises(VerifyFailed, match="wrote behind"):
        verify(build("gathered"), 400)


@pytest.mark.parametrize("path", ["direct", "gathered", "masked", "compact", "psum"])
def test_a_sound_runtime_passes(path: str, build: Build) -> None:
    verifier = build(path)
    verify(verifier, 300)
    assert verifier.calls == 300


@pytest.mark.parametrize("path", ["direct", "gathered", "masked", "psum"])
def test_two_experts_swapped_under_live_graphs_give_the_same_bits(path: str) -> None:
    """Expert rebalancing: weights are exchanged in place, ids renamed; nothing is captured anew."""
    weights = random_weights(SMALL, "fp8_block", device="cuda")
    mine = ExpertWeights(SMALL, "fp8_block", **{name: tensor.clone() for name, tensor in weights.tensors().items()})  # type: ignore[arg-type]
    x, router = random_inputs(SMALL, 8, device="cuda")
    ids = dict(routings(SMALL, 8, device="cuda"))["balanced"]
    renamed = torch.where(ids == 2, 5, torch.where(ids == 5, 2, ids))
    assert not torch.equal(ids, renamed)
    with MoERuntime(SMALL, mine, buckets=[8], path=path, progress=False) as rt:
        before = rt(x, ids, router).clone()
        for tensor in mine.tensors().values():
            as_bytes = tensor.view(torch.uint8)
            as_bytes[[2, 5]] = as_bytes[[5, 2]]
        assert not torch.equal(rt(x, ids, router), before)
        assert torch.equal(rt(x, renamed, router), before)
