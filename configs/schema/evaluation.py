"""Options of evaluations during a run, and the schema of benchmarks."""

from collections.abc import Mapping
from typing import Any, Literal

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, field_validator

from cairn.configs.schema.base import Code, DataPath, Location, Section, Text, rule
from cairn.configs.schema.data import RowFormat, one_group
from cairn.configs.schema.rollout import RolloutConfig, RolloutEngine

# Options of an evaluation's engine.


class EngineOptions(Section):
    """Rollout engine of an evaluation. Names and defaults as in `rollout`."""

    engine: RolloutEngine = "transformers"
    """Kind of the rollout engine."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and computation."""

    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of SGLang's server, as in `rollout.sglang`."""

    num_gpus: float = Field(0, ge=0)
    """GPUs of the engine; 0 runs it on the CPU."""

    num_threads: int = Field(1, ge=1)
    """CPU threads. With one thread, samples of `transformers` do not depend on batching."""

    @classmethod
    def of_run(cls, rollout: RolloutConfig, changes: Mapping[str, Any]) -> "EngineOptions":
        """Return the options of a run's engine, with those in `changes` in their place.

        The options of the run's server are used only where both engines are of one kind.
        """
        own: dict[str, Any] = {
            "engine": rollout.engine,
            "dtype": rollout.dtype,
            "num_gpus": rollout.num_gpus_per_engine,
            "num_threads": rollout.num_threads,
        }
        if rollout.engine == changes.get("engine", rollout.engine):
            own["sglang"] = rollout.sglang
        return cls.model_validate({**own, **changes})

    def settings(self) -> dict[str, Any]:
        """Return the options that enter a result's key: those that determine the bits of samples on any machine."""
        return {"engine": self.engine, "dtype": self.dtype, **({"sglang": self.sglang} if self.sglang else {})}

    def rollout(self, stop: tuple[str, ...] = ()) -> RolloutConfig:
        """Return the configuration from which the engine is made. `stop`: strings that end responses."""
        return RolloutConfig(
            num_rollout=1,
            rollout_batch_size=1,
            rollout_max_response_len=1,
            engine=self.engine,
            dtype=self.dtype,
            sglang=self.sglang,
            num_gpus_per_engine=self.num_gpus,
            num_threads=self.num_threads,
            rollout_stop=stop,
            timeout=7 * 24 * 3600,  # for all samples of a benchmark at once
        )


# Benchmarks: prompts, sampling and grading.
#
# `configs/benchmarks/` holds those that come with Cairn, one YAML file each. `cairn.configs.catalogue` reads them and
# the user's own files.


TEMPLATES = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
"""Renders templates. They can use nothing but the row, and a missing column is an error."""


class BenchmarkSource(Section):
    """Source of the rows: the user's own file, or a file of a Hugging Face data set at one revision."""

    data: Location | None = None
    """JSONL, Parquet or CSV file, on disk or at any fsspec URL; `path@[0:100]` takes a slice of its rows. Takes
    precedence over the data set."""

    dataset: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Hugging Face data set, `owner/name`. It is read from Hugging Face's cache; nothing is downloaded."""

    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")
    """Full commit of the data set, because a branch may move."""

    file: str | None = None
    """File within the data set."""

    split: str = "test"
    """Name of the split that the file holds."""

    @rule
    def _whole(self) -> None:
        together = (self.dataset, self.revision, self.file)
        if any(together) and not all(together):
            raise ValueError("dataset, revision and file belong together: give all three, or data")


class Example(Section):
    """A question with its answer, shown before the question of the row."""

    question: str
    """Question, in the form that the prompt's template renders."""

    answer: str
    """Answer, in the form that the model should give."""


class BenchmarkPrompt(Section):
    """Conversion of a row into a prompt. Templates are Jinja's, run in a sandbox, with the row's columns as
    variables."""

    style: Literal["chat", "plain"] = "chat"
    """`chat`: the template's text is the user's message, examples are earlier turns, and the tokenizer's chat template
    renders them. `plain`: the text itself after the examples; for base models."""

    template: str | None = None
    """Template of the question, such as `Question: {{ question }}`. A column whose name is no variable name is
    available under `row`, as in `{{ row["Record ID"] }}`. With `columns.choices` the variable `choices` is a list in
    shuffled order."""

    column: str | None = None
    """Column with the question, in place of a template: a string, or in chat style a list of messages."""

    system: str | None = None
    """System message, in chat style only."""

    examples: tuple[Example, ...] = ()
    """Few-shot examples, in order."""

    separator: str = "\n\n"
    """Text between examples and question, in plain style."""

    delimiter: str = " "
    """Text between the question and the answer of an example, in plain style."""

    until: tuple[str, ...] = ()
    """Strings at which a response ends for grading, at the first that occurs: a base model may continue with a new
    question."""

    @field_validator("template")
    @classmethod
    def _parses(cls, template: str | None) -> str | None:
        try:
            TEMPLATES.parse(template or "")
        except TemplateSyntaxError as error:
            raise ValueError(f"is not a template: {error}") from None
        return template

    @rule
    def _consistent(self) -> None:
        if (self.template is None) == (self.column is None):
            raise ValueError("set either template or column: the question is made from it")
        if self.style == "plain" and self.system is not None:
            raise ValueError("a plain prompt has no system message: write it into the template, or set style to chat")


class BenchmarkColumns(Section):
    """Columns of a row by their use."""

    label: str | None = None
    """Column with the expected answer; null where the grader needs none."""

    label_pattern: str | None = None
    r"""Regular expression with one group that extracts the answer from the label, such as `####\s*(.+)`."""

    id: str | None = None
    """Column that identifies the row in results; by default the row's number, from 0."""

    choices: tuple[str, ...] = ()
    """Columns with the choices of a multiple-choice question, the correct one first. The row's id, or without one their
    texts, determine their order in the prompt, so it is always the same. The label is the letter of the correct one."""

    metadata: tuple[str, ...] = ()
    """Further columns that the grader and the results get."""

    @field_validator("label_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return one_group(pattern)

    @rule
    def _one_label(self) -> None:
        if self.choices and self.label is not None:
            raise ValueError("choices make the label, so label must be null")
        if len(self.choices) == 1:
            raise ValueError("one choice is not enough: name at least two columns")


class BenchmarkSampling(Section):
    """Sampling of responses."""

    n: int = Field(1, ge=1)
    """Responses to each question."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of nucleus sampling."""

    top_k: int = Field(-1, ge=-1)
    """Number of most probable tokens to sample from; -1 allows all."""

    max_tokens: int = Field(ge=1)
    """Longest response in tokens."""

    @rule
    def _draws(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"temperature is 0, at which all {self.n} responses are the same: set n to 1 or raise it")


class BenchmarkGrader(Section):
    """Grading of responses."""

    name: str
    """Built-in grader (`reward.rm_type`), or a function of your own, `package.module.function` or
    `file.py:function`."""

    timeout: float = Field(10.0, gt=0)
    """Seconds of its own time that the grader may spend on a response. After that the response fails, or is wrong where
    the grader is a built-in one."""


class Follows(Section):
    """Task of another harness whose prompt and grading this benchmark follows."""

    harness: str = "lm-evaluation-harness"
    """Name of the harness."""

    release: str = "0.4.13"
    """Release of the harness."""

    task: str
    """Name of the task."""

    version: str
    """Version of the task, as the harness states it."""

    differs: str | None = None
    """Differences of this benchmark from the task, with reasons."""


class Benchmark(Section):
    """A benchmark. Its definition is in the digests of every result (`cairn.tasks.evaluation.benchmarks.rows`)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name in results."""

    version: int = Field(1, ge=1)
    """Version number. It increases with every change after which scores are not comparable with earlier ones."""

    title: str
    """Title for people."""

    rows: int | None = Field(None, ge=1)
    """Number of rows of the whole benchmark."""

    source: BenchmarkSource = BenchmarkSource()
    """Source of the rows."""

    columns: BenchmarkColumns = BenchmarkColumns()
    """Columns of a row by their use."""

    prompt: BenchmarkPrompt
    """Conversion of a row into a prompt."""

    sampling: BenchmarkSampling
    """Sampling of responses."""

    grader: BenchmarkGrader
    """Grading of responses."""

    follows: Follows | None = None
    """Task of another harness that this benchmark follows."""


class BenchmarkConfig(RowFormat):
    """A benchmark of a run's evaluations."""

    name: Text = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name in metrics and commits."""

    path: DataPath
    """JSONL or Parquet file, on disk or at any fsspec URL, or another input of the data source; `path@[0:100]` takes a
    slice of its rows."""

    rm_type: Text | None = None
    """Built-in grader; by default that of `reward`. slime: `rm_type` of an eval dataset."""

    metric: Code = "mean"
    """Metric of the benchmark's score. `mean`: mean reward. `summary`: mean reward with its error, pass@k and others,
    see docs/benchmarks.md. Or a function of your own, `package.module.function` or `file.py:function`, which gets all
    graded samples and may return further metrics, see docs/plugins.md."""

    n_samples_per_eval_prompt: int = Field(1, ge=1)
    """Responses to each prompt. slime: `--n-samples-per-eval-prompt`."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy. slime: `--eval-temperature`."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of nucleus sampling. slime: `--eval-top-p`."""

    top_k: int = Field(-1, ge=-1)
    """Number of most probable tokens to sample from; -1 allows all. slime: `--eval-top-k`."""

    max_response_len: int = Field(ge=1)
    """Longest response in tokens. slime: `--eval-max-response-len`."""

    @rule
    def _something_can_be_drawn(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens")


class EvalConfig(Section):
    """Evaluations of the weights during a run."""

    eval_interval: int | None = Field(None, ge=1)
    """Number of iterations between evaluations; the last iteration is always evaluated. Null turns evaluation off.
    slime: `--eval-interval`."""

    skip_eval_before_train: bool = False
    """Do not evaluate the initial weights. slime: `--skip-eval-before-train`."""

    benchmarks: tuple[BenchmarkConfig, ...] = ()
    """Benchmarks of each evaluation."""

    @rule
    def _consistent(self) -> None:
        names = [benchmark.name for benchmark in self.benchmarks]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"benchmarks: the name {min(twice)!r} appears twice; names must differ")
        if self.eval_interval is not None and not names:
            raise ValueError(
                f"eval_interval is {self.eval_interval} but benchmarks is empty; add one or set it to null"
            )
