"""What the families make of a config.json: of published models nothing is refused, and what differs is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.catalogue import published_config, published_names
from cairn.engines.models.folders import read_config
from cairn.engines.training.megatron.families import family_of
from cairn.engines.types.errors import BadModel
from tests.architectures import YARN, architecture


@pytest.mark.parametrize("name", published_names())
def test_every_published_model_that_has_a_recipe_has_a_mapping(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config(name)))
    config = read_config(tmp_path).get_text_config()
    family = family_of(config)
    assert family.transformer(config)["num_layers"] == config.num_hidden_layers
    assert family.model(config)["rotary_base"] > 0


def test_kimi_k2_is_mapped_as_the_deepseek_v3_that_it_is(tmp_path: Path) -> None:
    stored = published_config("Kimi-K2-Instruct") or {}
    assert stored["model_type"] == "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = read_config(tmp_path)
    fields = family_of(config).transformer(config)
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_router_num_groups"]) == (384, 8, None)
    assert (fields["rope_type"], fields["rotary_scaling_factor"], fields["mscale_all_dim"]) == ("yarn", 32, 1)
    assert fields["moe_layer_freq"] == [0] + [1] * 60


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"topk_group": 1}, "best num_experts_per_tok // topk_group = 4"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"attention_bias": True}, "attention has biases"),
        ({"rope_interleave": False}, "rope_interleave is false"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor of its own"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "bounds that are not rounded"),
        ({"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0}}, "mscale and no mscale_all_dim"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "of type linear"),
    ],
)
def test_what_megatron_would_compute_differently_is_refused(changed: dict[str, Any], sentence: str) -> None:
    made = architecture("deepseek_v3")
    config = replace(made, config={**made.config, **changed}).make_config()
    with pytest.raises(BadModel, match=sentence):
        family_of(config)
