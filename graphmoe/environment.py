"""Environment variables that graphmoe reads: each has its legal values, and keeps every name that it ever had."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from graphmoe.errors import BadSetting


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: what it is called.
        legal: its values.
        former: what it was called before; still read, with a DeprecationWarning.
    """

    name: str
    legal: tuple[str, ...]
    former: tuple[str, ...] = ()

    def read(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Its value; None if it is not set, or empty.

        Raises:
            BadSetting: a value that is not legal, or two names of it that say different things.
        """
        found = {name: environ[name] for name in (self.name, *self.former) if environ.get(name)}
        for name, value in found.items():
            if value not in self.legal:
                raise BadSetting(f"{name}={value!r} in the environment; legal are {' and '.join(map(repr, self.legal))}")
        if len(set(found.values())) > 1:
            both = ", ".join(f"{name}={value!r}" for name, value in found.items())
            raise BadSetting(f"the environment says {both}, which are one variable; keep {self.name} alone")
        for name in found.keys() - {self.name}:
            warnings.warn(
                f"the environment variable {name} is called {self.name} now; the old name goes on working", DeprecationWarning, stacklevel=2
            )
        return next(iter(found.values()), None)


DISPATCH_PAYLOAD = Variable("GRAPHMOE_DISPATCH_PAYLOAD", legal=("fp8", "bf16"))
"""What tokens travel as between ranks: see `graphmoe.payload`."""
