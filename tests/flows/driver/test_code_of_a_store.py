"""No reader of a configuration imports code that a store names, wherever in the store it is named."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cairn.configs import plugins
from cairn.configs.errors import ConfigError
from cairn.configs.kinds import OPTIONS, named
from cairn.configs.loader import from_manifest, inherit
from cairn.configs.plugins import BadPlugin
from cairn.flows.cli import app
from cairn.flows.driver.session import open_run
from cairn.flows.driver.trust import is_at_hand, require_trusted
from cairn.flows.export.bundle import bundle
from cairn.flows.export.model import export
from cairn.flows.history.fork import fork
from cairn.flows.iteration import iteration
from cairn.flows.reading.views import run_status
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store import canonical
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store
from cairn.tasks.trainer.recovery import replay
from tests.tables import cases
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

BENCHMARK = {"name": "b", "path": "b.jsonl", "max_response_len": 4}
MIXED = {"data.mixture.data_source_path"}
EXCLUSIVE = {"data.get_samples_path", "data.curriculum.policy", "rollout.staleness_policy"}
"""Options that cannot stand beside the others."""


TAKES_EFFECT_WITH = {
    "algorithm.custom_tis_function_path": {"algorithm": {"use_tis": True, "use_rollout_logprobs": False}},
    "rollout.buffer_filter_path": {"rollout": {"over_sampling_batch_size": 1_000}},
    "rollout.staleness_policy": {"rollout": {"pipeline": "streaming"}},
    "rollout.tools": {"rollout": {"custom_generate_function_path": "tool_calls"}},
}


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that is loaded by its file."""
    found: list[str] = []

    def load(file: Path) -> Any:
        found.append(str(file))
        raise BadPlugin(f"{file} is not to be run")

    monkeypatch.setattr(plugins, "_load_file", load)
    return found


@pytest.fixture
def forged_run(tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Ledger, str]:
    """A run of one iteration with a fork, and a file of code among the runs."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    store = LocalStore(str(tmp_path / "store"))
    config = tiny_config(tiny_assets, reward={"custom_rm_path": None, "rm_type": "exact_match"})
    with tiny_context(store.url, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    fork(Ledger.open(store, "tiny"), 0, "forked", ["training.lr=0.5"])
    store.write("runs/tiny/evil.py", b"def anything(*arguments): return 1.0\n")
    return Ledger.open(store, "tiny"), f"{store.root}/runs/tiny/evil.py:anything"


def set_option(config: dict[str, Any], option: str, value: str) -> None:
    *sections, last = option.split(".")
    for name in sections:
        if name in ("benchmarks", "mixture"):
            config[name] = config.get(name) or [dict(BENCHMARK) if name == "benchmarks" else {"name": "m", "path": "m"}]
            config = config[name][0]
        else:
            config = config[name]
    config[last] = [value] if last == "tools" else value


def forge(store: Store, path: str, change: Callable[[dict[str, Any]], object]) -> None:
    fields = canonical.unseal(store.read(path))
    change(fields)
    store.write(path, canonical.seal(fields))


def name_everywhere(store: Store, run: str, evil: str) -> None:
    """Let a manifest name the file in every option that the schema takes together."""

    def change(fields: dict[str, Any]) -> None:
        for option in sorted(set(OPTIONS) - MIXED - EXCLUSIVE):
            set_option(fields["config"], option, evil)

    forge(store, layout.run_manifest(run), change)


@cases("option", sorted(set(OPTIONS) - MIXED))
def test_no_option_of_a_store_is_imported_or_trusted(
    option: str, imported: list[str], tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, evil = LocalStore("."), "runs/tiny/evil.py:anything"
    store.write("runs/tiny/evil.py", b"def anything(*arguments): return 1.0\n")
    recorded = tiny_config(tiny_assets).model_dump(mode="json")
    for section, values in TAKES_EFFECT_WITH.get(option, {}).items():
        recorded[section].update(values)
    set_option(recorded, option, evil)
    for config in (from_manifest(recorded), inherit(recorded, [])):
        (name,) = (path for path in named(config, option).values() if evil in path or evil in list(path))
        for path in [name] if isinstance(name, str) else name:
            with pytest.raises(BadPlugin, match="is named by a ledger"):
                OPTIONS[option].load(path)
        with pytest.raises(ConfigError, match=re.escape(option.split(".")[-1])):
            require_trusted(config, store)
    assert imported == []


READERS = [
    "status tiny",
    "show tiny@0",
    "verify tiny",
    "lineage tiny@0/0 0",
    "diff tiny forked",
    "report tiny report.html",
    "costs tiny",
    "gc tiny",
    "episode tiny@0/0",
    "episode tiny@0/0 --replay",
    "whatif tiny@0 --set algorithm.gamma=0.5",
    "rescore tiny --reward exact_match",
    "replay tiny@0 train",
    "replay tiny --all",
    "replay tiny --weights",
    "export tiny exported",
    "bundle tiny@0/0 bundle.zip",
    "fork tiny@0 another",
    "resume tiny",
    "resume forked",
    "train recipe.yaml --run tiny",
    "eval tiny@0 gsm8k --data b.jsonl",
    "eval tiny@0 b",
    "approve tiny@1",
    "quarantine tiny --prompt 1",
    "pin tiny@0",
    "timeline tiny@0 timeline.json",
    "runs",
    "sql 'select * from runs'",
    "delete tiny --prompt 1 --yes-delete tiny",
]
"""Commands that read a run's configuration, as they are typed."""


def typed(store: str) -> Iterator[list[str]]:
    for command in READERS:
        yield [*shlex.split(command), *([] if command.startswith("plan") else ["--store", store])]


def test_no_command_imports_what_a_manifest_names(
    forged_run: tuple[Ledger, str], imported: list[str], tiny_assets: Path
) -> None:
    ledger, evil = forged_run
    own = tiny_config(tiny_assets, reward={"custom_rm_path": None, "rm_type": "exact_match"})
    Path("recipe.yaml").write_text(yaml.safe_dump(own.model_dump(mode="json")))
    name_everywhere(ledger.store, "tiny", evil)
    traces = []
    for command in typed(ledger.store.url):
        result = CliRunner().invoke(app, command)
        if "Usage:" in result.output or not isinstance(result.exception, SystemExit | None):
            traces.append((command, result.output, repr(result.exception)))
    assert (imported, traces) == ([], [])


def test_a_bundle_takes_no_code_from_a_store(
    forged_run: tuple[Ledger, str], imported: list[str], tmp_path: Path
) -> None:
    ledger, evil = forged_run
    forge(ledger.store, layout.run_manifest("tiny"), lambda f: f["config"]["reward"].update(custom_rm_path=evil))
    assert bundle(Ledger.open(ledger.store, "tiny"), 0, 0, tmp_path / "sample.zip").grader is None
    assert imported == []


def test_no_weights_are_exported_into_a_model_of_a_store(forged_run: tuple[Ledger, str], tmp_path: Path) -> None:
    ledger, _ = forged_run
    shown = f"{ledger.store.url}/evals/model"
    forge(ledger.store, layout.run_manifest("tiny"), lambda fields: fields["config"]["model"].update(path=shown))
    with pytest.raises(ConfigError, match=r"model\.path is .* a store may not name a model among its own files"):
        export(Ledger.open(ledger.store, "tiny"), tmp_path / "exported")


@pytest.mark.proof
def test_the_terms_of_a_commit_are_trusted_no_more_than_a_manifest(
    forged_run: tuple[Ledger, str], imported: list[str], tiny_assets: Path
) -> None:
    ledger, evil = forged_run
    store = ledger.store
    manifest = canonical.unseal(store.read(layout.run_manifest("tiny")))
    names = ("schema_version", "run", "config", "inputs", "rules", "code_version")
    upgrade = {**{name: manifest[name] for name in names}, "epoch": 1, "recorded_at": 0.0}
    for number, loss in ((1, evil), (2, "policy_loss")):
        config = {**upgrade["config"], "algorithm": {**upgrade["config"]["algorithm"], "loss_type": loss}}
        store.write(layout.upgrade("tiny", number), canonical.seal({**upgrade, "config": config, "number": number}))
    forge(store, layout.commit("tiny", 0, Step.TRAIN), lambda fields: fields.update(terms=1))
    config = tiny_config(tiny_assets, reward={"custom_rm_path": None, "rm_type": "exact_match"})
    trained = Ledger.open(store, "tiny").find(0, Step.TRAIN)
    assert trained is not None
    with tiny_context(store.url, config) as (run, _), pytest.raises(BadPlugin, match="is named by a ledger"):
        replay(run, trained)
    with (
        open_run(store, "tiny", None) as run,
        pytest.raises(ConfigError, match=r"algorithm\.loss_type is .*a store may"),
    ):
        run.config_of(trained)
    assert imported == []


def test_every_folder_of_a_store_is_known_and_none_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = re.findall(r"^([a-z-]+)/", layout.__doc__ or "", flags=re.M)
    assert set(described) == set(layout.ROOT_FOLDERS)
    monkeypatch.chdir(tmp_path)
    assert is_at_hand(tmp_path / "mine.py", LocalStore("."))
    evil = {folder: tmp_path / folder / "of_somebody" / "evil.py" for folder in layout.ROOT_FOLDERS}
    assert [folder for folder, file in evil.items() if is_at_hand(file, LocalStore("."))] == []


def test_status_of_a_run_is_told_all_the_same(forged_run: tuple[Ledger, str], imported: list[str]) -> None:
    ledger, evil = forged_run
    name_everywhere(ledger.store, "tiny", evil)
    assert run_status(ledger.store, "tiny").iterations
    assert imported == []
