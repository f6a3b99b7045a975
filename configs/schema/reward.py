"""How samples are graded."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from cairn.configs.schema.base import Code, Location, Section
from cairn.configs.schema.data import one_group

# Options of the graders that ask something outside: a model, or a program in a sandbox.


ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Of an environment variable's name."""


class JudgeConfig(Section):
    """`rm_type: judge`: a language model behind an OpenAI-compatible endpoint says what a response is worth."""

    url: Location
    """Where the endpoint begins, up to and with its `/v1`: `http://localhost:8000/v1`."""

    model: str = Field(min_length=1)
    """The model that is asked, by its name there."""

    template: str = (
        "Judge how well the response answers the question.\n\n[Question]\n{prompt}\n\n[Response]\n{response}\n\n"
        "Explain your judgement in a few sentences, then end with a score from 0 to 10 in the form [[score]]."
    )
    """The question to the judge. `{prompt}` is the prompt as the policy read it, `{response}` the response, `{answer}`
    what of it stands behind its thoughts, `{label}` the row's label; other braces stay as they are."""

    system: str | None = None
    """A system message before it."""

    pattern: str = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
    """Regular expression whose one group is the score in the judge's reply; the last match counts."""

    min_score: float = 0.0
    """The lowest score. A reply with one below it is no answer, and fails the sample."""

    max_score: float = 10.0
    """The highest score, likewise."""

    temperature: float = Field(0.0, ge=0)
    """Of the judge's sampling."""

    max_tokens: int = Field(1024, ge=1)
    """Tokens that its reply may have."""

    timeout: float = Field(120.0, gt=0)
    """Seconds that a reply may take; then it is asked for again, as `retry.grader` says."""

    api_key_env: str | None = Field(None, pattern=ENVIRONMENT_NAME)
    """Name of the environment variable that holds the endpoint's key. The key itself is recorded nowhere."""

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        one_group(pattern)
        return pattern

    @field_validator("template")
    @classmethod
    def _shows_the_response(cls, template: str) -> str:
        if "{response}" not in template and "{answer}" not in template:
            raise ValueError("holds neither {response} nor {answer}, so every response would be judged alike: add one")
        return template

    @model_validator(mode="after")
    def _scores_have_a_range(self) -> "JudgeConfig":
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score is {self.min_score:g} and max_score is {self.max_score:g}: let it be higher")
        return self


class RewardModelConfig(Section):
    """`rm_type: reward_model`: a sequence classifier with one label scores prompt and response, in an actor of its own
    beside the other engines."""

    path: Location = Field(min_length=1)
    """Folder of the classifier in the Hugging Face format, with its tokenizer."""

    num_gpus: float = Field(0.0, ge=0, le=1)
    """GPUs that it reserves, of its own under `fleet.colocate` too; 0 computes on the CPU."""

    num_threads: int = Field(1, ge=1)
    """CPU threads."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of its weights and activations."""

    max_length: int | None = Field(None, ge=1)
    """Longest sequence in tokens; a sample that is longer fails. By default what the model's context holds."""

    batch_size: int = Field(1, ge=1)
    """Sequences that are scored at a time. With one, a score depends on nothing but its own sequence; with more, its
    last bits may come from their company."""


class CodeConfig(Section):
    """`rm_type: code`: the program in a response runs against the row's hidden tests, in a sandbox of bubblewrap."""

    bwrap: str = "bwrap"
    """The program `bwrap`: a name on PATH, or its path."""

    python: str | None = None
    """The Python interpreter that runs the programs, by its path; by default the one that runs Cairn. They see its
    standard library and no installed package."""

    partial_credit: bool = False
    """The reward is the share of tests passed; else it is 1 where all are, and 0 otherwise."""

    test_timeout: float = Field(10.0, gt=0)
    """Seconds on the wall clock that one test may take."""

    cpu_time: int = Field(10, ge=1)
    """Seconds of CPU time that one test may take."""

    memory: int = Field(512 * 1024**2, ge=2**26)
    """Bytes of address space of each process of a test, and of memory of all of them together."""

    processes: int = Field(64, ge=1)
    """Processes and threads that one test may have."""

    file_size: int = Field(16 * 1024**2, ge=4096)
    """Bytes of one file that it writes, of its scratch folder, of /dev/shm, and of what it prints."""

    num_workers: int = Field(1, ge=1)
    """Tests that run at a time."""


class RewardConfig(Section):
    """The grader and its limits."""

    rm_type: str = "math"
    """Built-in grader: `math` (math-verify), `exact_match`, `random`, `reasoning_gym`, or one of a benchmark, such as
    `gsm8k`; see docs/rewards.md for the answer that counts; `episode` takes what the generate function gave
    (docs/agents.md). slime: `--rm-type`."""

    custom_rm_path: Code | None = None
    """Grader of your own, by import path (`package.module.function`) or file (`rewards.py:function`); it takes
    precedence over `rm_type`. slime: `--custom-rm-path`."""

    rm_type_key: str | None = "rm_type"
    """Field of a row's metadata that names a grader of Cairn's for this row, before `rm_type` and behind
    `custom_rm_path`; null: rows name none."""

    group_rm: bool = False
    """Grade the samples of a group together: the grader, one of your own of `samples`, is called once a group, when all
    of its samples are there. slime: `--group-rm`."""

    reward_key: str = "reward"
    """Which entry is the reward where the grader returns a mapping; the others are recorded beside it. slime:
    `--reward-key`."""

    rm_timeout: float = Field(10.0, gt=0)
    """Seconds of its own that a grader may spend on one sample, computing or waiting; then the sample is marked
    failed, or wrong where the grader is a built-in one. What a busy, paused or swapping machine keeps it waiting does
    not count. Several that are graded in one call have the sum."""

    rm_memory: int | None = Field(None, ge=2**26)
    """Bytes of data that a grader process may hold (`RLIMIT_DATA`, on Linux); a sample that needs more is marked
    failed. Null sets no limit: then a process that the machine ends for want of memory is tried again, and if that does
    not help the run ends."""

    rm_batch_size: int = Field(32, ge=1)
    """Samples that a grader of `samples` is given at once; with `group_rm` it is given a group."""

    rm_concurrency: int = Field(64, ge=1)
    """Calls of a grader that is a coroutine function that are under way at a time, in each process; and requests, of
    `remote_rm` and `judge`."""

    num_workers: int = Field(1, ge=1)
    """Grader processes."""

    rm_url: Location | None = None
    """Where `rm_type: remote_rm` posts `{prompt, response, label}` as JSON; the reply is a number, or a mapping with it
    under `reward_key`. slime: `--rm-url`."""

    rm_api_key_env: str | None = Field(None, pattern=ENVIRONMENT_NAME)
    """Name of the environment variable that holds the key of that service; the key itself is recorded nowhere."""

    judge: JudgeConfig | None = None
    """The language model of `rm_type: judge`."""

    reward_model: RewardModelConfig | None = None
    """The classifier of `rm_type: reward_model`."""

    code: CodeConfig | None = None
    """The sandbox of `rm_type: code`; `{}` takes it as it is by default."""

    cache: bool | None = None
    """Keep answers in the store by their content, so that none is paid for twice, whatever is retried, resumed, forked
    or graded again. By default those of `remote_rm`, of `judge`, and of graders that declare
    `cairn.plugin(cached=True)`."""

    overlong_buffer_len: int | None = Field(None, ge=1)
    """Tokens below `rollout.rollout_max_response_len` over which the reward of a longer response falls, see
    docs/rewards.md; null: length costs nothing. verl: `overlong_buffer.len`."""

    overlong_penalty_factor: float = Field(1.0, gt=0)
    """What a response of the longest length loses. verl: `overlong_buffer.penalty_factor`."""

    @model_validator(mode="after")
    def _has_effect(self) -> "RewardConfig":
        if self.overlong_buffer_len is None and self.overlong_penalty_factor != 1.0:
            raise ValueError(
                f"overlong_penalty_factor is {self.overlong_penalty_factor:g}, which has no effect: set "
                "overlong_buffer_len to the tokens over which it grows, or leave it out"
            )
        return self

    def of(self, rm_type: str | None) -> "RewardConfig":
        """With this grader of ours for all samples, as of a benchmark that names one; None leaves it as it is."""
        if rm_type is None:
            return self
        named = {"rm_type": rm_type, "rm_type_key": None, "custom_rm_path": None, "group_rm": False}
        return self.model_copy(update=named)
