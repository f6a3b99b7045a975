"""A store is data: nothing read from it runs, leaves its folder, or holds a key."""

import ast
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.errors import ConfigError
from cairn.engines.training.checkpoint import STATE
from cairn.flows.cli.printing import print_parts, print_stderr, say
from cairn.flows.cli.tables import status_lines
from cairn.flows.driver.session import open_run
from cairn.flows.driver.trust import recorded_config, require_trusted
from cairn.flows.iteration import iteration
from cairn.flows.reading.views import run_status
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import list_runs
from cairn.storage.ledger.snapshots import read_bytes
from cairn.storage.opening import open_store
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, StoreRefused
from cairn.storage.store.local import LocalStore
from cairn.storage.store.s3 import S3Store
from cairn.storage.upkeep.verification import verify
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "storage", "engines", "tasks", "flows")

EXECUTING_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
EXECUTING_CALLS = {"eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.unsafe_load", "yaml.full_load"}
MAY_UNPICKLE = {
    "engines/fleet/keepers.py": ["pickle"],  # reads what it has just written, to see whether the driver can
    "engines/training/megatron/metadata.py": ["pickle"],  # imports nothing; tests/test_forged_checkpoints.py
    "engines/training/rows.py": ["pickle"],  # between the ranks of one training engine
    "tasks/durable/beside.py": ["pickle"],  # between a driver and its child
}
"""Files that read no pickle of others."""
EXECUTING_LOADERS = {"yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"}


class Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def executing(source: str) -> Iterator[str]:
    """Imports and calls by which bytes could become code."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in EXECUTING_MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in EXECUTING_MODULES:
                yield module
            case ast.Call(func=function) if ast.unparse(function) in EXECUTING_CALLS:
                yield ast.unparse(node)
            case ast.Attribute() if ast.unparse(node) in EXECUTING_LOADERS:
                yield ast.unparse(node)
            case ast.keyword(arg="trust_remote_code" | "allow_pickle" | "shell", value=value):
                if ast.unparse(value) != "False":
                    yield ast.unparse(node)


def test_no_code_of_ours_turns_bytes_into_objects_that_run() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 80
    found = {str(file.relative_to(ROOT)): list(executing(file.read_text())) for file in files}
    assert {file: calls for file, calls in found.items() if calls} == MAY_UNPICKLE


def test_what_could_run_is_recognised() -> None:
    lines = ["import pickle", "from dill import loads", "torch.load(f)", "eval(x)", "yaml.load(x, yaml.Loader)"]
    lines += ["Model.from_pretrained(path, trust_remote_code=True)", "pickle = json.loads(text)"]
    lines += ["Model.from_pretrained(path, trust_remote_code=False)"]
    assert [len(list(executing(line))) for line in lines] == [1, 1, 1, 1, 1, 1, 0, 0]


@pytest.fixture(scope="module")
def written(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of one iteration and its checkpoint."""
    store = tmp_path_factory.mktemp("written")
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1})
    with tiny_context(str(store), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    return store


@pytest.fixture
def store(written: Path, tmp_path: Path) -> LocalStore:
    """A copy of it."""
    copy = LocalStore(str(tmp_path / "store"))
    for file in LocalStore(str(written)).find(layout.RUNS):
        copy.write(file, (written / file).read_bytes())
    return copy


def reseal(store: LocalStore, path: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter a sealed file as someone would who can write to the store: its digest is right."""
    fields = canonical.unseal(store.read(path))
    change(fields)
    store.write(path, canonical.seal(fields))


def test_a_pickle_in_any_place_of_a_run_does_not_run(
    store: LocalStore, written: Path, tiny_assets: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    payload = pickle.dumps(Payload(mark))
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1})
    for path in store.find(layout.RUNS):
        store.write(path, payload)
        if "/leases/" in path:
            with pytest.raises(Damaged, match="cannot be trusted"), tiny_context(store.url, config):
                pass
        elif path == layout.run_manifest("tiny"):
            with pytest.raises(Damaged, match=path):
                Ledger.open(store, "tiny")
        else:
            ledger = Ledger.open(store, "tiny")
            findings = [finding for verified in verify(ledger) for finding in verified.findings]
            assert path in {finding.path for finding in findings}
            with pytest.raises(Damaged, match=path.removeprefix("runs/tiny/")):
                read_everything(ledger)
        store.write(path, (written / path).read_bytes())
    assert not mark.exists()
    pickle.loads(payload)
    assert mark.exists()


def read_everything(ledger: Ledger) -> None:
    for commit in ledger.commits(0):
        for output in commit.outputs:
            read_bytes(ledger.store, commit.run, output)


def test_a_pickle_with_the_right_digests_is_still_no_checkpoint(
    store: LocalStore, tiny_assets: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    payload = pickle.dumps(Payload(mark))
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1})
    with tiny_context(store.url, config) as (run, _):
        folder = run.ledger.folder_of(run.committed(0, Step.CHECKPOINT))

        def forged(state: dict[str, Any]) -> None:
            state["indexes"][0] |= {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
            store.write(f"{folder}/{state['indexes'][0]['name']}", payload)

        reseal(store, f"{folder}/{STATE}", forged)
        with pytest.raises(Damaged, match="is not an index of parts"):
            run.fleet.training.load(store.url, folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../other", "/etc", "a/b", "..", ".hidden", "a\\b", "", "x" * 101, "a..b", "a\nb"])
def test_a_name_cannot_leave_its_folder(name: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with pytest.raises(ValueError, match="not a usable name"):
        Ledger.create(store, name, {})
    with pytest.raises(ValueError, match="not a usable name"):
        layout.commit("run", 0, Step.ROLLOUT, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", "a//b", "./a", "a\\..\\b"])
def test_a_path_cannot_leave_the_store(path: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    for call in (store.read, store.list, store.delete, store.exists, store.sha256, store.find):
        with pytest.raises(ValueError, match="not a path inside a store"):
            call(path)
    with pytest.raises(ValueError, match="not a path inside a store"):
        store.write(path, b"x")
    assert not (tmp_path / "outside").exists()


def test_a_link_does_not_lead_out_of_a_local_store(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("secret")
    store = LocalStore(str(tmp_path / "store"))
    store.write("runs/inside", b"x")
    (store.root / "runs" / "link").symlink_to(outside)
    (store.root / "runs" / "file").symlink_to(outside / "file")
    calls: list[Callable[[], object]] = [
        lambda: store.read("runs/link/file"),
        lambda: store.read("runs/file"),
        lambda: store.write("runs/link/new", b"x"),
        lambda: store.delete("runs/link/file"),
        lambda: store.find("runs"),
    ]
    for call in calls:
        with pytest.raises(StoreRefused, match="leads out of the store by a symbolic link; remove the link"):
            call()
    assert [file.name for file in outside.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "forge",
    [
        lambda fields: fields["outputs"][0].update(path="../../outside"),
        lambda fields: fields["outputs"][0].update(path="/etc/passwd"),
        lambda fields: fields.update(run="../other"),
        lambda fields: fields.update(run="other"),
        lambda fields: fields.update(attempt="../../../../outside"),
        lambda fields: fields.update(shard="../outside"),
    ],
)
def test_a_forged_commit_is_refused(store: LocalStore, forge: Callable[[dict[str, Any]], None]) -> None:
    path = layout.commit("tiny", 0, Step.ADVANTAGE)
    reseal(store, path, forge)
    with pytest.raises(Damaged, match=path):
        Ledger.open(store, "tiny").find(0, Step.ADVANTAGE)


@pytest.mark.parametrize(
    "forge",
    [
        lambda fields: fields.update(run="../other"),
        lambda fields: fields.update(run="other"),
        lambda fields: fields.update(parent={"run": "../other", "iteration": 0}),
    ],
)
def test_a_forged_manifest_is_refused(store: LocalStore, forge: Callable[[dict[str, Any]], None]) -> None:
    reseal(store, layout.run_manifest("tiny"), forge)
    with pytest.raises(Damaged, match="cannot be trusted"):
        Ledger.open(store, "tiny")


def test_a_forged_checkpoint_names_no_file_elsewhere(store: LocalStore, tiny_assets: Path) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1})
    with tiny_context(store.url, config) as (run, _):
        folder = run.ledger.folder_of(run.committed(0, Step.CHECKPOINT))
        good = store.read(f"{folder}/00000.index.json")
        for forge in (
            lambda index: index["files"][0].update(name="../../../00000-00000.part"),
            lambda index: index["parts"][0].update(offset=index["files"][0]["bytes"]),
            lambda index: index["parts"][0].update(file=1),
            lambda index: index["parts"][0].update(tensor=len(index["tensors"])),
            lambda index: index["parts"][0]["place"].__setitem__(0, 1000),
        ):
            reseal(store, f"{folder}/00000.index.json", forge)
            data = store.read(f"{folder}/00000.index.json")
            told = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            reseal(store, f"{folder}/{STATE}", lambda state, told=told: state["indexes"][0].update(told))
            with pytest.raises(Damaged, match=r"00000\.index\.json is not an index of parts"):
                run.fleet.training.load(store.url, folder)
            store.write(f"{folder}/00000.index.json", good)
        reseal(store, f"{folder}/{STATE}", lambda state: state["indexes"][0].update(name="../00000.index.json"))
        with pytest.raises(Damaged, match=r"training_state\.json is damaged"):
            run.fleet.training.load(store.url, folder)


GRADER = "def grade(response, label, metadata):\n    return 1.0\n"


@pytest.fixture
def forged_plugin(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ledger]:
    """The run with another grader in its manifest, seen from a folder of its user's."""
    (tmp_path / "work" / ".venv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))

    def forge(path: str, **fleet: str) -> Ledger:
        def change(fields: dict[str, Any]) -> None:
            fields["config"]["reward"]["custom_rm_path"] = path
            fields["config"]["fleet"].update(fleet)

        reseal(store, layout.run_manifest("tiny"), change)
        return Ledger.open(store, "tiny")

    return forge


@pytest.mark.parametrize(
    "path",
    ["{outside}/x.py:grade", "../x.py:grade", "link.py:grade", "timeit.timeit", "builtins.exec", "pytest.main"],
)
def test_a_store_names_no_code_but_the_users(
    path: str, forged_plugin: Callable[..., Ledger], store: LocalStore, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "x.py").write_text(f"open({str(mark)!r}, 'w')\n{GRADER}")
    Path("link.py").symlink_to(tmp_path / "x.py")
    forged_plugin(path.format(outside=tmp_path))
    with (
        pytest.raises(
            ConfigError, match="a store may not name code outside the working folder: run in the code's folder"
        ),
        open_run(store, "tiny", None),
    ):
        pass
    assert not mark.exists()


def test_a_file_among_the_runs_is_no_code(
    forged_plugin: Callable[..., Ledger], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.root)
    store.write("runs/tiny/evil.py", GRADER.encode())
    with pytest.raises(ConfigError, match=r"custom_rm_path is 'runs/tiny/evil.py:grade' in the ledger"):
        recorded_config(forged_plugin("runs/tiny/evil.py:grade"))


@pytest.mark.parametrize(
    "path", ["store/evil.py:grade", "store.evil.grade", "store.runs.tiny.evil.grade", "package.linked.evil.grade"]
)
def test_a_file_of_a_store_below_the_folder_of_its_user_is_no_code(
    path: str, forged_plugin: Callable[..., Ledger], store: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for folder in ("", "runs/tiny/"):
        store.write(f"{folder}evil.py", GRADER.encode())
    package = tmp_path / "package"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("linked").symlink_to(store.root / "runs" / "tiny")
    with pytest.raises(ConfigError, match="a store may not name code outside the working folder"):
        recorded_config(forged_plugin(path))


@pytest.mark.parametrize("path", ["grader.py:grade", "{mine}/grader.py:grade"])
def test_code_where_its_user_works_may_be_named(
    path: str, forged_plugin: Callable[..., Ledger], tmp_path: Path
) -> None:
    for folder in (Path(), tmp_path / "mine"):
        folder.mkdir(exist_ok=True)
        (folder / "grader.py").write_text(GRADER)
    path = path.format(mine=tmp_path / "mine")
    assert recorded_config(forged_plugin(path)).reward.custom_rm_path == path


@pytest.mark.parametrize(("address", "trusted"), [("auto", True), ("127.0.0.1:6379", True), ("198.51.100.7:1", False)])
def test_a_store_names_no_cluster_elsewhere(address: str, trusted: bool, forged_plugin: Callable[..., Ledger]) -> None:
    Path("grader.py").write_text(GRADER)
    ledger = forged_plugin("grader.py:grade", ray_address=address)
    if trusted:
        assert recorded_config(ledger).fleet.ray_address == address
    else:
        with pytest.raises(ConfigError, match="a store may not name a cluster of another machine"):
            recorded_config(ledger)


@pytest.mark.parametrize(("url", "trusted"), [("http://127.0.0.1:30000/", True), ("http://198.51.100.7:30000", False)])
def test_a_store_has_weights_sent_to_no_server_elsewhere(
    url: str, trusted: bool, tiny_assets: Path, store: LocalStore
) -> None:
    config = tiny_config(
        tiny_assets,
        rollout={"engine": "sglang", "external_urls": [url]},
        fleet={"update_weight_transport": "distributed"},
    )
    if trusted:
        require_trusted(config, store)
    else:
        with pytest.raises(ConfigError, match=r"a store may not send weights or samples to another machine"):
            require_trusted(config, store)


SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIAEXAMPLE:{SECRET}@bucket/prefix",
        "s3://AKIAEXAMPLE:hunter2@bucket",
        "S3://AKIAEXAMPLE@bucket/prefix",
        f"s3://bucket/prefix?secret={SECRET}",
        f"s3://:{SECRET}@",
    ],
)
def test_a_store_address_with_keys_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreRefused, match="a store's address must not contain keys; check AWS_ACCESS") as caught:
        open_store(url)
    assert not any(word in str(caught.value) for word in ("AKIA", "hunter2", "wJal", "K7MD"))


def test_an_endpoint_with_keys_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("http://user:hunter2@127.0.0.1:1", "hunter2@nowhere"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StoreRefused) as caught:
            S3Store("s3://bucket/prefix").check()
        assert "hunter2" not in str(caught.value)


def test_text_of_a_store_steers_no_terminal(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    title = "\x1b]0;owned\x07"
    reseal(store, layout.lease_file(layout.leases("tiny"), 1), lambda fields: fields["holder"].update(host=title))
    print_parts(status_lines(run_status(store, "tiny")))
    print_stderr(f"run {title}")
    say(f"run {title}")
    shown = capsys.readouterr()
    assert "\\x1b]0;owned" in shown.out
    assert "\x1b]0" not in shown.out + shown.err


def test_a_run_that_is_listed_can_be_named(store: LocalStore) -> None:
    (store.root / "runs" / "bad name").mkdir()
    assert list_runs(store) == ["tiny"]
    assert isinstance(Ledger.open(store, "tiny").find(0, Step.TRAIN), Commit)
