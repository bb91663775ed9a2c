"""Verify, on this machine, that no routing breaks a runtime: another routing from call to call, scratch poisoned and guards filled before each.

Every call is held against an oracle the first time its inputs appear, and bit for bit against its own first output ever after.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.buckets import BucketLadder
from graphmoe.errors import VerifyFailed
from graphmoe.paths import rounding_of
from graphmoe.recipe import Recipe
from graphmoe.reference import moe_layer, row_errors, row_limit
from graphmoe.runtime import MoERuntime
from graphmoe.samples import ROUTINGS, random_inputs, random_weights, routing
from graphmoe.spec import MoESpec

POISONS = (0x7FC00000, -1, 0x7FFFFFFF)
"""32-bit words that fill the scratch: a float32 NaN, 0xFF bytes (NaN in bf16 and e4m3, -1 in int32), and the largest int32."""
GUARD_BYTES = 256
LAYERS = 2
_SEEDS = 3
_CHECKED_ROWS = 12


@dataclass(frozen=True)
class Case:
    """One call. `str()` is what reproduces it: `T=3 routing=zipf seed=1 layer=0 poison=-1`."""

    tokens: int
    routing: str
    seed: int
    layer: int
    poison: int

    def __str__(self) -> str:
        return f"T={self.tokens} routing={self.routing} seed={self.seed} layer={self.layer} poison={self.poison}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `str` wrote.

        Raises:
            VerifyFailed: it is none.
        """
        try:
            fields = dict(part.split("=", 1) for part in text.split())
            case = cls(int(fields["T"]), fields["routing"], int(fields["seed"]), int(fields["layer"]), int(fields["poison"]))
        except (KeyError, ValueError) as error:
            raise VerifyFailed(f"{text!r} is not a case; a case looks like {Case(3, 'zipf', 1, 0, -1)}") from error
        if case.routing not in ROUTINGS or case.tokens < 0 or case.layer not in range(LAYERS):
            raise VerifyFailed(f"{text!r}: routings are {', '.join(ROUTINGS)}, layers 0 to {LAYERS - 1}")
        return case


class Verifier:
    """One runtime of two layers with guard bands, and what its calls gave before.

    Args:
        spec: the layer as this rank sees it.
        fmt: weight format.
        buckets: its ladder.
        recipe: `"auto"`, a path or a recipe.
        device: where to run.

    Raises:
        whatever building the runtime raises.
    """

    def __init__(self, spec: MoESpec, fmt: str, buckets: BucketLadder, recipe: Recipe | str, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._fmt = fmt
        self._layers = [random_weights(spec, fmt, seed=layer, device=device) for layer in range(LAYERS)]
        self.runtime = MoERuntime(spec, layers=self._layers, buckets=buckets, path=recipe, device=device, guard_bytes=GUARD_BYTES, progress=False)
        self._first: dict[tuple[int, str, int, int], Tensor] = {}
        self._batches: dict[tuple[int, str, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.calls = 0
        self.worst = 0.0

    def cases(self) -> list[Case]:
        """Every case that `run` may be asked for: batches that fill a bucket, almost fill it and barely reach it, each routing, layer and poison."""
        sizes = {0, 1}
        for smaller, bucket in zip((0, *self.runtime.plan.ladder.sizes), self.runtime.plan.ladder.sizes, strict=False):
            sizes |= {bucket, max(bucket - 1, smaller), smaller + 1}
        return [
            Case(tokens, name, seed, layer, POISONS[(tokens + seed + layer) % len(POISONS)])
            for tokens in sorted(sizes)
            for name in ROUTINGS
            for seed in range(_SEEDS)
            for layer in range(LAYERS)
        ]

    def run(self, case: Case) -> None:
        """One call, checked.

        Raises:
            VerifyFailed: a wrong row, other bits than before, a broken guard or a raised flag; the message reproduces it.
        """
        with self.runtime._core.opened() as built:
            bucket = self.runtime.plan.bucket(case.tokens)
            built.arena.poison(case.poison)
            built.arena.fill_guards(bucket)
            y = self._call(case)
            self._judge(case, y, bucket.recipe)
            broken = built.arena.broken_guards(bucket)
            if broken:
                raise self._failure(case, f"wrote behind {', '.join(broken)}")
        if self.runtime.report().promise_broken:
            self.runtime.clear_flag()
            raise self._failure(case, "raised the flag of broken promises although every id was distinct")

    def _call(self, case: Case) -> Tensor:
        x, ids, router = self._batch(case)
        self.calls += 1
        return self.runtime.layers[case.layer](x, ids, router, out=torch.empty_like(x))

    def _batch(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        key = (case.tokens, case.routing, case.seed)
        if key not in self._batches:
            ids = routing(case.routing, self.spec, case.tokens, seed=case.seed, device=self.device)
            x, router = random_inputs(self.spec, case.tokens, seed=case.seed, device=self.device)
            self._batches[key] = x, ids, router
        return self._batches[key]

    def _judge(self, case: Case, y: Tensor, recipe: Recipe) -> None:
        key = (case.tokens, case.routing, case.seed, case.layer)
        if key in self._first:
            if not torch.equal(y.view(torch.int16), self._first[key].view(torch.int16)):
                row = int((y.view(torch.int16) != self._first[key].view(torch.int16)).any(-1).nonzero()[0])
                raise self._failure(case, f"row {row} has other bits than the same call gave before")
            return
        x, ids, router = self._batch(case)
        rows = torch.randperm(case.tokens, generator=torch.Generator("cpu").manual_seed(case.seed), device="cpu")[:_CHECKED_ROWS].to(self.device)
        rounding = rounding_of(recipe)
        want = moe_layer(x[rows], ids[rows], router[rows], self._layers[case.layer], rounding=rounding)
        errors = row_errors(y[rows], want)
        limit = row_limit(self._fmt, rounding)
        if errors.numel() and not float(errors.max()) <= limit:
            worst = int(errors.argmax())
            raise self._failure(case, f"row {int(rows[worst])} is off by {float(errors[worst]):.4f} of its norm, limit {limit} ({recipe})")
        self._first[key] = y
        self.worst = max(self.worst, float(errors.max()) if errors.numel() else 0.0)

    def _failure(self, case: Case, what: str) -> VerifyFailed:
        return VerifyFailed(f"{case}: {what}")

    def close(self) -> None:
        """Close the runtime."""
        self.runtime.close()


def verify(verifier: Verifier, examples: int, *, seed: int = 0, done: Callable[[], None] = lambda: None) -> None:
    """Run `examples` cases in random order, so that each call follows another routing; the smallest failing case is raised.

    Raises:
        VerifyFailed: see `Verifier.run`.
    """
    every, order = verifier.cases(), random.Random(seed)
    for _ in range(examples):
        case = order.choice(every)
        try:
            verifier.run(case)
        except VerifyFailed as error:
            raise _smallest(verifier, case, error) from None
        done()


def _smallest(verifier: Verifier, case: Case, error: VerifyFailed) -> VerifyFailed:
    """The failure of the case with the fewest tokens that fails likewise with this routing, layer and poison; else the one found."""
    for smaller in sorted((one for one in verifier.cases() if one.routing == case.routing and one.layer == case.layer), key=lambda one: one.tokens):
        if smaller.tokens >= case.tokens:
            break
        try:
            verifier.run(smaller)
        except VerifyFailed as found:
            return found
    return error


def soak(verifiers: Sequence[Verifier], seconds: float, *, seed: int = 0, done: Callable[[], None] = lambda: None) -> int:
    """Two threads on each runtime, all at once, each calling randomly chosen cases; returns the number of calls.

    Outputs are compared with the first of their kind; scratch is not poisoned, since the other thread may be between its launch and its end.

    Raises:
        VerifyFailed: the first failure of any thread.
    """
    failures: list[BaseException] = []
    calls = [0] * (2 * len(verifiers))
    for verifier in verifiers:  # oracles first, one thread at a time
        for case in verifier.cases():
            verifier.run(case)
    stop = time.monotonic() + seconds

    def work(number: int) -> None:
        verifier, order = verifiers[number // 2], random.Random(seed + number)
        every = verifier.cases()
        try:
            while time.monotonic() < stop and not failures:
                case = order.choice(every)
                y = verifier._call(case)
                verifier._judge(case, y, verifier.runtime.plan.bucket(case.tokens).recipe)
                calls[number] += 1
                done()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(calls)
