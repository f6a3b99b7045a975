"""Signatures: every file of a ledger says who wrote it, and none can be altered by who has no key."""

import json
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner, Result

from cairn.flows.cli import app
from cairn.storage.ledger import layout
from cairn.storage.ledger.decisions import Verdict
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.answers import Answer, Answers
from cairn.storage.logs.parts import part_bytes
from cairn.storage.opening import open_store
from cairn.storage.store import canonical
from cairn.storage.store.errors import StoreError, StoreRefused
from cairn.storage.store.local import LocalStore
from cairn.storage.store.signed import new_key
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import delete_run, garbage
from cairn.storage.upkeep.signatures import check_result_signatures, check_signature, check_signatures, read_signers
from tests.flows.evaluation.test_comparing import result
from tests.flows.written_runs import new_run, rollout_table, write_iteration

COMMIT = layout.commit("toy", 0, "train")


def cairn(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def signers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of signers; ada's key is in the environment, and bob's in a file."""
    lines = [cairn("keygen", tmp_path / name, "--as", name).stdout for name in ("ada", "bob")]
    (tmp_path / "signers").write_text("# who may write\n" + "".join(lines))
    monkeypatch.setenv("CAIRN_SIGNING_KEY", str(tmp_path / "ada"))
    return tmp_path / "signers"


def written(url: str) -> Ledger:
    ledger = new_run(open_store(url))
    write_iteration(ledger, 0)
    ledger.decisions.record(lambda so_far: Verdict(iteration=1, approved=True))
    return ledger


def problems(url: str, signers: Path) -> dict[str, str]:
    ledger = Ledger.open(open_store(url), "toy")
    return {one.path: one.problem for one in check_signatures(ledger, read_signers(signers)) if one.problem}


def test_what_each_writes_is_signed_by_them_and_digests_are_as_without(
    signers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "store")
    written(url)
    monkeypatch.setenv("CAIRN_SIGNING_KEY", str(tmp_path / "bob"))
    Ledger.open(open_store(url), "toy").decisions.record(lambda so_far: Verdict(iteration=2, approved=False))
    monkeypatch.delenv("CAIRN_SIGNING_KEY")
    ledger = Ledger.open(open_store(url), "toy")
    found = {one.path: one.signer for one in check_signatures(ledger, read_signers(signers))}
    assert found.pop(layout.decision("toy", 2)) == "bob"
    assert set(found.values()) == {"ada"}
    assert {
        layout.run_manifest("toy"),
        layout.decision("toy", 1),
        layout.lease_file(layout.leases("toy"), 1),
        COMMIT,
    } < found.keys()
    assert len(ledger.commits(0)) == len([path for path in found if "/iterations/" in path]) == 9
    assert list(garbage(ledger)) == []


def edited(data: bytes) -> bytes:
    fields = canonical.unseal(data)
    return canonical.seal({**fields, "metrics": {"loss": 0.0}})


def test_a_commit_that_was_altered_digests_and_all_is_signed_by_nobody(signers: Path, tmp_path: Path) -> None:
    store = written(str(tmp_path / "store")).store
    store.write(COMMIT, edited(store.read(COMMIT)))
    assert problems(store.url, signers) == {COMMIT: f"{COMMIT} has no signature of its present content"}


def forged(store: Store, path: str) -> str:
    """An altered commit, with the signature of the true one where its own would be."""
    (signature,) = (one for one in store.find(layout.iteration("toy", 0)) if one.startswith(f"{path}."))
    from cairn.storage.store.signed import signature_path

    data = edited(store.read(path))
    store.write(path, data)
    store.write(signature_path(path, data), store.read(signature))
    return f"{path} is wrongly signed"


def moved(store: Store, path: str) -> str:
    """The commit of another place, with its signature."""
    other = layout.commit("toy", 0, "sync")
    (signature,) = (one for one in store.find(layout.iteration("toy", 0)) if one.startswith(f"{other}."))
    store.write(path, store.read(other))
    store.write(f"{path}{signature.removeprefix(other)}", store.read(signature))
    return f"{path} is wrongly signed"


def by_a_stranger(store: Store, path: str) -> str:
    """Signed anew with a key of one's own."""
    key = Path(store.url).parent / "mallory"
    public = new_key(key)
    from cairn.storage.store.signed import read_key, signing

    data = edited(store.read(path))
    store.delete(path)
    signing(LocalStore(store.url), read_key(str(key)), LocalStore).create(path, data)
    return f"{path} is signed by {public}, which is not one of the signers"


@pytest.mark.parametrize("tampering", [forged, moved, by_a_stranger])
def test_a_signature_counts_for_its_own_bytes_and_place_and_for_who_is_listed(
    signers: Path, tmp_path: Path, tampering: Callable[[Store, str], str]
) -> None:
    store = written(str(tmp_path / "store")).store
    sentence = tampering(store, COMMIT)
    found = problems(store.url, signers)
    assert list(found) == [COMMIT]
    assert found[COMMIT].startswith(sentence)


def test_verify_says_who_wrote_what_and_that_the_rest_is_unsigned(
    signers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = written(str(tmp_path / "store"))
    give = ("verify", "toy", "--store", ledger.store.url, "--signers", signers)
    result = cairn(*give)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "ada wrote 12 of 12 files of the ledger"
    monkeypatch.delenv("CAIRN_SIGNING_KEY")
    Ledger.open(open_store(ledger.store.url), "toy").decisions.record(lambda _: Verdict(iteration=1, approved=False))
    result = cairn(*give)
    assert (result.exit_code, cairn(*give[:-2]).exit_code) == (1, 0)
    assert "unsigned: runs/toy/decisions/000002.json has no signature of its present content" in result.stdout
    answer = json.loads(cairn(*give, "--json").stdout)
    assert [finding["fault"] for finding in answer["findings"]] == ["unsigned"]
    assert answer["signers"][COMMIT] == "ada"


def test_verify_says_who_wrote_the_results_of_evaluations_and_which_are_unsigned(
    signers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "store")
    result(open_store(url), "before", [1.0])
    give = ("verify", "--evals", "--store", url, "--signers", signers)
    signed = cairn(*give)
    assert (signed.exit_code, signed.stdout.splitlines()[-1]) == (0, "ada wrote 2 of 2 files of the ledger")
    monkeypatch.delenv("CAIRN_SIGNING_KEY")
    other = result(open_store(url), "after", [0.0])
    assert (cairn(*give).exit_code, cairn(*give[:-2]).exit_code) == (1, 0)
    answer = json.loads(cairn(*give, "--json").stdout)
    path = layout.evaluation_result(other.key.folder)
    assert (len(answer["signers"]), {one["fault"] for one in answer["findings"]}) == (2, {"unsigned"})
    assert path in [one["path"] for one in answer["findings"]]


def test_a_key_is_its_owners_alone_and_is_never_overwritten(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert cairn("keygen", key, "--as", "ada").exit_code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    assert cairn("keygen", key).exit_code == 2
    assert key.read_bytes() == before
    assert cairn("keygen", tmp_path / "other", "--as", "two words").exit_code == 2


@pytest.mark.parametrize("what", ["absent", "no key", "another kind"])
def test_a_key_that_cannot_sign_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    key = tmp_path / "key"
    if what == "no key":
        key.write_text("secret words")
    elif what == "another kind":
        other = generate_private_key(SECP256R1())
        key.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    monkeypatch.setenv("CAIRN_SIGNING_KEY", str(key))
    with pytest.raises(StoreRefused, match=f"CAIRN_SIGNING_KEY names {key}, which is not") as refused:
        open_store(str(tmp_path / "store"))
    assert "secret words" not in str(refused.value)
    result = cairn("runs", "--store", tmp_path / "store")
    assert (result.exit_code, "cairn keygen writes one" in result.stderr) == (2, True)


@pytest.mark.parametrize("text", ["", "# nobody\n", "ada\n", "ada 12\n", "ada xyz extra\n"])
def test_a_list_of_signers_that_names_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "signers").write_text(text)
    with pytest.raises(ValueError, match="signers"):
        read_signers(tmp_path / "signers")


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_who_loses_a_race_leaves_no_signature_and_a_copy_of_the_store_signs_too(
    kind: str, request: pytest.FixtureRequest, signers: Path, tmp_path: Path
) -> None:
    url = str(tmp_path / "store") if kind == "local" else request.getfixturevalue("s3_url")
    store: Store = pickle.loads(pickle.dumps(open_store(url)))
    assert store.create("runs/x/first.json", b"one")
    assert not store.create("runs/x/first.json", b"two")
    assert len(store.find("runs")) == 2
    assert check_signature(store, "runs/x/first.json", read_signers(signers)).signer == "ada"


def test_what_was_created_though_its_reply_was_lost_is_signed(
    signers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, create = open_store(str(tmp_path / "store")), LocalStore.create

    def reply_lost(self: LocalStore, path: str, data: bytes, guard: Callable[[], None]) -> bool:
        create(self, path, data, guard)
        raise StoreError("no answer")

    monkeypatch.setattr(LocalStore, "create", reply_lost)
    with pytest.raises(StoreError):
        store.create("runs/x/first.json", b"one")
    assert check_signature(store, "runs/x/first.json", read_signers(signers)).signer == "ada"


def test_what_is_no_ledger_is_not_signed(signers: Path, tmp_path: Path) -> None:
    assert open_store(str(tmp_path / "store")).create("self-tests/x.json", b"one")
    assert [file.name for file in (tmp_path / "store" / "self-tests").iterdir()] == ["x.json"]


def test_a_signed_run_is_deleted_with_its_signatures(signers: Path, tmp_path: Path) -> None:
    ledger = written(str(tmp_path / "store"))
    assert ledger.lease is not None
    ledger.lease.release(Outcome.COMPLETED)
    delete_run(ledger.store, "toy")
    assert ledger.store.find("runs") == {}


def test_what_is_written_ahead_and_what_graders_answered_is_signed_and_goes_with_its_signature(
    signers: Path, tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    ledger = written(url)
    store = ledger.store
    ahead = f"{layout.iteration('toy', 1)}/rollout/00-000.000001-ab/write_ahead"
    sha256, data = part_bytes(rollout_table(1, (3,), 0), "inputs")
    parts = [f"{ahead}/000000.{sha256}.arrow", f"{ahead}/calls/0000-000001.{sha256}.arrow"]
    parts.append(f"{layout.stream('toy')}/000001-ab/write_ahead/000000.{sha256}.arrow")
    for path in parts:
        store.write(path, data)
    Answers(store, "judge", "1").write({"a" * 64: Answer(1.0)})
    (answered,) = (path for path in store.find("answers") if path.endswith(".arrow"))
    signed_by = read_signers(signers)
    assert {check_signature(store, path, signed_by).signer for path in [*parts, answered]} == {"ada"}
    assert problems(url, signers) == {}
    LocalStore(url).write(parts[0], data + b"x")
    LocalStore(url).write(answered.replace("answers/", "answers/f"), b"of somebody")
    assert list(problems(url, signers)) == [parts[0]]
    found = [one.path for one in check_result_signatures(store, signed_by) if one.problem]
    assert found == [answered.replace("answers/", "answers/f")]
    for path in [*parts, answered]:
        store.delete(path)
    left = [path for folder in layout.ROOT_FOLDERS for path in store.find(folder)]
    assert [path for path in left if path.endswith(".sig") and ".arrow." in path] == []
