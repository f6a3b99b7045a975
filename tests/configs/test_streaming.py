"""What a stream bounds, and what it does not go with."""

import re
from typing import Any

import pytest

from cairn.configs.loader import parse
from tests.configs.test_lag import config
from tests.mistakes import said

STREAMING = {"pipeline": "streaming"}
CORRECTED = {"use_tis": True}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {}}, "rollout.max_age is 1: tokens that older weights sampled .* set rollout.pipeline=sync"),
        ({"rollout": {"max_age": 0}}, "max_age is 0 and pipeline is streaming, which generates while it trains"),
        (
            {"rollout": {"update_weights_interval": 3, "max_age": 2}},
            r"update_weights_interval \(3\) is above max_age \(2\): the tokens of an engine would be too old",
        ),
        (
            {"rollout": {"pipeline": "lagged", "update_weights_interval": 2}},
            r"update_weights_interval \(2\) has no effect while rollout.pipeline is lagged; set rollout.pipeline=str",
        ),
        (
            {"rollout": {"pipeline": "lagged", "async_buffer_size": 2}},
            r"async_buffer_size \(2\) has no effect while rollout.p",
        ),
        (
            {"rollout": {"async_buffer_size": 9}},
            r"async_buffer_size \(9\) has no effect while rollout.max_age × roll",
        ),
        ({"rollout": {"lag": 1}}, r"lag \(1\) has no effect while rollout.pipeline is streaming; set rollout.pi"),
        (
            {"rollout": {"over_sampling_batch_size": 4}},
            r"over_sampling_batch_size \(4\) has no effect while rollout.pipeline is strea",
        ),
        (
            {"rollout": {"shards_per_round": 2}},
            r"shards_per_round \(2\) has no effect while rollout.pipeline is streaming",
        ),
        ({"rollout": {"router": {}, "engine": "sglang"}}, "router sends requests to all of them: leave router out"),
        ({"rollout": {"min_num_engines": 2}}, r"min_num_engines \(2\) is above num_engines \(1\): raise num_engines"),
        (
            {"rollout": {"min_num_engines": 1, "pipeline": "sync"}},
            r"min_num_engines \(1\) has no effect while rollout.pipeline is sync; set rollout.pipeline=str",
        ),
        (
            {"rollout": {"min_num_engines": 1, "engine": "sglang", "external_urls": ["http://there:1"]}},
            "min_num_engines is for engines that a run places itself, but external_urls run elsewhere",
        ),
        (
            {"rollout": {"min_num_engines": 1, "custom_generate_function_path": "tool_calls", "tools": ["python"]}},
            "min_num_engines releases machines, but custom_generate_function_path is tool_calls",
        ),
        ({"data": {"path": "d", "curriculum": {"policy": "difficulty"}}}, "data.curriculum.policy chooses by these"),
        ({"recovery": {"on_divergence": "fork"}}, "cannot be forked: set on_divergence to stop"),
        (
            {"fleet": {"colocate": True}},
            "rollout.pipeline is streaming, which generates while it trains, but with fleet",
        ),
    ],
)
def test_what_a_stream_does_not_go_with_is_said_in_a_sentence(sections: dict[str, Any], says: str) -> None:
    options = {"algorithm": CORRECTED, **sections, "rollout": {**STREAMING, **sections.get("rollout", {})}}
    assert re.search(says, "\n".join(said(lambda note: parse(config(**options), note=note))))


@pytest.mark.parametrize(("options", "age"), [({}, 1), ({"max_age": 3}, 3)])
def test_its_greatest_age_is_how_far_sampling_may_be_ahead(options: dict[str, int], age: int) -> None:
    rollout = parse(config(rollout={**STREAMING, **options}, algorithm=CORRECTED)).rollout
    assert (rollout.weights_lag, rollout.oldest_trained) == (age, age)
