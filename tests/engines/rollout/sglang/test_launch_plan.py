"""What is launched for a configuration, as a table, and what cannot be launched, in a sentence each."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.plan import LaunchPlan, Place
from cairn.engines.rollout.sglang.completions import support_problems
from cairn.engines.rollout.sglang.launch import launch
from cairn.engines.rollout.sglang.launch_plan import ServerPlan, launch_plan, plan_problems
from cairn.engines.rollout.sglang.server import ExternalServer
from cairn.engines.types.errors import EngineError

PREFILL = {"disaggregation_mode": "prefill"}
DECODE = {"disaggregation_mode": "decode"}


def config(**options: Any) -> RolloutConfig:
    base = {"engine": "sglang", "num_rollout": 1, "rollout_batch_size": 1, "rollout_max_response_len": 1}
    return RolloutConfig.model_validate(base | options)


def groups(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"server_groups": list(kinds), "num_engines": sum(kind.get("num_engines", 1) for kind in kinds)}


@pytest.mark.parametrize(
    ("options", "engines", "router"),
    [
        ({"num_engines": 2}, [ServerPlan(), ServerPlan()], None),
        ({"num_gpus_per_engine": 0.5}, [ServerPlan(num_gpus=0.5)], None),
        ({"num_gpus_per_engine": 1}, [ServerPlan(num_gpus=1)], None),
        ({"sglang": {"tp_size": 2}}, [ServerPlan(options={"tp_size": 2})], None),
        ({"num_gpus_per_engine": 4}, [ServerPlan(num_gpus=4, options={"tp_size": 4})], None),
        (
            {"num_gpus_per_engine": 4, "sglang": {"attn_dp_size": 4}},
            [ServerPlan(num_gpus=4, options={"attn_dp_size": 4, "tp_size": 4})],
            None,
        ),
        (
            {"num_gpus_per_engine": 4, "sglang": {"dp_size": 4, "enable_dp_attention": True}},
            [ServerPlan(num_gpus=4, options={"dp_size": 4, "enable_dp_attention": True, "tp_size": 4})],
            None,
        ),
        ({"num_gpus_per_engine": 16}, [ServerPlan(nnodes=2, num_gpus=8, options={"tp_size": 16})], None),
        (
            {"num_gpus_per_engine": 8, "num_gpus_per_node": 4, "num_engines": 2},
            [ServerPlan(nnodes=2, num_gpus=4, options={"tp_size": 8})] * 2,
            None,
        ),
        (
            {"external_urls": ["http://a:1", "http://b:2"], "num_engines": 2, "router": {"policy": "round_robin"}},
            [ServerPlan(external_url="http://a:1"), ServerPlan(external_url="http://b:2")],
            {"policy": "round_robin"},
        ),
        (
            {
                "server_groups": [
                    {"num_gpus": 4, "num_gpus_per_engine": 2, "overrides": {"mem_fraction_static": 0.7}},
                    {"num_engines": 1},
                ],
                "num_engines": 3,
                "num_gpus_per_engine": 1,
                "sglang": {"mem_fraction_static": 0.9},
            },
            [ServerPlan(num_gpus=2, options={"mem_fraction_static": 0.7, "tp_size": 2})] * 2
            + [ServerPlan(num_gpus=1, options={"mem_fraction_static": 0.9})],
            None,
        ),
        (
            {
                "server_groups": [
                    {"worker_type": "prefill", "num_gpus": 2},
                    {"worker_type": "decode", "num_gpus": 16, "num_gpus_per_engine": 16},
                ],
                "num_engines": 3,
                "num_gpus_per_engine": 1,
                "router": {"policy": "cache_aware"},
            },
            [ServerPlan(worker_type="prefill", num_gpus=1, options=PREFILL)] * 2
            + [ServerPlan(worker_type="decode", nnodes=2, num_gpus=8, options={"tp_size": 16, **DECODE})],
            {"policy": "cache_aware", "pd_disaggregation": True},
        ),
    ],
)
def test_a_configuration_launches(
    options: dict[str, Any], engines: list[ServerPlan], router: dict[str, Any] | None
) -> None:
    requested = config(**options)
    assert list(plan_problems(requested)) == []
    assert launch_plan(requested) == LaunchPlan(tuple(engines), router)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_gpus_per_engine": 1.5}, "num_gpus_per_engine is at most 1 or a whole number"),
        ({"num_gpus_per_engine": 12}, "an engine of 12 GPUs does not fill whole machines of 8"),
        ({"num_gpus_per_engine": 4, "sglang": {"tp_size": 2}}, "tp_size is 2, but an engine has 4 GPUs"),
        ({"num_gpus_per_engine": 4, "sglang": {"pp_size": 2}}, "weight updates do not support pipeline stages"),
        ({"num_gpus_per_engine": 4, "sglang": {"dp_size": 2}}, "SGLang updates only one copy of a model"),
        (
            groups({"num_engines": 1, "overrides": {"pp_size": 2}}),
            "weight updates do not support pipeline stages",
        ),
        (groups({"worker_type": "prefill", "num_engines": 1}) | {"router": {}}, "has prefill servers but no decode"),
        (groups({"worker_type": "decode", "num_engines": 1}) | {"router": {}}, "has decode servers but no prefill"),
        (
            groups(*({"worker_type": kind, "num_engines": 1} for kind in ("regular", "prefill", "decode")))
            | {"router": {}},
            "mixes regular servers with prefill and decode servers",
        ),
        (
            groups(*({"worker_type": kind, "num_engines": 1} for kind in ("prefill", "decode"))),
            "need a router: set rollout.router",
        ),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    (problem,) = plan_problems(config(**options))
    assert sentence in problem


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"server_groups": [{"num_engines": 2}]}, "num_engines is 1, but server_groups makes 2: set num_engines=2"),
        ({"external_urls": ["http://a:1", "http://b:2"]}, "external_urls makes 2: set num_engines=2"),
        ({"server_groups": [{"num_engines": 1}], "external_urls": ["http://a:1"]}, "exclude each other"),
        ({"server_groups": [{}]}, "either num_engines or num_gpus"),
        ({"server_groups": [{"num_gpus": 3, "num_gpus_per_engine": 2}]}, "3 GPUs cannot be cut into engines of 2 each"),
        ({"server_groups": [{"num_gpus": 3}]}, "3 GPUs cannot be cut into engines of 0 each"),
    ],
)
def test_engines_are_counted_once(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        config(**options)


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({}, []),
        ({"rollout_top_k": 50}, []),
        ({"rollout_top_k": 50, "rollout_top_p": 0.9}, []),
        ({"rollout_top_p": 0.9}, ["sampling_mask_max_tokens (4096): set rollout_top_k to at most that"]),
        ({"rollout_top_k": 5000}, ["rollout.rollout_top_k is 5000, but SGLang reports"]),
        ({"rollout_top_k": 5000, "sglang": {"sampling_mask_max_tokens": 6000}}, []),
        (
            {"rollout_top_k": 50, "sglang": {"speculative_algorithm": "EAGLE"}},
            ["with speculative_algorithm EAGLE: leave it out, set it to DFLASH or DSPARK"],
        ),
        ({"rollout_top_k": 50, "sglang": {"speculative_algorithm": "DSPARK"}}, []),
        (
            {"rollout_top_k": 50, "router": {}}
            | groups({"worker_type": "prefill", "num_engines": 1}, {"worker_type": "decode", "num_engines": 1}),
            ["prefill and decode servers do not report"],
        ),
    ],
)
def test_a_truncation_that_servers_cannot_report_is_refused_for_training(
    options: dict[str, Any], sentences: list[str]
) -> None:
    problems = list(support_problems(config(**options)))
    assert len(problems) == len(sentences)
    assert all(sentence in problem for problem, sentence in zip(problems, sentences, strict=True))


def test_a_server_that_runs_elsewhere_and_would_not_get_all_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ExternalServer, "wait_ready", lambda *_: None)
    monkeypatch.setattr(ExternalServer, "options", lambda _: {"tp_size": 2, "pp_size": 2})
    elsewhere = ServerPlan(external_url="http://a:1")
    with pytest.raises(EngineError, match=r"http://a:1 of rollout\.external_urls has pp_size = 2, but weight"):
        launch("model", config(), "cpu", elsewhere, Place(), tmp_path / "log", 1)
