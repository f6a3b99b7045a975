"""A benchmark: what is asked, how it is sampled, and how answers are graded.

`configs/benchmarks/` holds those that Cairn comes with, one YAML file each; `cairn.configs.benchmark_files` reads them
and those in files of one's own.
"""

from typing import Literal

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, field_validator, model_validator

from cairn.configs.schema.base import Section
from cairn.configs.schema.data import one_group
from cairn.configs.schema.location import Location

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
    """One benchmark. What it says is in the digests of every result (`cairn.tasks.benchmarks.digests`)."""

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
