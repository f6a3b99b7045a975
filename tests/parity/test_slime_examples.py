"""What `make slime-examples` recorded: each example trained for three iterations, and no sample failed."""

import json
from pathlib import Path

from tests.parity.slime_examples import BOUND, EXAMPLES, ITERATIONS, NOT_RUN


def test_every_example_was_trained_or_says_why_not() -> None:
    recorded = json.loads((Path(__file__).parent / "values" / "slime_examples.json").read_text())
    assert recorded["examples"].keys() == EXAMPLES.keys()
    assert recorded["not run"] == NOT_RUN
    assert BOUND.keys() <= NOT_RUN.keys()
    for run in recorded["examples"].values():
        assert (run["iterations"], run["failed"], run["retold_tokens"]) == (ITERATIONS, 0, 0)
        assert run["trained_tokens"] > 0
    assert recorded["examples"]["search-r1"]["requests_to_the_service"] > 0
    assert recorded["examples"]["retool"]["calls_of_the_policy"] == 2 * recorded["examples"]["retool"]["samples"]
