"""A recipe's own grader and filter are called once before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from cairn.flows.driver.synthetic_calls import synthetic_call_problems
from tests.tiny_run import tiny_config

CODE = """\
import time


def grade(sample):
    return float(sample.prompt.endswith("assistant\\n") and sample.label in sample.response)


def grade_by_number(args, sample):
    return sample.number_of_calls


def grade_integers(response, label, metadata):
    return int(response + "x")


def keep(samples):
    return samples[0].components["acc"] > 0


def grade_parts(sample):
    return {"reward": 1.0, "acc": 1.0}


def keep_by_name(samples):
    return samples[0].no_such_field


def keep_forever(rewards):
    time.sleep(60)


async def generate(ctx, sample): ...
"""


@pytest.mark.parametrize(
    ("sections", "problem", "note"),
    [
        ({"reward": {"custom_rm_path": "grade"}}, None, None),
        (
            {"reward": {"custom_rm_path": "grade_by_number"}},
            "grade_by_number' fails on a synthetic sample of the first row with AttributeError: sample.number_of_calls",
            None,
        ),
        (
            {
                "reward": {"custom_rm_path": "grade_by_number"},
                "rollout": {"custom_generate_function_path": "generate"},
            },
            None,
            "AttributeError: sample.number_of_calls",
        ),
        ({"reward": {"custom_rm_path": "grade_integers"}}, None, "ValueError: invalid literal for int()"),
        ({"rollout": {"dynamic_sampling_filter": "keep"}}, None, "with KeyError: 'acc'"),
        ({"reward": {"custom_rm_path": "grade_parts"}, "rollout": {"dynamic_sampling_filter": "keep"}}, None, None),
        ({"rollout": {"dynamic_sampling_filter": "keep_by_name"}}, "with AttributeError:", None),
        (
            {"rollout": {"dynamic_sampling_filter": "keep_forever"}, "reward": {"rm_timeout": 0.5}},
            None,
            "no result within 0.5 s",
        ),
    ],
    ids=[
        *("right", "wrong attribute", "attribute of the generate function", "other error", "filter"),
        *("filter of parts", "wrong field", "slow filter"),
    ],
)
def test_what_a_call_shows(
    tmp_path: Path, tiny_assets: Path, sections: dict[str, Any], problem: str | None, note: str | None
) -> None:
    (tmp_path / "mine.py").write_text(CODE)

    def named(value: Any) -> Any:
        return f"{tmp_path}/mine.py:{value}" if isinstance(value, str) else value

    own = {section: {name: named(value) for name, value in one.items()} for section, one in sections.items()}
    notes: list[str] = []
    problems = synthetic_call_problems(tiny_config(tiny_assets, **own), notes.append)
    assert (len(problems), len(notes)) == (int(problem is not None), int(note is not None))
    assert (problem or "") in "".join(problems)
    assert (note or "") in "".join(notes)
