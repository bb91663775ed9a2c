"""Every error graphmoe raises.

    GraphMoEError
    ├── SpecError               (ValueError)   numbers that cannot be an MoE layer
    │   └── UnsupportedSpec                    a real layer that graphmoe does not run yet
    ├── PlanError               (ValueError)
    │   ├── UnsupportedShape                   H, I or E that a format, path or GEMM cannot take; an unknown format or arch
    │   ├── UnknownRecipe                      a path or option nobody registered
    │   ├── ArenaTooLarge                      the plan does not fit max_arena_bytes, or a KV cache the device
    │   └── SchemaMismatch                     a plan or profile file of another schema version
    ├── WeightsError            (ValueError)
    │   ├── WeightsMismatch                    tensors or weights that do not belong to the spec
    │   └── CheckpointError                    a checkpoint that is incomplete, misshapen or unreadable
    ├── BackendError            (RuntimeError)
    │   ├── MissingBackend                     a library that the chosen GEMM needs is not usable here
    │   └── WrongBackend                       it loads, but computes wrong numbers
    ├── CallError               (ValueError)
    │   ├── InvalidInput                       a call's tensor has the wrong shape, dtype, device or stride
    │   └── BatchTooLarge                      more tokens than the largest bucket
    ├── BadSetting              (ValueError)   an option or environment variable that is not legal, or contradicts another
    ├── RuntimeClosed           (RuntimeError) a call after close()
    ├── CaptureError            (RuntimeError) the captured graph is not what the plan promised
    └── VerifyFailed            (RuntimeError) a verified call was wrong; the message reproduces it

`BrokenPromise` is a warning, not an error: a token's expert ids broke `distinct_topk`; its output is NaN.
"""


class GraphMoEError(Exception):
    """Base of all errors raised by graphmoe."""


class SpecError(GraphMoEError, ValueError):
    """The numbers cannot describe an MoE layer."""


class UnsupportedSpec(SpecError):
    """The layer exists, but graphmoe does not run it yet."""


class PlanError(GraphMoEError, ValueError):
    """No plan can be made from these arguments."""


class UnsupportedShape(PlanError):
    """A format, path or GEMM cannot take this H, I or E, or nobody registered the format or arch."""


class UnknownRecipe(PlanError):
    """A path name or recipe option that is not registered."""


class ArenaTooLarge(PlanError):
    """The arena would exceed `max_arena_bytes`, or a decoder's KV cache the device's memory."""


class SchemaMismatch(PlanError):
    """A stored plan or profile has another schema version."""


class WeightsError(GraphMoEError, ValueError):
    """Expert weights are not usable."""


class WeightsMismatch(WeightsError):
    """Tensors or weights do not belong to the spec."""


class CheckpointError(WeightsError):
    """A checkpoint is incomplete, misshapen or unreadable."""


class BackendError(GraphMoEError, RuntimeError):
    """A GEMM backend is not usable."""


class MissingBackend(BackendError):
    """A library that the chosen GEMM needs is absent or does not load."""


class WrongBackend(BackendError):
    """A GEMM library loads but fails its numeric self-check."""


class CallError(GraphMoEError, ValueError):
    """A call's arguments are wrong; the runtime stays usable."""


class InvalidInput(CallError):
    """A tensor has the wrong shape, dtype, device or stride."""


class BatchTooLarge(CallError):
    """More tokens than the largest bucket."""


class BadSetting(GraphMoEError, ValueError):
    """An option or an environment variable has a value that is not legal, or contradicts another."""


class RuntimeClosed(GraphMoEError, RuntimeError):
    """The runtime was closed."""


class CaptureError(GraphMoEError, RuntimeError):
    """The captured graph is not what the plan promised."""


class VerifyFailed(GraphMoEError, RuntimeError):
    """A call that `graphmoe verify` made was wrong; the message reproduces it."""


class BrokenPromise(UserWarning):
    """A token's expert ids were not distinct although the spec promised it; that token's output is NaN."""
