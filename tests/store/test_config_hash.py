"""Promises of a configuration's hash, by which runs and caches recognise it:

* it is the same for the same content, in every order of keys, process and release;
* different content has a different hash, and what JSON can't hold has none.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.store.checksums import config_hash

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_the_order_of_keys_does_not_matter(data: dict[str, object]) -> None:
    assert config_hash(dict(reversed(data.items()))) == config_hash(data)


def test_the_hash_is_the_same_in_every_process_and_release() -> None:
    assert config_hash({"b": [1, 2.5, None], "a": "é"}) == config_hash({"a": "é", "b": [1.0, 2.5, None]})
    assert config_hash({"type": "x", "n": 1}) == "ab76218585f7e9f49ef699c607c9c2c0"


@pytest.mark.parametrize("different", [{"a": 2}, {"a": "1"}, {"a": True}, {"a": [1]}, {"b": 1}, {}])
def test_different_content_has_a_different_hash(different: dict[str, object]) -> None:
    assert config_hash(different) != config_hash({"a": 1})


def test_what_json_cannot_hold_has_no_hash() -> None:
    with pytest.raises(ValueError, match="JSON"):
        config_hash({"a": float("nan")})
