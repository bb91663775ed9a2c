"""`FAULTS.md` names tests that exist, for every kind of fault."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [line for line in (HERE / "FAULTS.md").read_text().splitlines() if line.startswith("| ") and not line.startswith("| kind")]


def test_every_row_names_tests_that_exist_or_says_why_there_is_none() -> None:
    assert len(ROWS) > 20
    for row in ROWS:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row)
        assert named or "not applicable: " in row, row
        for file, test in named:
            source = (HERE / file).read_text()
            assert not test or f"\ndef {test}(" in source, f"{file} has no {test}"
