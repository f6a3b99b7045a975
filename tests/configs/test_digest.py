"""Digests depend on the named fields and on nothing else."""

import hashlib

import pytest

from cairn.configs.digest import canonical_json, digest
from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig


def config(**sections: dict) -> RunConfig:
    rollout = {"num_rollout": 2, "rollout_batch_size": 4, "rollout_max_response_len": 16}
    return parse(
        {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": rollout | sections.pop("rollout", {})} | sections
    )


def test_the_digest_is_the_sha256_of_the_canonical_json_of_the_fields() -> None:
    text = b'{"data.path":"d","seed":42}'
    assert digest(config(), ("seed", "data.path")) == hashlib.sha256(text).hexdigest()


def test_fields_that_are_not_named_do_not_change_it() -> None:
    names = ("rollout", "data.path", "seed")
    other = config(training={"lr": 0.5}, data={"path": "d", "label_key": None})
    assert digest(config(), names) == digest(other, names)
    assert digest(config(), names) != digest(config(rollout={"rollout_temperature": 0.5}), names)


def test_the_order_of_the_names_does_not_change_it() -> None:
    assert digest(config(), ("seed", "data")) == digest(config(), ("data", "seed"))


def test_a_value_at_its_default_and_the_same_value_written_down_are_equal() -> None:
    assert digest(config(), ("training",)) == digest(config(training={"lr": 1e-6}), ("training",))


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"rollout\.seed is not an option"):
        digest(config(), ("rollout.seed",))


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": [1, 1.5e-7, None], "a": "ü"}) == '{"a":"ü","b":[1,1.5e-07,null]}'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))
