"""Options that say where something is take no password, and no message repeats one."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cairn.configs.errors import ConfigError
from cairn.configs.loader import load, parse
from cairn.configs.schema.base import has_credentials
from cairn.configs.schema.evaluation import Benchmark
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver import trust
from tests.flows.written_runs import RECIPE
from tests.tables import cases

KEY = "SECRETKEY123"
SECRET = [
    f"https://user:{KEY}@host/x",
    f"https://{KEY}@host/x",
    f"https://user%3A{KEY}%40host/x",
    f"postgresql://user:{KEY}@host/db",
    f"postgresql+psycopg2://host/db?user=a&password={KEY}",
    f"jdbc:sqlserver://host;pwd={KEY};",
    f"http://host/v1?api_key={KEY}",
    f"http://host/v1?api%5Fkey={KEY}",
    f"http://host/v1#access_token={KEY}",
    f"https://host/api/grade?code={KEY}",
    f"https://host/x?jwt={KEY}",
    f"//user:{KEY}@host/x",
    f"user:{KEY}@host:8000",
    f"simplecache::https://user:{KEY}@host/x",
    f"ray://user:{KEY}@host:10001",
    f"s3://AKIAEXAMPLE:{KEY}/K7MD@bucket/train.jsonl@[0:9]",
    f"https://host/train.jsonl?X-Amz-Signature={KEY}",
    f"simplecache::https://host/train.parquet?access_token={KEY}",
]
PLAIN = [
    "http://host:30000/v1",
    "host:6379",
    "https://host/rows.jsonl?encode=utf8&country_code=1",
    "127.0.0.1",
    "auto",
    "sqlite:///mlflow.db",
    "/data/my:rows.jsonl@[0:100]",
    "s3://bucket/train.parquet@[-50:]",
    "~/models/a@b",
    "s3://bucket/a@[0:9]",
    "https://host:8080/a.jsonl?download=1",
    "hf://datasets/org/name@main/train.parquet",
]
NAMED = re.compile(r"(^|[._])(url|urls|uri|host|address|dir|corpus|path|data)$")


def test_an_address_with_a_secret_is_told_from_one_without() -> None:
    assert [address for address in SECRET if not has_credentials(address)] == []
    assert [address for address in PLAIN if has_credentials(address)] == []
    assert [parse(RECIPE | {"data": {"path": address}}).data.path for address in PLAIN] == PLAIN


def fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for below in trust.sections_in(field.annotation):
            yield from fields(below, f"{prefix}{name}.")


def test_every_option_that_is_an_address_is_of_the_one_type() -> None:
    texts = {*trust.free_options(RunConfig), *trust.free_options(Benchmark)}
    said = {
        option: repr(field.annotation) + repr(field.metadata)
        for schema in (RunConfig, Benchmark)
        for option, field in fields(schema)
        if option in texts and NAMED.search(option)
    }
    found = {option: text for option, text in said.items() if "_unchecked" not in text}  # those that name code
    assert len(found) > 15
    assert [option for option, text in found.items() if "_without_credentials" not in text] == []


ADDRESSES: list[tuple[str, dict[str, Any]]] = [
    ("tracking.mlflow_tracking_uri", {"tracking": {"use_mlflow": True, "mlflow_tracking_uri": "{}"}}),
    ("tracking.wandb_host", {"tracking": {"use_wandb": True, "wandb_host": "{}"}}),
    ("tracking.tensorboard_dir", {"tracking": {"tensorboard_dir": "{}"}}),
    ("tracking.prometheus_host", {"tracking": {"prometheus_port": 1, "prometheus_host": "{}"}}),
    ("rollout.external_urls.0", {"rollout": {"engine": "sglang", "external_urls": ["{}"]}}),
    ("model.teacher_url", {"model": {"teacher_url": "{}", "teacher_name": "t"}}),
    ("reward.rm_url", {"reward": {"rm_type": "remote_rm", "rm_url": "{}"}}),
    ("reward.judge.url", {"reward": {"rm_type": "judge", "judge": {"url": "{}", "model": "m"}}}),
    ("data.path", {"data": {"path": "{}"}}),
    ("fleet.ray_address", {"fleet": {"ray_address": "{}"}}),
    (
        "rollout.tool_options.search.corpus",
        {"rollout": {"tools": ["search"], "tool_options": {"search": {"corpus": "{}"}}}},
    ),
    (
        "eval.benchmarks.0.path",
        {"eval": {"eval_interval": 1, "benchmarks": [{"name": "b", "path": "{}", "max_response_len": 8}]}},
    ),
    ("model.path", {"model": {"path": "{}"}}),
    ("rollout.model_path", {"rollout": {"engine": "sglang", "model_path": "{}"}}),
]


def filled(value: Any, address: str) -> Any:
    if isinstance(value, dict):
        return {name: filled(inner, address) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, address) for inner in value]
    return address if value == "{}" else value


@cases(("option", "sections"), ADDRESSES)
def test_an_option_refuses_a_secret_without_repeating_it(option: str, sections: dict[str, Any]) -> None:
    for address in SECRET:
        values = copy.deepcopy(RECIPE)
        for section, options in filled(sections, address).items():
            values[section] = values.get(section, {}) | options
        with pytest.raises(ConfigError) as refused:
            parse(values)
        assert KEY not in str(refused.value), address
        assert "AKIA" not in str(refused.value), address
        assert re.search(f"{re.escape(option)} holds credentials, .* set them in the environment", str(refused.value))


@cases(
    "override",
    [
        f"tracking.wandb_hosts=https://u:{KEY}@h",
        f"tracking.wandb_host=[https://u:{KEY}@h]",
        f"rollout.external_urls=http://u:{KEY}@h",
        f"tracking.wandb_mode=https://u:{KEY}@h",
        f"tracking.wandb_host.x.y=https://u:{KEY}@h",
        f"data.path.0.x=https://u:{KEY}@h",
        f"https://u:{KEY}@h",
    ],
)
def test_no_message_about_an_override_repeats_one(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("configs/recipes/quickstart.yaml", [override])
    assert KEY not in str(refused.value)
