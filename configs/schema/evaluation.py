"""Benchmarks that are run beside the training."""

from pydantic import Field, ValidationInfo, model_validator

from cairn.configs.schema.base import Code, Section, is_recorded
from cairn.configs.schema.data import RowFormat
from cairn.configs.schema.location import Location


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
    def _something_can_be_drawn(self, info: ValidationInfo) -> "BenchmarkConfig":
        if self.top_k == 0 and not is_recorded(info):
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
