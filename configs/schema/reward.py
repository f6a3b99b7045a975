"""Options of grading."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from cairn.configs.schema.base import ApiKeyName, Code, ModelFolder, Section, ServiceUrl, Text, rule
from cairn.configs.schema.data import one_group
from cairn.configs.schema.effect import SAMPLED, when

# Options of the graders that call a model or run a program in a sandbox.


ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Pattern of an environment variable's name."""


class JudgeConfig(Section):
    """`rm_type: judge`: a language model behind an OpenAI-compatible endpoint scores a response."""

    url: ServiceUrl
    """Base URL of the endpoint, including its `/v1`: `http://localhost:8000/v1`."""

    model: Text = Field(min_length=1)
    """Name of the model at the endpoint."""

    template: Text = (
        "Judge how well the response answers the question.\n\n[Question]\n{prompt}\n\n[Response]\n{response}\n\n"
        "Explain your judgement in a few sentences, then end with a score from 0 to 10 in the form [[score]]."
    )
    """Prompt of the judge. `{prompt}` is the prompt as the policy read it, `{response}` the response, `{answer}` the
    part of it after the policy's thoughts, `{label}` the row's label; other braces stay unchanged."""

    system: Text | None = None
    """System message before the prompt."""

    pattern: str = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
    """Regular expression whose one group is the score in the judge's reply; the last match counts."""

    min_score: float = 0.0
    """Lowest score. A reply with a lower one is invalid and fails the sample."""

    max_score: float = 10.0
    """Highest score. A reply with a higher one is invalid and fails the sample."""

    temperature: float = Field(0.0, ge=0)
    """Temperature of the judge's sampling."""

    max_tokens: int = Field(1024, ge=1)
    """Longest reply in tokens."""

    timeout: float = Field(120.0, gt=0)
    """Seconds that a reply may take; then the request is retried, as `retry.grader` says."""

    api_key_env: ApiKeyName | None = Field(None, pattern=ENVIRONMENT_NAME)
    """Name of the environment variable that holds the endpoint's key. The key itself is never recorded."""

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        one_group(pattern)
        return pattern

    @field_validator("template")
    @classmethod
    def _shows_the_response(cls, template: str) -> str:
        if "{response}" not in template and "{answer}" not in template:
            raise ValueError(
                "holds neither {response} nor {answer}, so every response would get the same score: add one"
            )
        return template

    @rule
    def _scores_have_a_range(self) -> None:
        if self.min_score >= self.max_score:
            raise ValueError(
                f"min_score is {self.min_score:g} and max_score is {self.max_score:g}: set max_score higher"
            )


class RewardModelConfig(Section):
    """`rm_type: reward_model`: a sequence classifier with one label scores prompt and response, in its own actor."""

    path: ModelFolder = Field(min_length=1)
    """Folder of the classifier in the Hugging Face format, with its tokenizer."""

    num_gpus: float = Field(0.0, ge=0, le=1)
    """GPUs that the classifier reserves for itself, also with `fleet.colocate`; 0 runs it on the CPU."""

    num_threads: int = Field(1, ge=1)
    """CPU threads of the classifier."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the classifier's weights and activations."""

    max_length: int | None = Field(None, ge=1)
    """Longest sequence in tokens; a longer sample fails. By default the context length of the model."""

    batch_size: int = Field(1, ge=1)
    """Sequences that are scored together. With one, a score depends only on its own sequence; with more, its last bits
    may depend on the rest of the batch."""


class CodeConfig(Section):
    """`rm_type: code`: the program in a response runs against the row's hidden tests, in a sandbox of bubblewrap."""

    bwrap: str = "bwrap"
    """The program `bwrap`: a name on PATH, or its path."""

    python: str | None = None
    """Path of the Python interpreter that runs the programs; by default the one that runs Cairn. Programs can import
    its standard library, but no installed package."""

    partial_credit: bool = False
    """Use the share of passed tests as the reward. False: the reward is 1 where all tests pass, and 0 otherwise."""

    test_timeout: float = Field(10.0, gt=0)
    """Seconds of wall-clock time that one test may take."""

    cpu_time: int = Field(10, ge=1)
    """Seconds of CPU time that one test may take."""

    memory: int = Field(512 * 1024**2, ge=2**26)
    """Bytes of address space of each process of a test, and of memory of all of them together."""

    processes: int = Field(64, ge=1)
    """Number of processes and threads that one test may have."""

    file_size: int = Field(16 * 1024**2, ge=4096)
    """Size limit in bytes of one file that a test writes, of its scratch folder, of /dev/shm, and of its output."""

    num_workers: int = Field(1, ge=1)
    """Number of tests that run concurrently."""


class RewardConfig(Section):
    """Grader, with its limits."""

    rm_type: Text = "math"
    """Built-in grader: `math` (math-verify), `exact_match`, `random`, `reasoning_gym`, or one of a benchmark, such as
    `gsm8k`. docs/rewards.md says which answer counts. `episode` takes the reward that the generate function returned
    (docs/agents.md). slime: `--rm-type`."""

    custom_rm_path: Code | None = None
    """Grader of your own, by import path (`package.module.function`) or file (`rewards.py:function`). Takes precedence
    over `rm_type`. slime: `--custom-rm-path`."""

    custom_rm_model_path: Annotated[ModelFolder | None, when("reward.custom_rm_path")] = Field(None, min_length=1)
    """Folder of a model that a grader of your own loads: the constructor of a class with `compute_reward` gets it as
    `model_path`."""

    rm_type_key: Text | None = "rm_type"
    """Key of a row's metadata that names a built-in grader for this row. It takes precedence over `rm_type`, but not
    over `custom_rm_path`. Null: rows name none."""

    group_rm: bool = False
    """Grade the samples of a group together: a grader of your own that takes `samples` is called once for each group,
    when all samples of the group are complete. slime: `--group-rm`."""

    reward_key: Text = "reward"
    """Key of the reward where the grader returns a mapping; its other entries are recorded too. slime:
    `--reward-key`."""

    rm_timeout: float = Field(10.0, gt=0)
    """Seconds of its own time, computing or waiting, that a grader may spend on one sample. After that the sample is
    marked as failed, or as wrong where the grader is a built-in one. Delays by a busy, paused or swapping machine do
    not count. Samples that are graded in one call have the sum of their seconds."""

    rm_memory: int | None = Field(None, ge=2**26)
    """Bytes of data that a grader process may hold (`RLIMIT_DATA`, on Linux); a sample that needs more is marked as
    failed. Null sets no limit: a process that the machine kills for lack of memory is retried, and if that does not
    help the run ends."""

    rm_batch_size: int = Field(32, ge=1)
    """Samples in one call of a grader that takes `samples`; with `group_rm` a call gets one group."""

    rm_concurrency: int = Field(64, ge=1)
    """Concurrent calls of a grader that is a coroutine function, in each process; also concurrent requests of
    `remote_rm` and `judge`."""

    num_workers: int = Field(1, ge=1)
    """Number of grader processes."""

    rm_url: ServiceUrl | None = None
    """URL to which `rm_type: remote_rm` posts `{prompt, response, label}` as JSON. The response is a number, or a
    mapping with the number under `reward_key`. slime: `--rm-url`."""

    rm_api_key_env: ApiKeyName | None = Field(None, pattern=ENVIRONMENT_NAME)
    """Name of the environment variable that holds the key of that service. The key itself is never recorded."""

    judge: JudgeConfig | None = None
    """Language model of `rm_type: judge`."""

    reward_model: RewardModelConfig | None = None
    """Classifier of `rm_type: reward_model`."""

    code: CodeConfig | None = None
    """Sandbox of `rm_type: code`; `{}` uses its defaults."""

    cache: bool | None = None
    """Cache scores in the store by the content of the sample, so that no score is paid for twice after a retry, a
    resume, a fork or another grading. By default on for `remote_rm`, for `judge`, and for graders that declare
    `cairn.plugin(cached=True)`."""

    overlong_buffer_len: Annotated[int | None, SAMPLED] = Field(None, ge=1)
    """Length of the range in tokens, below `rollout.rollout_max_response_len`, over which the reward falls with the
    length of the response, see docs/rewards.md; null: no penalty for length. verl: `overlong_buffer.len`."""

    overlong_penalty_factor: Annotated[
        float, SAMPLED, when("reward.overlong_buffer_len", remedy="set it to the tokens over which the penalty grows")
    ] = Field(1.0, gt=0)
    """Penalty of a response of the longest length. verl: `overlong_buffer.penalty_factor`."""

    def of(self, rm_type: str | None) -> "RewardConfig":
        """Return these options with the built-in grader `rm_type` for all samples, as for a benchmark that names one;
        None changes nothing."""
        if rm_type is None:
            return self
        named = {"rm_type": rm_type, "rm_type_key": None, "custom_rm_path": None, "group_rm": False}
        return self.model_copy(update=named)
