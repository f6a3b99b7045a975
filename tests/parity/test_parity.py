"""Advantages, losses, corrections and divergences are those that own functions of verl, slime and TRL compute.

`batch.json` is a ragged batch, `values/` what they made of it, in float32 and in float64. `make parity` records all
anew. What is compared stands in `ours.py`, and in `docs/algorithms.md` how close it is.
"""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.batch import batch
from tests.parity.ours import DATA, DIFFERENCES, HERE, Case, Values, cases, flat

PEERS = ("verl", "slime", "trl")
RECORDED: dict[str, dict[str, Any]] = {
    peer: json.loads((HERE / "values" / f"{peer}.json").read_text()) for peer in PEERS
}
CASES = [(peer, name) for peer in PEERS for name in cases(peer)]
PAGE = HERE.parents[1] / "docs" / "algorithms.md"


def recorded(peer: str, name: str, dtype: str) -> Values:
    found = RECORDED[peer][dtype][name]
    return flat(found) if isinstance(found, list) else np.asarray(found)


def furthest(peer: str, name: str, case: Case, dtype: str) -> float:
    """The largest difference, of numbers of the order of 1."""
    own, peers = case.compute(getattr(torch, dtype)), recorded(peer, name, dtype)
    assert own.shape == peers.shape, name
    assert np.abs(peers).max() > 1e-3, f"{name} has nothing to compare"
    return float(np.abs(own - peers).max())


def test_the_batch_is_the_one_that_its_script_writes() -> None:
    assert batch() == DATA


@pytest.mark.parametrize("peer", PEERS)
def test_values_are_those_of_an_independent_implementation(peer: str) -> None:
    """Apart by less than 1e-6 in float32, and in float64 by less than 1e-12 where all is computed in it."""
    apart = {}
    for name, case in cases(peer).items():
        single, double = (furthest(peer, name, case, dtype) for dtype in ("float32", "float64"))
        if not (single < 1e-6 and double < (1e-12 if case.closed else 1e-6)):
            apart[name] = (single, double)
    assert apart == {}


@pytest.mark.parametrize(("peer", "name"), DIFFERENCES)
def test_what_is_said_to_differ_does(peer: str, name: str) -> None:
    same, _ = DIFFERENCES[peer, name]
    masked = cases("verl")[name]
    assert furthest(peer, name, masked, "float64") > 1e-3
    assert (peer, same) in CASES


def test_the_page_states_how_close_every_case_is() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (verl|slime|trl) \| (\S+) \| (\S+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [(peer, name) for name, peer, *_ in rows] == CASES
    for name, peer, single, double in rows:
        case = cases(peer)[name]
        assert furthest(peer, name, case, "float32") <= float(single) <= 1e-6
        assert furthest(peer, name, case, "float64") <= float(double) <= (1e-12 if case.closed else 1e-6)


def test_the_page_says_what_was_compared_with() -> None:
    for recorded_of in RECORDED.values():
        assert f"{recorded_of['peer']} {recorded_of['version']}" in PAGE.read_text()
