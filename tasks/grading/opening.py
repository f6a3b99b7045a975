"""Open the grader that a configuration names, in processes or outside, with or without stored answers."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from cairn.configs.kinds import REWARD, declared, written_for_slime
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.slime import values_read
from cairn.storage.ledger.schemas import TRAJECTORY_REWARDS
from cairn.storage.logs.answers import Answer, Answers, prompt_digest, question_digest
from cairn.storage.store.store import Store
from cairn.tasks.grading.graders import returns_only_a_number
from cairn.tasks.grading.outside.kinds import STORED, outside
from cairn.tasks.grading.outside.reward_model import NAME, RewardModelGrader, Scorer
from cairn.tasks.grading.outside.service import OnResponse, OutsideGraders
from cairn.tasks.grading.pool import CHUNKS_PER_WORKER, GraderPool
from cairn.tasks.rewards.grader import OUTSIDE, Graded, Grading, NamedGrader, Rememberable
from cairn.tasks.rewards.sample import Sample

Wrapped = TypeVar("Wrapped", bound=Grading)


class _Wrapper(Generic[Wrapped]):
    """A grader that calls another one, and has its name and version."""

    def __init__(self, grader: Wrapped) -> None:
        self._grader = grader

    @property
    def name(self) -> str:
        """Name of the grader."""
        return self._grader.name

    @property
    def version(self) -> str:
        """Version of the grader."""
        return self._grader.version

    @property
    def sees_messages(self) -> bool:
        """Whether the grader sees messages."""
        return self._grader.sees_messages

    def close(self) -> None:
        """Close the grader."""
        self._grader.close()


# A grader that is called only once for equal samples: its answers are stored, see `cairn.storage.logs.answers`.


class CachedGrader(_Wrapper[Rememberable]):
    """A wrapper of a grader that stores its answers and uses them again. Equal samples share an answer. Thread-safe."""

    by_group = False
    sees_tokens = True  # by which an answer is found

    def __init__(self, grader: Rememberable, store: Store, at_a_time: int, reward_key: str) -> None:
        """Open the stored answers of the grader.

        Args:
            at_a_time: samples after which the answers of a grader in processes are written.
            reward_key: the entry of an answer that is its reward; a part of the key of the stored answers.
        """
        super().__init__(grader)
        self._at_a_time = at_a_time
        self._answers = Answers(store, grader.name, f"{grader.version} {reward_key}")

    @property
    def sees_whole_samples(self) -> bool:
        """Whether the grader sees whole samples."""
        return self._grader.sees_whole_samples

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch: see `Grading.grade`.

        Where a process was killed before it received an answer, the grader is called again.
        """
        graders = [self._grader.graded_by(sample) for sample in samples]
        questions = [self._question(sample, *one) for sample, one in zip(samples, graders, strict=True)]
        by_question = dict(zip(questions, zip(samples, graders, strict=True), strict=True))
        graded = {
            question: Graded(
                one.reward,
                None if one.components is None else dict(one.components),
                one.error,
                grader=by_question[question][1][0],
                version=by_question[question][1][1],
            )
            for question, one in self._answers.find(questions).items()
        }
        left = [question for question in by_question if question not in graded]
        if left:
            answered = next((question for question, one in graded.items() if one.reward is not None), None)
            if answered is not None:
                self._grader.can_grade(by_question[answered][0])
            with self._answers.log() as log:

                def store_answer(position: int, one: Graded) -> None:
                    about = prompt_digest(by_question[left[position]][0].prompt)
                    log.append((left[position], Answer(one.reward, one.components, one.error, about)))

                new = self._ask([by_question[question][0] for question in left], store_answer)
            graded |= dict(zip(left, new, strict=True))
        return [graded[question] for question in questions]

    def _question(self, sample: Sample, grader: str, version: str) -> str:
        """Return the digest of what the grader sees of a sample; where the row names its own grader, of that grader
        too."""
        if isinstance(self._grader, OutsideGraders):
            try:
                return question_digest(self._grader.question(sample))
            except ValueError:  # its call ends in this error too
                return question_digest(_hashed_fields(sample))
        whole = self._grader.sees_whole_samples
        seen: Any = _hashed_fields(sample) if whole else [sample.response, sample.label, sample.metadata]
        if grader != self.name:  # the answers are in the folder of this grader, under its version
            seen = [_hashed_fields(sample), grader, version]
        return question_digest(seen)

    def _ask(self, samples: Sequence[Sample], store_answer: OnResponse) -> list[Graded]:
        if isinstance(self._grader, OutsideGraders):
            return self._grader.ask(samples, store_answer)
        graded: list[Graded] = []
        for start in range(0, len(samples), self._at_a_time):
            some = self._grader.grade(samples[start : start + self._at_a_time])
            for position, one in enumerate(some, start):
                if one.reward is not None:  # an error may pass
                    store_answer(position, one)
            graded += some
        return graded


def _hashed_fields(sample: Sample) -> dict[str, Any]:
    """Return all of a sample, without empty fields of rewards, roles and infos.

    Only user code fills those fields. Without them the digest is equal to that of answers of earlier versions.
    """
    seen = asdict(sample)
    for name in ("rewards", "roles", "infos"):
        if not seen[name]:
            del seen[name]
    for segment in seen["segments"]:
        if segment["reward"] is None:
            del segment["reward"]
    return seen


# Rewards that a generate function written for slime returns with its samples, in place of the grader's, as in slime.


class ReturnedRewards(_Wrapper[Grading]):
    """A wrapper of a grader that uses the rewards which a generate function returned, and calls the grader for the
    others.

    A returned sample with a `reward` has that reward; the grader grades any other alone. Several returned samples are
    the trajectories of one sample. Its reward, which filters and metrics use, is that of the last one. As thread-safe
    as the grader.
    """

    sees_whole_samples = True
    sees_tokens = True

    def __init__(self, grader: Grading, tokenizer: Callable[[], Any]) -> None:
        """Wrap a grader. `tokenizer` returns the tokenizer of the model."""
        super().__init__(grader)
        self._tokenizer = tokenizer

    @property
    def by_group(self) -> bool:
        """Whether the grader grades whole groups."""
        return self._grader.by_group

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch: see `Grading.grade`."""
        known = [self._known(sample) for sample in samples]
        missing = [(i, k) for i, rewards in enumerate(known) for k, reward in enumerate(rewards) if reward is None]
        ungraded = [self._alone(samples[i], k, len(known[i])) for i, k in missing]
        own_groups = None if groups is None else [groups[i] for i, _ in missing]
        graded = dict(zip(missing, self._grader.grade(ungraded, own_groups) if ungraded else [], strict=True))
        return [
            _together([graded.get((i, k)) or Graded(reward, grader="generate") for k, reward in enumerate(rewards)])
            for i, rewards in enumerate(known)
        ]

    def _known(self, sample: Sample) -> Sequence[float | None]:
        """Return the reward that was returned with each trajectory, or None."""
        count = 1 + max((segment.trajectory for segment in sample.segments), default=0)
        return sample.rewards or [None] * count

    def _alone(self, sample: Sample, trajectory: int, count: int) -> Sample:
        """Return one trajectory of a sample, as the grader sees it."""
        if count > 1:
            segments = tuple(replace(one, trajectory=0) for one in sample.segments if one.trajectory == trajectory)
            ids = tuple(chain.from_iterable(one.ids for one in segments))
            sample = replace(
                sample,
                response=self._tokenizer().decode(ids, skip_special_tokens=True),
                response_with_special_tokens="".join(one.text for one in segments),
                response_ids=ids,
                segments=segments,
                rewards=(),
                roles=sample.roles[trajectory : trajectory + 1],
                infos=sample.infos[trajectory : trajectory + 1],
            )
        if self._grader.sees_whole_samples:
            return sample
        return Sample(sample.response, sample.label, sample.metadata)


def _together(parts: Sequence[Graded]) -> Graded:
    """Combine the grades of a sample's trajectories. The sample fails where one of them does."""
    failed = next((part for part in parts if part.reward is None), None)
    if failed is not None or len(parts) == 1:
        return failed or parts[0]
    rewards = [part.reward for part in parts]
    return replace(parts[-1], components={**(parts[-1].components or {}), TRAJECTORY_REWARDS.name: rewards})


def open_grader(
    config: RewardConfig,
    retries: GraderRetries | None = None,
    store: Store | None = None,
    reward_model: Callable[[], Scorer] | None = None,
    args: Mapping[str, Any] = MappingProxyType({}),
) -> Grading:
    """Return the grader, which the caller closes. Raises BadPlugin.

    Args:
        args: values for a grader written for slime: `grader_args`.
        store: where its answers are stored, if the configuration stores them.
        reward_model: returns the engine of `reward_model` once it is up; None: the model runs in this process.
    """
    grader: Rememberable
    if config.custom_rm_path is not None or config.rm_type not in OUTSIDE:
        grader = GraderPool(config, retries, args)
    elif config.rm_type == NAME:
        grader = RewardModelGrader(config, reward_model)
    else:
        grader = OutsideGraders(outside(config), retries)
    if store is None or not stores_answers(config):
        return grader
    calls = config.num_workers * max(CHUNKS_PER_WORKER, config.rm_concurrency)
    return CachedGrader(grader, store, calls, config.reward_key)


def grader_args(config: RunConfig) -> dict[str, Any]:
    """Return the values of `args` for the grader of a run: empty unless it was written for slime. Raises BadPlugin."""
    path = config.reward.custom_rm_path
    function = None if path is None else REWARD.load(path)
    return values_read(config, function) if function is not None and written_for_slime(function) else {}


def stores_answers(config: RewardConfig) -> bool:
    """Whether a grader's answers are stored. Raises BadPlugin where they cannot be."""
    path = config.custom_rm_path
    declared_cached = config.rm_type in STORED if path is None else declared(REWARD.load(path)).cached
    is_stored = declared_cached if config.cache is None else config.cache
    if is_stored and config.group_rm:
        raise BadPlugin(
            "answers are cached for single samples, but group_rm grades whole groups: set reward.cache or group_rm to "
            "false"
        )
    return is_stored


# Options of `reward` that none of a run's graders reads: a user who set one expects an effect.


Reads = Callable[[RewardConfig, NamedGrader], bool]


def _in_processes(config: RewardConfig, grader: NamedGrader) -> bool:
    return grader.name not in OUTSIDE


def _calls_side_by_side(config: RewardConfig, grader: NamedGrader) -> bool:
    if grader.name in OUTSIDE:
        return grader.name in ("judge", "remote_rm")
    # A user's grader with stored answers: the option also sets after how many samples they are written.
    return grader.waits or (grader.name == config.custom_rm_path and stores_answers(config))


_READ: dict[str, tuple[str, Reads]] = {
    "reward_key": (
        "only remote_rm and graders that return a mapping read it",
        lambda config, grader: grader.name == "remote_rm" or not returns_only_a_number(grader),
    ),
    "rm_timeout": (
        "judge has reward.judge.timeout, and code has reward.code.test_timeout",
        lambda config, grader: grader.name not in ("code", "judge"),
    ),
    "rm_memory": ("only graders in processes read it", _in_processes),
    "rm_batch_size": (
        "only graders of `samples` without group_rm read it",
        lambda config, grader: grader.takes.several and not config.group_rm,
    ),
    "rm_concurrency": ("only remote_rm, judge, and graders that are coroutine functions read it", _calls_side_by_side),
    "num_workers": (
        "only graders in processes read it; code has reward.code.num_workers",
        _in_processes,
    ),
}


def unread_options(config: RewardConfig, graders: Collection[NamedGrader]) -> Iterator[str]:
    """Yield a sentence on each unread option that differs from its default.

    Args:
        graders: those of the training samples and of the benchmarks. Rows may name other built-in graders, which read
            no further options.
    """
    names = " and ".join(dict.fromkeys(grader.name for grader in graders))
    for option, (who, reads) in _READ.items():
        value = getattr(config, option)
        usual = value == RewardConfig.model_fields[option].default
        if graders and not usual and not any(reads(config, grader) for grader in graders):
            yield f"reward.{option} ({value}) has no effect while the grader is {names}: {who}; leave it out"
