"""What a program prints is compared with what was expected."""

from __future__ import annotations

import pytest

from treetune_domains.graders.code import same_output


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2", "1  2 \n\n", True),
        ("1\n2", "1 2", False),
        ("0.3333333333", "0.333333", True),
        ("0.3334", "0.3333", False),
        ("3", "3.0", True),
        ("7.0", "7", True),
        ("7e0", "7", True),
        ("7.000000001", "7", False),
        ("7.000000001", "7.0", True),
        ("6.9999999999999999999", "7", False),
        ("1000000000000000000.4", "1000000000000000000", False),
        ("1e999999999", "7", False),
        ("snan", "7", False),
        ("1000000000000000001", "1000000000000000000", False),
        ("YES", "Yes", True),
        ("a", "A", False),
        ("1_0", "10", False),
        ("007", "7", True),
        ("nan", "0.0", False),
        ("1e400", "inf", True),
        ("", "", True),
        ("x" * 1_000_000, "y" * 1_000_000, False),
    ],
)
def test_printed_output_is_compared_by_words(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) == same
