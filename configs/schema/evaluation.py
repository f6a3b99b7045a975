"""Benchmarks that are run beside the training."""

from collections.abc import Mapping
from typing import Any, Literal

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, field_validator, model_validator

from cairn.configs.schema.base import Code, Location, Section
from cairn.configs.schema.data import RowFormat, one_group
from cairn.configs.schema.rollout import RolloutConfig

# What an evaluation's engine is given.


class EngineOptions(Section):
    """What weights are evaluated with. Names and defaults as in `rollout`."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """Kind of the rollout engine."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and computation."""

    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of SGLang's server, as in `rollout.sglang`."""

    num_gpus: float = Field(0, ge=0)
    """GPUs that it takes; 0 computes on the CPU."""

    num_threads: int = Field(1, ge=1)
    """CPU threads. With one, samples of `transformers` do not depend on how they are batched."""

    @classmethod
    def of_run(cls, rollout: RolloutConfig, given: Mapping[str, Any]) -> "EngineOptions":
        """A run's, but for those that are given; another engine has none of the run's own options."""
        own: dict[str, Any] = {
            "engine": rollout.engine,
            "dtype": rollout.dtype,
            "num_gpus": rollout.num_gpus_per_engine,
            "num_threads": rollout.num_threads,
        }
        if rollout.engine == "sglang" == given.get("engine", rollout.engine):
            own["sglang"] = rollout.sglang
        return cls.model_validate({**own, **given})

    def settings(self) -> dict[str, Any]:
        """What a result's key has of it: what decides which bits come out, wherever they are computed."""
        return {"engine": self.engine, "dtype": self.dtype, **({"sglang": self.sglang} if self.sglang else {})}

    def rollout(self, stop: tuple[str, ...] = ()) -> RolloutConfig:
        """As an engine is made from it. `stop`: strings that end responses."""
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
            timeout=7 * 24 * 3600,  # of all that a benchmark asks at once
        )


# A benchmark: what is asked, how it is sampled, and how answers are graded.
#
# `configs/benchmarks/` holds those that Cairn comes with, one YAML file each; `cairn.configs.catalogue` reads them
# and those in files of one's own.


TEMPLATES = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
"""What templates are rendered with: they see the row and nothing else, and a column that the row lacks is an error."""


class BenchmarkSource(Section):
    """Where the rows are: a file of one's own, or a file of a Hugging Face data set at one revision."""

    data: Location | None = None
    """JSONL, Parquet or CSV file, on disk or at any fsspec URL; `path@[0:100]` takes a slice of its rows. It goes
    before the data set."""

    dataset: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Hugging Face data set, `owner/name`. Nothing is fetched: it is looked for in Hugging Face's cache."""

    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")
    """Commit of the data set, in full: a branch may move."""

    file: str | None = None
    """File within the data set."""

    split: str = "test"
    """Name of the split that the file holds."""

    @model_validator(mode="after")
    def _whole(self) -> "BenchmarkSource":
        together = (self.dataset, self.revision, self.file)
        if any(together) and not all(together):
            raise ValueError("dataset, revision and file belong together: give all three, or data")
        return self


class Example(Section):
    """One question with its answer, shown before the question that is asked."""

    question: str
    """As the prompt's template would render it."""

    answer: str
    """As the model should."""


class BenchmarkPrompt(Section):
    """How a row becomes what the model reads. Templates are Jinja's, in a sandbox, with the row's columns as names."""

    style: Literal["chat", "plain"] = "chat"
    """`chat`: the template's text is the user's message, examples are turns before it, and the tokenizer's chat
    template renders them. `plain`: the text itself, examples before it; for base models."""

    template: str | None = None
    """The question, such as `Question: {{ question }}`. A column that is no name stands under `row`, as in
    `{{ row["Record ID"] }}`; with `columns.choices` there is `choices`, a list in shuffled order."""

    column: str | None = None
    """In place of a template, the column with the question: a string, or in chat style a list of messages."""

    system: str | None = None
    """System message, in chat style only."""

    examples: tuple[Example, ...] = ()
    """Few-shot examples, in order."""

    separator: str = "\n\n"
    """Between examples and question, in plain style."""

    delimiter: str = " "
    """Between the question and the answer of an example, in plain style."""

    until: tuple[str, ...] = ()
    """A response is graded up to the first of these: where a base model goes on with a question of its own."""

    @field_validator("template")
    @classmethod
    def _parses(cls, template: str | None) -> str | None:
        try:
            TEMPLATES.parse(template or "")
        except TemplateSyntaxError as error:
            raise ValueError(f"is no template: {error}") from None
        return template

    @model_validator(mode="after")
    def _consistent(self) -> "BenchmarkPrompt":
        if (self.template is None) == (self.column is None):
            raise ValueError("give either template or column, from which the question is made")
        if self.style == "plain" and self.system is not None:
            raise ValueError("a plain prompt has no system message: write it into the template, or set style to chat")
        return self


class BenchmarkColumns(Section):
    """Which columns of a row are what."""

    label: str | None = None
    """The expected answer; null where the grader needs none."""

    label_pattern: str | None = None
    r"""Regular expression with one group that cuts the answer out of the label, such as `####\s*(.+)`."""

    id: str | None = None
    """What names the row in results; else its number, from 0."""

    choices: tuple[str, ...] = ()
    """Columns with the choices of a multiple-choice question, the right one first. Their order in the prompt follows
    from the row's id, or without one from their texts, so it is the same every time; the label is the letter of the
    right one."""

    metadata: tuple[str, ...] = ()
    """Columns that the grader and the results get beside the label."""

    @field_validator("label_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return one_group(pattern)

    @model_validator(mode="after")
    def _one_label(self) -> "BenchmarkColumns":
        if self.choices and self.label is not None:
            raise ValueError("choices make the label, so label must be null")
        if len(self.choices) == 1:
            raise ValueError("one choice is none: name at least two columns")
        return self


class BenchmarkSampling(Section):
    """How responses are drawn."""

    n: int = Field(1, ge=1)
    """Responses to each question."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass."""

    top_k: int = Field(-1, ge=-1)
    """Candidates kept per token; -1 keeps all."""

    max_tokens: int = Field(ge=1)
    """Longest response in tokens."""

    @model_validator(mode="after")
    def _draws(self) -> "BenchmarkSampling":
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"temperature is 0, at which all {self.n} responses are the same: set n to 1 or raise it")
        return self


class BenchmarkGrader(Section):
    """Who says what a response is worth."""

    name: str
    """One of Cairn's (`reward.rm_type`), or a function of your own, `package.module.function` or `file.py:function`."""

    timeout: float = Field(10.0, gt=0)
    """Seconds of its own that it may spend on a response, which fails then; it is wrong if the grader is one of
    Cairn's."""


class Follows(Section):
    """The task of another harness whose prompt and grading this benchmark follows."""

    harness: str = "lm-evaluation-harness"
    """Its name."""

    release: str = "0.4.13"
    """Release of the harness."""

    task: str
    """Name of the task."""

    version: str
    """Version that the task gives itself."""

    differs: str | None = None
    """In what this benchmark is another, and why."""


class Benchmark(Section):
    """One benchmark. What it says is in the digests of every result (`cairn.tasks.evaluation.benchmarks.rows`)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name in results."""

    version: int = Field(1, ge=1)
    """Goes up whenever scores of before and after cannot be compared."""

    title: str
    """For people."""

    rows: int | None = Field(None, ge=1)
    """How many the whole benchmark has."""

    source: BenchmarkSource = BenchmarkSource()
    """Where the rows are."""

    columns: BenchmarkColumns = BenchmarkColumns()
    """Which columns of a row are what."""

    prompt: BenchmarkPrompt
    """How a row becomes what the model reads."""

    sampling: BenchmarkSampling
    """How responses are drawn."""

    grader: BenchmarkGrader
    """Who says what a response is worth."""

    follows: Follows | None = None
    """The task of another harness that it follows."""


class BenchmarkConfig(RowFormat):
    """One benchmark."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name in metrics and commits."""

    path: Location
    """JSONL or Parquet file, on disk or at any fsspec URL, or whatever the data source takes; `path@[0:100]` takes a
    slice of its rows."""

    rm_type: str | None = None
    """Grader; by default that of `reward`. slime: `rm_type` of an eval dataset."""

    metric: Code = "mean"
    """What the benchmark's score is made of: `mean` is the mean reward, `summary` the same with its error, pass@k and
    others, see docs/benchmarks.md; a function of your own, `package.module.function` or `file.py:function`, gets all
    graded samples and may give metrics of its own, see docs/plugins.md."""

    n_samples_per_eval_prompt: int = Field(1, ge=1)
    """slime: `--n-samples-per-eval-prompt`."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy. slime: `--eval-temperature`."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass. slime: `--eval-top-p`."""

    top_k: int = Field(-1, ge=-1)
    """Candidates kept per token; -1 keeps all. slime: `--eval-top-k`."""

    max_response_len: int = Field(ge=1)
    """Longest response in tokens. slime: `--eval-max-response-len`."""

    @model_validator(mode="after")
    def _something_can_be_drawn(self) -> "BenchmarkConfig":
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens")
        return self


class EvalConfig(Section):
    """When and on what the weights are evaluated."""

    eval_interval: int | None = Field(None, ge=1)
    """Iterations between evaluations; the last iteration is always evaluated. Null turns evaluation off. slime:
    `--eval-interval`."""

    skip_eval_before_train: bool = False
    """Do not evaluate the initial weights. slime: `--skip-eval-before-train`."""

    benchmarks: tuple[BenchmarkConfig, ...] = ()
    """The benchmarks."""

    @model_validator(mode="after")
    def _consistent(self) -> "EvalConfig":
        names = [benchmark.name for benchmark in self.benchmarks]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"benchmarks: the name {min(twice)!r} stands twice; names must differ")
        if self.eval_interval is not None and not names:
            raise ValueError(
                f"eval_interval is {self.eval_interval} but benchmarks is empty; add one or set it to null"
            )
        return self
