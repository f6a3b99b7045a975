"""Where everything of a run lies. All paths are relative to the store's root.

```
runs/<run>/run.json                                         the manifest
runs/<run>/upgrades/<number>.json                           the terms of a newer version of the code
runs/<run>/leases/<epoch>.json                              who owned the run from this epoch on
runs/<run>/leases/<epoch>.renewed.json                      rewritten every few seconds by a living owner
runs/<run>/leases/<epoch>.end.json                          how the owner ended
runs/<run>/iterations/<iteration>/<step>[.<shard>].json     a commit
runs/<run>/iterations/<iteration>/<step>/<attempt>/…        files that one attempt of a step wrote
runs/<run>/stream/<attempt>/…                               what a driver generated that no step has taken yet
runs/<run>/stream/admissions/<number>.json                  what a stream was to admit, see
`cairn.storage.logs.admissions` runs/<run>/decisions/<number>.json                          what a person decided, see
`cairn.storage.ledger.decisions` runs/<run>/retired/<iteration>.<kind>.json                  whose files retention
removed; the commits stay self-tests/<fingerprint>.json                               whether a kind of machine gives
the same bits twice evals/<weights>-<tokenizer>/<benchmark>-<settings>/result.json      what weights got at a benchmark,
from any run evals/<weights>-<tokenizer>/<benchmark>-<settings>/claims/<epoch>…  who was to find it out, as leases of a
run evals/<weights>-<tokenizer>/<benchmark>-<settings>/<attempt>/…      files that one attempt at it wrote
answers/<grader>/<sha256>.arrow                             what a grader answered, for whoever asks the same again ```
Iterations and epochs have six digits, so that names sort like numbers. An attempt is named
`[<shard>.]<epoch>-<random>`.

Other names may lie there too: what a file system or a file browser leaves (`.DS_Store`, `lost+found`, `.nfs…`, markers
of empty folders), what a person has put there. Whoever lists a folder passes each name to the `parse_…` function that
belongs to the folder, and leaves out what it does not know.
"""

import re
from collections.abc import Sequence
from enum import StrEnum

from cairn.storage.store.store import check_path

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""Of names of runs, shards and attempts, which hold no `..` either."""
_NAME = re.compile(NAME_PATTERN)
_NUMBER = re.compile(r"\d{6}")
_MARKER = re.compile(r"([a-z]+)(?:\.([A-Za-z0-9][A-Za-z0-9._-]*))?\.json")
_ATTEMPT = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*\.)?\d{6}-[0-9a-f]+")
_FILE = re.compile(r"iterations/(\d{6})/([a-z]+)/((?:[A-Za-z0-9._-]+\.)?\d{6}-[0-9a-f]+)/.+")
_EVALUATED = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_EVALUATION = re.compile(r".+-[0-9a-f]{16}")
_GRADER = re.compile(r"[0-9a-f]{16}/")
_ANSWERS = re.compile(r"([0-9a-f]{64})\.arrow")
_SHORT = 16
"""Characters of a digest in the names of folders; what lies there holds the whole digest."""
LONGEST_NAME = 100
"""Characters of a run's or a shard's."""
_LONGEST_ATTEMPT = LONGEST_NAME + len(".000000-0123456789ab")
LAST_NUMBER = 999_999
IMAGES_FILE = "images.parquet"
"""In the folder of an attempt at a rollout: the images of its samples' prompts."""
CALLS_FILE, RESULTS_FILE = "calls.parquet", "results.parquet"
"""Likewise: what its samples' code was given, and long results of it."""
BESIDE = (IMAGES_FILE, CALLS_FILE, RESULTS_FILE)
"""Files beside a step's table."""


ANSWERS = "answers"
FOLDERS = ("runs", "self-tests", "evals", ANSWERS)
"""All that lies in a store's root."""


class Kind(StrEnum):
    """Files of one iteration that retention removes at once."""

    CHECKPOINT = "checkpoint"
    """Those of its checkpoint."""
    SNAPSHOTS = "snapshots"
    """Those of all its other steps."""

    @classmethod
    def of(cls, step: str) -> "Kind":
        """With what a step's files retire."""
        return cls.CHECKPOINT if step == cls.CHECKPOINT else cls.SNAPSHOTS


def is_name(name: str, longest: int = LONGEST_NAME) -> bool:
    """Whether a name is safe as one part of a path."""
    return _NAME.fullmatch(name) is not None and ".." not in name and len(name) <= longest


def check_name(name: str, kind: str) -> str:
    """Return a name that is safe as one part of a path, or raise ValueError. `kind` says of what: `run`, `shard` or
    `attempt`."""
    longest = _LONGEST_ATTEMPT if kind == "attempt" else LONGEST_NAME
    if not is_name(name, longest):
        raise ValueError(
            f"{kind} {name!r} is not a usable name: at most {longest} letters, digits, '.', '_' and '-', "
            "starting with a letter or digit, without '..'"
        )
    return name


def digits(value: int, kind: str = "iteration") -> str:
    """Six digits. Raises ValueError."""
    if not 0 <= value <= LAST_NUMBER:
        raise ValueError(f"{kind} {value} is not between 0 and {LAST_NUMBER}")
    return f"{value:06d}"


def commit_name(iteration: int, step: str, shard: str | None = None) -> str:
    """How commits name each other: `000042/rollout.00-000`."""
    suffix = f".{check_name(shard, 'shard')}" if shard is not None else ""
    return f"{digits(iteration, 'iteration')}/{step}{suffix}"


def runs() -> str:
    """The folder of all runs."""
    return "runs"


def run(name: str) -> str:
    """The folder of one run."""
    return f"runs/{check_name(name, 'run')}"


def self_tests() -> str:
    """The folder of what was found of machines."""
    return "self-tests"


def self_test(fingerprint: str) -> str:
    """Whether machines of a kind give the same bits twice, as tried by the run that first trained on one."""
    return f"{self_tests()}/{check_name(fingerprint, 'fingerprint')}.json"


def evals() -> str:
    """The folder of all results of evaluations."""
    return "evals"


def evaluated(weights: str, tokenizer: str) -> str:
    """The folder of the results of one model, by the digests of its weights and of its tokenizer."""
    return f"{evals()}/{_short(weights)}-{_short(tokenizer)}"


def evaluation(weights: str, tokenizer: str, benchmark: str, settings: str) -> str:
    """The folder of one result. `settings`: digest of all that it depends on besides the model."""
    return f"{evaluated(weights, tokenizer)}/{check_name(f'{benchmark}-{_short(settings)}', 'benchmark')}"


def evaluation_result(folder: str) -> str:
    """The commit of an evaluation, in its folder."""
    return f"{folder}/result.json"


def evaluation_claims(folder: str) -> str:
    """The folder of the leases on an evaluation."""
    return f"{folder}/claims"


def answers(grader: str) -> str:
    """The folder of a grader's answers, by the digest of its name and version."""
    return f"{ANSWERS}/{_short(grader)}"


def answer_folders(names: Sequence[str]) -> list[str]:
    """The folders of graders that entries of `answers` are."""
    return [f"{ANSWERS}/{name.removesuffix('/')}" for name in names if _GRADER.fullmatch(name)]


def parse_answers(name: str) -> str | None:
    """The SHA-256 of the file of answers that an entry of such a folder is."""
    match = _ANSWERS.fullmatch(name)
    return match[1] if match else None


def parse_evaluated(name: str) -> str | None:
    """The folder of a model's results that an entry of `evals` is."""
    known = name.endswith("/") and _EVALUATED.fullmatch(name.removesuffix("/"))
    return f"{evals()}/{name.removesuffix('/')}" if known else None


def parse_evaluation(model: str, name: str) -> str | None:
    """The folder of a result that an entry of a model's folder, as `parse_evaluated` gives it, is."""
    own = name.removesuffix("/")
    known = name.endswith("/") and is_name(own) and _EVALUATION.fullmatch(own)
    return f"{model}/{own}" if known else None


def in_run(name: str, path: str) -> str:
    """Store path of a path that is relative to a run's folder, as in `OutputFile.path`."""
    return f"{run(name)}/{check_path(path)}"


def run_manifest(name: str) -> str:
    """`run.json`."""
    return f"{run(name)}/run.json"


def upgrade(name: str, number: int) -> str:
    """The terms under which another version of the code went on with a run, from 1."""
    return f"{upgrades(name)}/{digits(number, 'upgrade')}.json"


def decisions(name: str) -> str:
    """The folder of what people decided about a run."""
    return f"{run(name)}/decisions"


def decision(name: str, number: int) -> str:
    """One decision, counted from 1."""
    return f"{decisions(name)}/{digits(number, 'decision')}.json"


def upgrades(name: str) -> str:
    """The folder of the terms of newer versions of the code."""
    return f"{run(name)}/upgrades"


def leases(name: str) -> str:
    """The folder of a run's leases."""
    return f"{run(name)}/leases"


def lease_file(folder: str, epoch: int, sign: str = "") -> str:
    """A lease in a folder of leases, or a sign of its owner: `.renewed` or `.end`."""
    return f"{folder}/{digits(epoch, 'epoch')}{sign}.json"


def lease(name: str, epoch: int) -> str:
    """The marker by which a driver owns the run."""
    return lease_file(leases(name), epoch)


def lease_renewal(name: str, epoch: int) -> str:
    """The sign of life of a lease's owner."""
    return lease_file(leases(name), epoch, ".renewed")


def lease_end(name: str, epoch: int) -> str:
    """The marker by which an owner gives the run back."""
    return lease_file(leases(name), epoch, ".end")


def iterations(name: str) -> str:
    """The folder of all iterations of a run."""
    return f"{run(name)}/iterations"


def iteration(name: str, number: int) -> str:
    """The folder of an iteration's commits and attempts."""
    return f"{iterations(name)}/{digits(number, 'iteration')}"


def stream(name: str) -> str:
    """The folder of the drivers' logs of what they generated: see `cairn.storage.logs.stream_log`."""
    return f"{run(name)}/stream"


def admissions(name: str) -> str:
    """The folder of the claims of a stream's admissions."""
    return f"{stream(name)}/admissions"


def admission(name: str, number: int) -> str:
    """The claim of one admission, counted from 0."""
    return f"{admissions(name)}/{digits(number, 'admission')}.json"


def retirements(name: str) -> str:
    """The folder of the markers of what retention removed."""
    return f"{run(name)}/retired"


def retired(name: str, iteration: int, kind: Kind) -> str:
    """The marker that an iteration's files were removed by retention."""
    return f"{retirements(name)}/{digits(iteration, 'iteration')}.{kind}.json"


def parse_run(name: str) -> str | None:
    """The run whose folder an entry of `runs` may be."""
    run = name.removesuffix("/")
    return run if name.endswith("/") and is_name(run) else None


def parse_iteration(name: str) -> int | None:
    """The iteration whose folder an entry of `iterations` is."""
    number = name.removesuffix("/")
    return int(number) if name.endswith("/") and _NUMBER.fullmatch(number) else None


def parse_commit(name: str) -> tuple[str, str | None] | None:
    """Step and shard of the commit that an entry of an iteration is."""
    match = _MARKER.fullmatch(name)
    return (match[1], match[2]) if match and (match[2] is None or is_name(match[2])) else None


def parse_attempt(name: str) -> str | None:
    """The attempt whose folder an entry of a step is."""
    attempt = name.removesuffix("/")
    return (
        attempt if name.endswith("/") and is_name(attempt, _LONGEST_ATTEMPT) and _ATTEMPT.fullmatch(attempt) else None
    )


def parse_lease(name: str) -> int | None:
    """The epoch of the lease that an entry of `leases` is; renewals and ends are none."""
    return _numbered(name)


def parse_decision(name: str) -> int | None:
    """The number of the decision that an entry of `decisions` is."""
    return _numbered(name)


def parse_admission(name: str) -> int | None:
    """The number of the admission that an entry of `admissions` claims."""
    return _numbered(name)


def parse_retired(name: str) -> tuple[int, Kind] | None:
    """What an entry of `retirements` says is gone."""
    iteration, _, rest = name.partition(".")
    kind = rest.removesuffix(".json")
    known = rest.endswith(".json") and _NUMBER.fullmatch(iteration) and kind in set(Kind)
    return (int(iteration), Kind(kind)) if known else None


def parse_file(name: str, path: str) -> tuple[int, str, str] | None:
    """Iteration, step and attempt of a file of a run, from its store path; None if it is none of an attempt."""
    match = _FILE.fullmatch(path.removeprefix(f"{run(name)}/"))
    return (int(match[1]), match[2], match[3]) if match else None


def stream_attempt(name: str, path: str) -> str | None:
    """The attempt of a driver whose log a store path belongs to; None if it belongs to none."""
    attempt, _, rest = path.removeprefix(f"{stream(name)}/").partition("/")
    return parse_attempt(f"{attempt}/") if rest.startswith("write_ahead/") else None


def attempt_folder(path: str) -> str:
    """The folder of the attempt that a file belongs to, from its store path."""
    return "/".join(path.split("/")[:6])


def commit(name: str, iteration: int, step: str, shard: str | None = None) -> str:
    """The marker that makes a step's snapshot exist."""
    return f"{iterations(name)}/{commit_name(iteration, step, shard)}.json"


def attempts(name: str, number: int, step: str) -> str:
    """The folder of all attempts at a step, those of its shards included."""
    return f"{iteration(name, number)}/{step}"


def attempt(name: str, iteration: int, step: str, attempt: str) -> str:
    """The folder of the files that one attempt writes."""
    return f"{attempts(name, iteration, step)}/{check_name(attempt, 'attempt')}"


def attempt_name(shard: str | None, epoch: int, random: str) -> str:
    """`[<shard>.]<epoch>-<random>`."""
    own = f"{digits(epoch, 'epoch')}-{random}"
    return own if shard is None else f"{check_name(shard, 'shard')}.{own}"


def attempt_shard(attempt: str) -> str | None:
    """The shard in an attempt's name."""
    return attempt.rpartition(".")[0] or None


def attempt_epoch(attempt: str) -> int:
    """The epoch of the driver that made an attempt."""
    return int(attempt.rpartition(".")[2].partition("-")[0])


def _numbered(name: str) -> int | None:
    number = name.removesuffix(".json")
    return int(number) if name.endswith(".json") and _NUMBER.fullmatch(number) else None


def _short(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is no SHA-256 in hexadecimal")
    return digest[:_SHORT]
