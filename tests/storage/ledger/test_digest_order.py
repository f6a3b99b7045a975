"""Digests of equal things are equal, in whatever order these come, and of other things, or another order of what is in
an order, are not."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cairn.configs.digest import canonical_json
from cairn.configs.digest import digest as digest_of_fields
from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, OutputFile, Step, causal_order
from cairn.storage.store import canonical
from tests.storage.builders import ENVIRONMENT

NAMES = st.text("abc/äB0", min_size=1, max_size=4)
SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("seed", "data", "rollout", "training.lr", "model.path", "checkpoint")


def reordered(value: Any, draw: st.DrawFn) -> Any:
    """A value with the keys of its mappings in another order."""
    if isinstance(value, dict):
        return {key: reordered(value[key], draw) for key in draw(st.permutations(list(value)))}
    if isinstance(value, list):
        return [reordered(item, draw) for item in value]
    return value


@st.composite
def twins(draw: st.DrawFn) -> tuple[Any, Any]:
    value = draw(VALUES)
    return value, reordered(value, draw)


@settings(max_examples=60)
@given(pair=twins())
def test_keys_have_no_order(pair: tuple[Any, Any]) -> None:
    one, other = pair
    assert canonical.digest(one) == canonical.digest(other)
    assert canonical_json(one) == canonical_json(other)


@settings(max_examples=60)
@given(one=VALUES, other=VALUES)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert (canonical.digest(one) == canonical.digest(other)) == (repr_of(one) == repr_of(other))


@settings(max_examples=60)
@given(items=st.lists(SCALARS, min_size=2, max_size=5), data=st.data())
def test_items_of_a_list_have_an_order(items: list[Any], data: st.DataObject) -> None:
    other = data.draw(st.permutations(items))
    assume(repr_of(other) != repr_of(items))
    assert canonical.digest({"groups": items}) != canonical.digest({"groups": other})


def repr_of(value: Any) -> Any:
    """What makes a value what it is, types included: 1, 1.0 and True are three."""
    if isinstance(value, dict):
        return ("dict", frozenset((key, repr_of(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(map(repr_of, value)))
    return (type(value).__name__, repr(value))


def config(changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rollout": {"num_rollout": 2, "rollout_batch_size": 4, "rollout_max_response_len": 16},
        "training": {},
    }
    for name, options in changes.items():
        sections[name] |= options
    return parse(sections)


CHANGES: dict[str, Mapping[str, Any]] = {
    "data": {"path": "e"},
    "rollout": {"rollout_temperature": 0.5},
    "training": {"lr": 0.5},
}


@settings(max_examples=40)
@given(
    fields=st.lists(st.sampled_from(FIELDS), min_size=1, unique=True),
    changed=st.sets(st.sampled_from(sorted(CHANGES))),
    data=st.data(),
)
def test_the_digest_of_options_is_of_those_named_in_any_order(
    fields: list[str], changed: set[str], data: st.DataObject
) -> None:
    before, after = config({}), config({name: CHANGES[name] for name in changed})
    same = not changed & {field.partition(".")[0] for field in fields}
    assert (digest_of_fields(before, fields) == digest_of_fields(after, data.draw(st.permutations(fields)))) == same


OUTPUTS = [OutputFile(path=f"iterations/000000/{name}", bytes=1, sha256=name * 64) for name in "abc"]


def commit(iteration: int, inputs: Mapping[str, str], outputs: Sequence[OutputFile], values: Any = 0) -> Commit:
    return Commit(
        run="run-1",
        iteration=iteration,
        step=Step.TRAIN,
        attempt="000001-ab",
        epoch=1,
        inputs=dict(inputs),
        config_digest="0" * 64,
        outputs=tuple(outputs),
        values={"groups": values},
        started_at=0.0,
        committed_at=1.0,
        environment=ENVIRONMENT,
    )


@settings(max_examples=60)
@given(
    inputs=st.dictionaries(NAMES, st.sampled_from(["0" * 64, "1" * 64]), max_size=5),
    groups=st.lists(st.integers(0, 3), max_size=5),
    data=st.data(),
)
def test_a_commits_digest_depends_on_the_order_of_its_groups_and_files_and_not_of_its_inputs(
    inputs: dict[str, str], groups: list[int], data: st.DataObject
) -> None:
    one = commit(0, inputs, OUTPUTS, groups)
    reordered = {name: inputs[name] for name in data.draw(st.permutations(list(inputs)))}
    assert commit(0, reordered, OUTPUTS, groups).digest == one.digest
    assert Commit.unsealed(commit(0, reordered, OUTPUTS, groups).to_bytes()).digest == one.digest
    files, order = data.draw(st.permutations(OUTPUTS)), data.draw(st.permutations(groups))
    assert (commit(0, inputs, files, order).digest == one.digest) == (files == OUTPUTS and order == groups)
    for name in inputs:
        assert commit(0, inputs | {name: "2" * 64}, OUTPUTS, groups).digest != one.digest


@settings(max_examples=60)
@given(edges=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))), data=st.data())
def test_commits_in_any_order_come_each_after_those_that_it_was_made_from(
    edges: set[tuple[int, int]], data: st.DataObject
) -> None:
    names = [commit(index, {}, ()).name for index in range(6)]
    made_from = {index: [a for a, b in edges if b == index and a < b] for index in range(6)}
    commits = [commit(index, {names[a]: "0" * 64 for a in made_from[index]}, ()) for index in range(6)]
    found = [one.iteration for one in causal_order(data.draw(st.permutations(commits)))]
    assert sorted(found) == list(range(6))
    assert all(found.index(a) < found.index(index) for index in range(6) for a in made_from[index])
