"""Transformers, told to keep its progress bars and warnings out of a subcommand's output."""

from __future__ import annotations

from typing import Any

from graphmoe.errors import MissingBackend


def quiet_transformers() -> Any:
    """The library.

    Raises:
        MissingBackend: it, or what it needs to load an FP8 checkpoint, is not installed.
    """
    try:
        import accelerate  # noqa: F401 - Transformers loads no FP8 checkpoint without it
        import transformers
    except ImportError as error:
        raise MissingBackend(f"this decodes a model of Transformers ({error}); pip install 'graphmoe[transformers]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
