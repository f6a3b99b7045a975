"""What a store may set, option by option."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from cairn.configs.errors import ConfigError
from cairn.configs.schema.base import Section
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.sglang.installation import Installation
from cairn.engines.rollout.sglang.kind import PERMITTED, ROUTER_PERMITTED
from cairn.flows.driver import session, trust
from cairn.flows.history.fork import fork
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store import canonical
from cairn.storage.store.local import LocalStore
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


def problems(config: RunConfig, store: LocalStore, user_config: RunConfig | None = None) -> list[str]:
    try:
        trust.require_trusted(config, store, user_config)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return LocalStore(str(tmp_path / "store"))


def disk(folder: str) -> dict[str, dict[str, Any]]:
    return {"fleet": {"update_weight_transport": "disk", "update_weight_disk_dir": folder}}


def benchmark(**options: Any) -> dict[str, dict[str, Any]]:
    return {"eval": {"benchmarks": [{"name": "b", "path": "b.jsonl", "max_response_len": 4, **options}]}}


def sglang(**rollout: Any) -> dict[str, dict[str, Any]]:
    return {"rollout": {"engine": "sglang", **rollout}}


REFUSED: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("rollout.tools", {"rollout": {"tools": ["/somewhere/evil.py:tool"]}}),
    ("model.path", {"model": {"path": "{store}/evals/model"}}),
    ("tracking.tensorboard_dir", {"tracking": {"tensorboard_dir": "{store}/evals/x"}}),
    ("rollout.model_path", sglang(model_path="{store}/evals/model")),
    ("rollout.sglang", sglang(sglang={"trust_remote_code": True})),
    ("rollout.sglang", sglang(sglang={"hicache_storage_backend": "dynamic"})),
    ("rollout.sglang", sglang(sglang={"model_impl": "transformers"})),
    ("rollout.sglang", sglang(sglang={"delete_ckpt_after_loading": True})),
    ("rollout.sglang", sglang(sglang={"an_option_of_tomorrow": 1})),
    ("rollout.sglang", sglang(sglang={"quantization": "../evil"})),
    ("rollout.sglang", sglang(sglang={"attention_backend": "evil.module"})),
    ("rollout.server_groups.0.overrides", sglang(server_groups=[{"num_engines": 1, "overrides": {"config": "x"}}])),
    ("rollout.router", sglang(router={"policy": "random", "mcp_config_path": "mcp.yaml"})),
    ("rollout.router", sglang(router={"log_dir": "/etc"})),
    ("rollout.external_urls", sglang(external_urls=["http://198.51.100.7:30000"])),
    ("rollout.external_urls", sglang(external_urls=["http://127.0.0.1:8265/api/jobs"])),
    ("fleet.ray_address", {"fleet": {"ray_address": "198.51.100.7:1"}}),
    ("fleet.update_weight_disk_dir", disk("/somewhere")),
    ("fleet.update_weight_disk_dir", disk("../beside")),
    ("tracking.tensorboard_dir", {"tracking": {"tensorboard_dir": "/somewhere"}}),
    ("tracking.tensorboard_dir", {"tracking": {"tensorboard_dir": "~/.config"}}),
    ("tracking.wandb_team", {"tracking": {"wandb_team": "elsewhere"}}),
    ("tracking.mlflow_tracking_uri", {"tracking": {"mlflow_tracking_uri": "http://elsewhere:5000"}}),
    ("tracking.mlflow_tracking_uri", {"tracking": {"mlflow_tracking_uri": "sqlite:////etc/mlflow.db"}}),
    ("model.path", {"model": {"path": "{store}/runs/tiny/model"}}),
    ("model.path", {"model": {"path": "linked"}}),
    ("data.path", {"data": {"path": "ssh://198.51.100.7/x.jsonl"}}),
    ("data.path", {"data": {"path": "reference::https://198.51.100.7/x.jsonl"}}),
    ("data.path", {"data": {"path": "simplecache::reference://x.jsonl::https://198.51.100.7/x.jsonl"}}),
    ("eval.benchmarks.0.path", benchmark(path="git://repo:x.jsonl")),
    ("data.apply_chat_template_kwargs", {"data": {"apply_chat_template_kwargs": {"chat_template": "{{ x }}"}}}),
    ("eval.benchmarks.0.apply_chat_template_kwargs", benchmark(apply_chat_template_kwargs={"a": {"b": 1}})),
    ("training.megatron", {"training": {"engine": "megatron", "megatron": {"fp8": "e4m3"}}}),
]
"""An option, and sections in which a store may not set it."""


def test_what_a_store_may_not_set_the_user_may(tiny_assets: Path, store: LocalStore) -> None:
    (store.root / "runs" / "tiny").mkdir(parents=True)
    Path("linked").symlink_to(store.root / "runs" / "tiny")
    plain: dict[str, dict[str, Any]] = {
        "model": {"path": str(tiny_assets / "model")},
        "reward": {"custom_rm_path": None},
    }
    wrong = []
    for option, sections in REFUSED:
        set_by_store = {section: with_store(values, store) for section, values in sections.items()}
        config = tiny_config(tiny_assets, **{**plain, **set_by_store})
        found, found_of_user = problems(config, store), problems(config, store, user_config=config)
        named = [problem.partition(" is ")[0] for problem in found] == [option]
        if not named or "`cairn train RECIPE --run NAME`" not in found[0] or found_of_user:
            wrong.append((option, sections, found, found_of_user))
    assert wrong == [], "each must be refused by its name to a store, and to no user"


def with_store(values: dict[str, Any], store: LocalStore) -> dict[str, Any]:
    """Values of a section, with the store's folder where they have `{store}`."""
    return {
        name: value.replace("{store}", str(store.root)) if isinstance(value, str) else value
        for name, value in values.items()
    }


def test_a_store_may_set_what_only_changes_what_is_computed(tiny_assets: Path, store: LocalStore) -> None:
    config = tiny_config(
        tiny_assets,
        rollout={
            "engine": "sglang",
            "sglang": {"attention_backend": "triton", "mem_fraction_static": 0.5, "cuda_graph_bs_decode": [1, 2]},
            "router": {"policy": "cache_aware", "retry_max_retries": 2},
            "num_engines": 2,
            "server_groups": [{"num_engines": 2, "overrides": {"tp_size": 2}}],
            "rollout_stop_token_ids": [7],
            "rollout_stop": ["</answer>"],
        },
        data={"path": "s3://bucket/train.parquet@[0:9]", "apply_chat_template_kwargs": {"enable_thinking": False}},
        training={"engine": "megatron", "world_size": 2, "megatron": {"tensor_model_parallel_size": 2}},
        fleet={"ray_address": "127.0.0.1:6379", "update_weight_transport": "disk", "update_weight_disk_dir": "weights"},
        tracking={"tensorboard_dir": "logs/tb", "wandb_project": "mine", "mlflow_tracking_uri": "sqlite:///logs/m.db"},
    )
    assert problems(config, store) == []
    urls = tiny_config(tiny_assets, rollout={"engine": "sglang", "external_urls": ["http://localhost:30000/"]})
    assert problems(urls, store) == []


def test_what_is_permitted_of_sglang_are_options_that_it_has() -> None:
    installation = Installation.find()
    assert sorted(PERMITTED - set(installation.options)) == []
    assert sorted(ROUTER_PERMITTED - installation.router_options) == []


def test_an_option_that_nobody_decided_on_a_store_may_not_set() -> None:
    class Later(Section):
        hook: str | None = None
        hooks: dict[str, Any] = Field(default_factory=dict)
        mode: bool = False

    assert trust.free_options(Later) == {"hook": None, "hooks": None}


@pytest.fixture
def forked(tiny_assets: Path, store: LocalStore) -> tuple[RunConfig, LocalStore]:
    """A run without checkpoints, and a fork of it that trains otherwise."""
    config = tiny_config(tiny_assets)
    with tiny_context(store.url, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    fork(Ledger.open(store, "tiny"), 0, "forked", ["training.lr=0.5"])
    return config.model_copy(update={"training": config.training.model_copy(update={"lr": 0.5})}), store


def forge(store: LocalStore, run: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = layout.run_manifest(run)
    fields = canonical.unseal(store.read(path))
    change(fields["config"])
    store.write(path, canonical.seal(fields))


@pytest.mark.parametrize("with_recipe", [False, True])
@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("rollout.sglang", lambda c: c["rollout"].update(engine="sglang", sglang={"custom_weight_loader": ["evil.f"]})),
        ("reward.custom_rm_path", lambda c: c["reward"].update(custom_rm_path="/tmp/evil.py:grade")),
        ("tracking.tensorboard_dir", lambda c: c["tracking"].update(tensorboard_dir="/etc")),
    ],
)
def test_an_ancestor_is_trusted_no_more_than_its_fork(
    option: str,
    change: Callable[[dict[str, Any]], object],
    with_recipe: bool,
    forked: tuple[RunConfig, LocalStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, store = forked
    forge(store, "tiny", change)
    started: list[RunConfig] = []
    monkeypatch.setattr("cairn.flows.driver.session.starting_fleet", lambda config, *_, **__: started.append(config))
    with (
        pytest.raises(ConfigError, match=rf"{option} is .* in the ledger of tiny, and a store may"),
        session.open_run(store, "forked", recipe if with_recipe else None),
    ):
        pass
    assert started == []


def test_weights_of_an_ancestor_are_brought_back_in_the_clusters_of_the_fork(
    forked: tuple[RunConfig, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, store = forked
    forge(store, "tiny", lambda config: config["fleet"].update(ray_address="198.51.100.7:6379"))
    started: list[RunConfig] = []

    def start(config: RunConfig, *_: Any, **options: Any) -> Any:
        started.append(config)
        raise InterruptedError

    monkeypatch.setattr("cairn.flows.driver.session.starting_fleet", start)
    with pytest.raises(InterruptedError), session.open_run(store, "forked", recipe):
        pass
    assert [config.fleet.ray_address for config in started] == [None]
