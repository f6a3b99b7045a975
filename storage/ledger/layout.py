"""Store paths of everything that belongs to runs. All paths are relative to the store's root.

```
runs/<run>/run.json                                         the manifest
runs/<run>/upgrades/<number>.json                           the terms of a newer version of the code, or another layout
runs/<run>/leases/<epoch>.json                              the owner of the run from this epoch on
runs/<run>/leases/<epoch>.renewed.json                      heartbeat, rewritten every few seconds by a living owner
runs/<run>/leases/<epoch>.end.json                          how the owner ended
runs/<run>/iterations/<iteration>/<step>[.<shard>].json     a commit
runs/<run>/iterations/<iteration>/shards.<number>.json      commits of shards, see `cairn.storage.ledger.shards`
runs/<run>/iterations/<iteration>/<step>/<attempt>/…        files that one attempt at a step wrote
runs/<run>/stream/<attempt>/…                               samples of a driver that no step has taken yet
runs/<run>/stream/admissions/<number>.json                  claim of an admission, see `cairn.storage.logs.admissions`
runs/<run>/decisions/<number>.json                          a person's decision, see `cairn.storage.ledger.decisions`
runs/<run>/retired/<iteration>.<kind>.json                  marks files that retention removed; the commits stay
self-tests/<fingerprint>.json                               whether a kind of machine computes the same bits twice
evals/<weights>-<tokenizer>/<benchmark>-<settings>/result.json      result of a benchmark, shared by all runs
evals/<weights>-<tokenizer>/<benchmark>-<settings>/claims/<epoch>…  leases on the result, like those of a run
evals/<weights>-<tokenizer>/<benchmark>-<settings>/<attempt>/…      files that one attempt at the result wrote
answers/<grader>/<sha256>.arrow                             cached answers of a grader
```
Iterations and epochs have six digits, so that names sort like numbers. An attempt is named
`[<shard>.]<epoch>-<random>`.

Folders may also contain foreign names: from a file system or file browser (`.DS_Store`, `lost+found`, `.nfs…`, markers
of empty folders), or from a person. Code that lists a folder passes each name to the folder's `parse_…` function, which
returns None for a foreign name.
"""

import re
from collections.abc import Iterable
from enum import StrEnum

from cairn.storage.store.store import check_path

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""Pattern of the names of runs, shards and attempts. They must not contain `..` either."""
_NAME = re.compile(NAME_PATTERN)
_NUMBER = re.compile(r"\d{6}")
_MARKER = re.compile(r"([a-z]+)(?:\.([A-Za-z0-9][A-Za-z0-9._-]*))?\.json")
_RECORD = re.compile(r"shards\.(\d{6})\.json")
_ATTEMPT = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*\.)?\d{6}-[0-9a-f]+")
_FILE = re.compile(r"iterations/(\d{6})/([a-z]+)/((?:[A-Za-z0-9._-]+\.)?\d{6}-[0-9a-f]+)/.+")
_EVALUATED = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_EVALUATION = re.compile(r".+-[0-9a-f]{16}")
_GRADER = re.compile(r"[0-9a-f]{16}/")
_ANSWERS = re.compile(r"([0-9a-f]{64})\.arrow")
_SHORT = 16
"""Characters of a digest in the names of folders. The files in the folder hold the whole digest."""
LONGEST_NAME = 100
"""Greatest number of characters in the name of a run or a shard."""
_LONGEST_ATTEMPT = LONGEST_NAME + len(".000000-0123456789ab")
LAST_NUMBER = 999_999
IMAGES_FILE = "images.parquet"
"""File with the images of the samples' prompts, in the folder of an attempt at a rollout."""
CALLS_FILE, RESULTS_FILE = "calls.parquet", "results.parquet"
"""Files with the calls of the samples' code and with long results of these calls, in the same folder."""
SIDE_FILES = (IMAGES_FILE, CALLS_FILE, RESULTS_FILE)
"""Files that are stored next to a step's table."""


RUNS, SELF_TESTS, EVALS, ANSWERS = ROOT_FOLDERS = ("runs", "self-tests", "evals", "answers")
"""All folders in a store's root."""


class Kind(StrEnum):
    """Group of an iteration's files that retention removes together."""

    CHECKPOINT = "checkpoint"
    """Files of the checkpoint."""
    SNAPSHOTS = "snapshots"
    """Files of all other steps."""
    WEIGHTS = "weights"
    """Stored weights of the sync step."""

    @classmethod
    def of(cls, step: str) -> "Kind":
        """Return the kind with which a step's files retire."""
        return {"checkpoint": cls.CHECKPOINT, "sync": cls.WEIGHTS}.get(step, cls.SNAPSHOTS)


def is_name(name: str, longest: int = LONGEST_NAME) -> bool:
    """Return whether a name is safe as one part of a path."""
    return _NAME.fullmatch(name) is not None and ".." not in name and len(name) <= longest


def check_name(name: str, kind: str) -> str:
    """Return `name` if it is safe as one part of a path; raise ValueError otherwise.

    `kind` is what the name belongs to: `run`, `shard` or `attempt`.
    """
    longest = _LONGEST_ATTEMPT if kind == "attempt" else LONGEST_NAME
    if not is_name(name, longest):
        raise ValueError(
            f"{kind} {name!r} is not a usable name: at most {longest} letters, digits, '.', '_' and '-', "
            "starting with a letter or digit, without '..'"
        )
    return name


def digits(value: int, kind: str = "iteration") -> str:
    """Return a number as six digits. Raises ValueError if it is out of range."""
    if not 0 <= value <= LAST_NUMBER:
        raise ValueError(f"{kind} {value} is not between 0 and {LAST_NUMBER}")
    return f"{value:06d}"


def commit_name(iteration: int, step: str, shard: str | None = None) -> str:
    """Return the name by which commits refer to each other: `000042/rollout.00-000`."""
    suffix = f".{check_name(shard, 'shard')}" if shard is not None else ""
    return f"{digits(iteration, 'iteration')}/{step}{suffix}"


def run(name: str) -> str:
    """Return the folder of one run."""
    return f"{RUNS}/{check_name(name, 'run')}"


def self_test(fingerprint: str) -> str:
    """Return the path of the self-test of one kind of machine.

    It records whether such machines compute the same bits twice, as tested by the run that first trained on one.
    """
    return f"{SELF_TESTS}/{check_name(fingerprint, 'fingerprint')}.json"


def evaluated(weights: str, tokenizer: str) -> str:
    """Return the folder of the results of one model, from the digests of its weights and of its tokenizer."""
    return f"{EVALS}/{_short(weights)}-{_short(tokenizer)}"


def evaluation(weights: str, tokenizer: str, benchmark: str, settings: str) -> str:
    """Return the folder of one result. `settings` is the digest of everything that it depends on besides the model."""
    return f"{evaluated(weights, tokenizer)}/{check_name(f'{benchmark}-{_short(settings)}', 'benchmark')}"


def evaluation_result(folder: str) -> str:
    """Return the path of the result in the folder of an evaluation."""
    return f"{folder}/result.json"


def evaluation_claims(folder: str) -> str:
    """Return the folder of the leases on an evaluation."""
    return f"{folder}/claims"


def answers(grader: str) -> str:
    """Return the folder of a grader's answers, from the digest of its name and version."""
    return f"{ANSWERS}/{_short(grader)}"


def answer_folders(names: Iterable[str]) -> list[str]:
    """Return the graders' folders among the entries of `answers`."""
    return [f"{ANSWERS}/{name.removesuffix('/')}" for name in names if _GRADER.fullmatch(name)]


def parse_answers(name: str) -> str | None:
    """Return the SHA-256 in the name of a file of answers, or None for another name."""
    match = _ANSWERS.fullmatch(name)
    return match[1] if match else None


def parse_evaluated(name: str) -> str | None:
    """Return the folder of a model's results for an entry of `evals`, or None for another name."""
    known = name.endswith("/") and _EVALUATED.fullmatch(name.removesuffix("/"))
    return f"{EVALS}/{name.removesuffix('/')}" if known else None


def parse_evaluation(model: str, name: str) -> str | None:
    """Return the folder of a result for an entry of the folder `model`, or None for another name.

    `model` is a path that `parse_evaluated` returned.
    """
    own = name.removesuffix("/")
    known = name.endswith("/") and is_name(own) and _EVALUATION.fullmatch(own)
    return f"{model}/{own}" if known else None


def in_run(name: str, path: str) -> str:
    """Return the store path of a path that is relative to a run's folder, such as `OutputFile.path`."""
    return f"{run(name)}/{check_path(path)}"


def run_manifest(name: str) -> str:
    """Return the path of a run's manifest, `run.json`."""
    return f"{run(name)}/run.json"


def upgrade(name: str, number: int) -> str:
    """Return the path of the terms of another version of the code or another layout, counted from 1."""
    return f"{upgrades(name)}/{digits(number, 'upgrade')}.json"


def decisions(name: str) -> str:
    """Return the folder of the decisions about a run."""
    return f"{run(name)}/decisions"


def decision(name: str, number: int) -> str:
    """Return the path of one decision, counted from 1."""
    return f"{decisions(name)}/{digits(number, 'decision')}.json"


def upgrades(name: str) -> str:
    """Return the folder of the terms of newer versions of the code."""
    return f"{run(name)}/upgrades"


def leases(name: str) -> str:
    """Return the folder of a run's leases."""
    return f"{run(name)}/leases"


def lease_file(folder: str, epoch: int, sign: str = "") -> str:
    """Return the path of a lease in a folder of leases, or of a sign of its owner: `.renewed` or `.end`."""
    return f"{folder}/{digits(epoch, 'epoch')}{sign}.json"


def iterations(name: str) -> str:
    """Return the folder of all iterations of a run."""
    return f"{run(name)}/iterations"


def iteration(name: str, number: int) -> str:
    """Return the folder of an iteration's commits and attempts."""
    return f"{iterations(name)}/{digits(number, 'iteration')}"


def stream(name: str) -> str:
    """Return the folder of the drivers' logs of generated samples (`cairn.storage.logs.sample_log`)."""
    return f"{run(name)}/stream"


def admissions(name: str) -> str:
    """Return the folder of the claims of a stream's admissions."""
    return f"{stream(name)}/admissions"


def admission(name: str, number: int) -> str:
    """Return the path of the claim of one admission, counted from 0."""
    return f"{admissions(name)}/{digits(number, 'admission')}.json"


def retirements(name: str) -> str:
    """Return the folder of the markers of retired files."""
    return f"{run(name)}/retired"


def retired(name: str, iteration: int, kind: Kind) -> str:
    """Return the path of the marker that retention removed an iteration's files of one kind."""
    return f"{retirements(name)}/{digits(iteration, 'iteration')}.{kind}.json"


def parse_run(name: str) -> str | None:
    """Return the name of the run that an entry of `runs` may be, or None for another name."""
    run = name.removesuffix("/")
    return run if name.endswith("/") and is_name(run) else None


def run_of(path: str) -> str:
    """Return the run in whose folder a store path is."""
    return path.split("/")[1]


def parse_iteration(name: str) -> int | None:
    """Return the number of the iteration that an entry of `iterations` is, or None for another name."""
    number = name.removesuffix("/")
    return int(number) if name.endswith("/") and _NUMBER.fullmatch(number) else None


def parse_commit(name: str) -> tuple[str, str | None] | None:
    """Return step and shard of the commit that an entry of an iteration is, or None for another name."""
    match = _MARKER.fullmatch(name)
    return (match[1], match[2]) if match and (match[2] is None or is_name(match[2])) else None


def parse_attempt(name: str) -> str | None:
    """Return the attempt that an entry of a step is, or None for another name."""
    attempt = name.removesuffix("/")
    return (
        attempt if name.endswith("/") and is_name(attempt, _LONGEST_ATTEMPT) and _ATTEMPT.fullmatch(attempt) else None
    )


def parse_number(name: str) -> int | None:
    """Return the number of an entry `<number>.json` of `leases`, `decisions`, `upgrades` or `admissions`.

    Returns None for another name, such as the renewal or end of a lease.
    """
    number = name.removesuffix(".json")
    return int(number) if name.endswith(".json") and _NUMBER.fullmatch(number) else None


def numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers among the entries of such a folder."""
    return [number for name in names if (number := parse_number(name)) is not None]


def parse_retired(name: str) -> tuple[int, Kind] | None:
    """Return iteration and kind of the files that an entry of `retirements` marks as retired, or None for another
    name."""
    iteration, _, rest = name.partition(".")
    kind = rest.removesuffix(".json")
    known = rest.endswith(".json") and _NUMBER.fullmatch(iteration) and kind in set(Kind)
    return (int(iteration), Kind(kind)) if known else None


def parse_file(name: str, path: str) -> tuple[int, str, str] | None:
    """Return iteration, step and attempt of a run's file from its store path; None if it belongs to no attempt."""
    match = _FILE.fullmatch(path.removeprefix(f"{run(name)}/"))
    return (int(match[1]), match[2], match[3]) if match else None


def stream_attempt(name: str, path: str) -> str | None:
    """Return the driver's attempt whose log contains a store path; None if no log contains it."""
    attempt, _, rest = path.removeprefix(f"{stream(name)}/").partition("/")
    return parse_attempt(f"{attempt}/") if rest.startswith("write_ahead/") else None


def attempt_folder(path: str) -> str:
    """Return the folder of the attempt that a file belongs to, from the file's store path."""
    return "/".join(path.split("/")[:6])


def commit(name: str, iteration: int, step: str, shard: str | None = None) -> str:
    """Return the path of a step's commit."""
    return f"{iterations(name)}/{commit_name(iteration, step, shard)}.json"


def record(name: str, iteration: int, number: int) -> str:
    """Return the path of one record of the commits of an iteration's shards, counted from 0."""
    return f"{iterations(name)}/{digits(iteration)}/{record_name(number)}"


def record_name(number: int) -> str:
    """Return the name of a record in its iteration's folder."""
    return f"shards.{digits(number, 'record')}.json"


def parse_record(name: str) -> int | None:
    """Return the number of the record that an entry of an iteration is, or None for another name."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def attempts(name: str, number: int, step: str) -> str:
    """Return the folder of all attempts at a step, including those of its shards."""
    return f"{iteration(name, number)}/{step}"


def attempt(name: str, iteration: int, step: str, attempt: str) -> str:
    """Return the folder of the files of one attempt."""
    return f"{attempts(name, iteration, step)}/{check_name(attempt, 'attempt')}"


def attempt_name(shard: str | None, epoch: int, random: str) -> str:
    """Return the name `[<shard>.]<epoch>-<random>`."""
    own = f"{digits(epoch, 'epoch')}-{random}"
    return own if shard is None else f"{check_name(shard, 'shard')}.{own}"


def attempt_shard(attempt: str) -> str | None:
    """Return the shard in an attempt's name, or None."""
    return attempt.rpartition(".")[0] or None


def attempt_epoch(attempt: str) -> int:
    """Return the epoch of the driver that made an attempt."""
    return int(attempt.rpartition(".")[2].partition("-")[0])


def _short(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is not a SHA-256 digest in hexadecimal")
    return digest[:_SHORT]
