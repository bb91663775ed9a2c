"""Files that subcommands write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphmoe.errors import InvalidInput


def write_json(value: dict[str, Any], path: Path, what: str) -> None:
    """Write plain data.

    Args:
        value: what json takes.
        path: of the file.
        what: it is, for the error.

    Raises:
        InvalidInput: it cannot be written.
    """
    try:
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise InvalidInput(f"the {what} cannot be written to {path}: {error.strerror}") from error
