"""Input of a plan: a recipe's model, the lengths of its samples, its machines, and assumptions about them. Records of a
plan."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from cairn.configs.catalogue import CPU, Hardware, hardware, published_names, published_relative
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.configs import context_length
from cairn.engines.plan.peaks import peak_tflops
from cairn.engines.plan.published import published_model
from cairn.engines.plan.tensors import Model
from cairn.engines.rollout.plan import EngineKind, kind_of
from cairn.engines.types.errors import BadModel
from cairn.storage.records import Record
from cairn.storage.store.canonical import from_json

# Records of a plan.


class Row(Record):
    """Memory for one purpose."""

    what: str
    bytes: float


def scaled(rows: Iterable[Row], factor: float) -> tuple[Row, ...]:
    """Return the rows with their sizes multiplied."""
    return tuple(Row(what=row.what, bytes=row.bytes * factor) for row in rows)


class Memory(Record):
    """Memory use of one device, or of one machine."""

    of: str
    """Owner of the memory, such as `a GPU that trains`."""
    rows: tuple[Row, ...]
    capacity: float
    """Bytes of the device or machine."""

    @property
    def total(self) -> float:
        """Bytes in use."""
        return sum(row.bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


class ModelFacts(Record):
    """The trained model."""

    name: str
    source: str
    """Source of its config."""
    architecture: str
    parameters: int
    active_parameters: int
    """Number of parameters that process each token."""
    layers: int


class CachePlan(Record):
    """Keys and values of rollout engines."""

    bytes_per_token: float
    """Bytes on each rank, for layers that attend to all tokens."""
    bytes_per_sample: float
    """Bytes of state that does not grow with a sample, or only up to a window."""
    pool: float
    """Bytes for the cache on each rank."""
    tokens: int
    """Number of tokens that fit on an engine, in samples of maximum length."""
    samples_longest: int
    """Number of samples of maximum length that fit on all engines."""
    samples_mean: int
    """Number of samples of mean length that fit on all engines."""
    at_once: int
    """Number of samples that the engines generate concurrently: limited by memory, by options, and by the batch."""
    asked: int
    """Number of samples of an iteration's first round."""


class Transfer(Record):
    """A transfer of bytes."""

    bytes: float
    seconds: float
    how: str


class StepTime(Record):
    """Duration of a step of an iteration."""

    step: str
    seconds: float


class Remedy(Record):
    """A change after which the recipe fits."""

    options: dict[str, object]
    """Changed options with their new values."""
    of: str
    """Owner of the fullest memory after the change, among those that were too small."""
    highest: float
    """Bytes in use there."""
    capacity: float


class Plan(Record):
    """Resource needs of a recipe."""

    recipe: str
    gpu: str
    gpus: float
    machines: int
    model: ModelFacts
    memory: tuple[Memory, ...]
    cache: CachePlan | None = None
    """Cache of the rollout engines; None where nothing is sampled, or external servers generate."""
    sync: Transfer | None = None
    checkpoint: Transfer
    steps: tuple[StepTime, ...]
    iterations: int | None = None
    """Iterations of the whole run; None where the data decides."""
    tokens: float
    """Mean tokens of an iteration's samples, prompts included."""
    overlapped: bool
    """Whether rollout and training run concurrently."""
    problems: tuple[str, ...]
    """Reasons why it cannot run with any memory, or has too little cache."""
    remedies: tuple[Remedy, ...] = ()
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems and all(memory.fits for memory in self.memory)

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        rollout = sum(step.seconds for step in self.steps if step.step == "rollout")
        rest = sum(step.seconds for step in self.steps) - rollout
        return max(rollout, rest) if self.overlapped else rollout + rest

    @property
    def tokens_per_second(self) -> float:
        """Tokens of an iteration's samples, per second of the iteration."""
        return self.tokens / self.seconds

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all iterations, without evaluations; None where the data decides how many there are."""
        return None if self.iterations is None else self.iterations * self.seconds

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of all iterations."""
        return None if self.run_seconds is None else self.gpus * self.run_seconds / 3600


USUAL_PROMPT = 1024
"""Tokens of the longest prompt where a recipe sets no limit."""
USUAL_SEQUENCE = 4096
"""Tokens of the longest demonstration or pair where a recipe sets no limit."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of samples, in tokens."""

    longest_prompt: int
    longest_response: int
    prompt: float
    """Mean length of a prompt."""
    response: float
    """Mean length of a response."""

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.longest_response

    @property
    def mean(self) -> float:
        return self.prompt + self.response

    @property
    def trained(self) -> float:
        """Share of trained tokens in the longest sample."""
        return self.longest_response / self.longest


@dataclass(frozen=True)
class Subject:
    """A recipe, and all inputs of its plan."""

    recipe: str
    config: RunConfig
    model: Model
    source: str
    """Source of the model's config."""
    lengths: Lengths
    gpu: str
    """Name of the GPUs; `cpu` where there are none."""
    gpu_hardware: Hardware
    cpu_hardware: Hardware
    memory_of_this_machine: float
    """Memory of this machine in bytes."""
    assumptions: tuple[str, ...] = field(default=())

    @property
    def trains_on_gpu(self) -> bool:
        return self.config.training.num_gpus_per_rank > 0

    @property
    def rolls_out_on_gpu(self) -> bool:
        return self.config.rollout.num_gpus_per_engine > 0

    @property
    def engine_kind(self) -> EngineKind:
        """Description of the rollout engine."""
        return kind_of(self.config.rollout.engine)

    def hardware_of(self, on_gpu: bool) -> Hardware:
        return self.gpu_hardware if on_gpu else self.cpu_hardware

    def flops(self, on_gpu: bool, dtype: str) -> float:
        """Return the peak operations per second of a GPU or of a CPU thread. A GPU does a sixteenth of them without
        tensor cores."""
        hardware = self.hardware_of(on_gpu)
        if hardware.tflops is not None:
            return hardware.tflops * 1e12
        peak = peak_tflops(hardware.device, "bfloat16")
        assert peak is not None, hardware.device
        return peak * 1e12 / (1 if dtype == "bfloat16" else 16)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
"""How a published model whose name ends in -FP8 is quantised: DeepSeek-V3 Technical Report, section 3.3.2."""


@lru_cache(maxsize=32)
def planned_model(path: str) -> tuple[Model, str]:
    """Return the model of a folder, or else a published one of the folder's name, and the source of its config.

    Raises:
        BadModel: there is neither, or it is no causal language model.
    """
    folder = Path(path)
    if (file := folder / "config.json").is_file():
        from cairn.engines.plan.library import config_of, model_of  # PyTorch takes seconds to import

        try:
            written = from_json(file.read_bytes())
            # Published configs keep the quantization of the weights too.
            config = config_of(written if isinstance(written, dict) else {})
        except (ValueError, BadModel) as error:
            raise BadModel(f"{file} cannot be read: {error}") from error
        return model_of(config), str(file)
    relative = published_relative(folder.name)
    if relative is None:
        near = get_close_matches(folder.name, published_names(), 1)
        meant = f" (nearest: {near[0]})" if near else ""
        raise BadModel(
            f"the model folder {path} has no config.json, and Cairn does not know a published model named "
            f"{folder.name!r}{meant}: use a folder in Hugging Face format, or the name of a published model"
        )
    model = published_model(relative)
    if folder.name.lower().endswith("-fp8"):
        vars(model.config).setdefault("quantization_config", FP8)
    other = "" if relative == folder.name else f", whose architecture {folder.name} is taken to have"
    return model, f"the published config of {relative}{other}"


def subject_of(
    config: RunConfig,
    recipe: str,
    gpu: str,
    *,
    memory_of_this_machine: float,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    rates: dict[str, float] | None = None,
) -> Subject:
    """Return all inputs of a configuration's plan.

    Args:
        gpu: name of the GPUs, where the configuration uses any.
        prompt_tokens: mean length of a prompt; half the longest by default.
        response_tokens: mean length of a response; half the longest by default.
        rates: overrides of the machine's own `mfu` and `mbu`.

    Raises ConfigError where there is no such GPU, and BadModel as `planned_model`.
    """
    has_gpus = config.uses_gpus
    machine, cpu = (one.model_copy(update=rates or {}) for one in (hardware(gpu), hardware(CPU)))
    model, source = planned_model(config.model.path)
    assumptions: list[str] = []
    lengths = _lengths(config, model, prompt_tokens, response_tokens, assumptions)
    assumptions += _machine_assumptions(machine if has_gpus else cpu, has_gpus)
    return Subject(
        recipe,
        config,
        model,
        source,
        lengths,
        gpu.lower() if has_gpus else CPU,
        machine,
        cpu,
        memory_of_this_machine,
        tuple(assumptions),
    )


def _lengths(
    config: RunConfig, model: Model, prompt: float | None, response: float | None, assumptions: list[str]
) -> Lengths:
    context, rollout = context_length(model.config), config.rollout
    if not config.samples_responses:
        longest = config.data.max_length
        if longest is None:
            longest = min(context, USUAL_SEQUENCE)
            assumptions.append(f"the longest sequence has {longest:,} tokens: data.max_length is not set")
        mean = min(response or longest / 2, longest)
        assumptions.append(f"a sequence has {mean:,.0f} tokens on average, and all are trained on")
        return Lengths(0, longest, 0.0, mean)
    longest = min(rollout.rollout_max_response_len, context)
    first = rollout.rollout_max_prompt_len
    if first is None:
        first = max(1, min(max(USUAL_PROMPT, int(prompt or 0)), context - longest))
        assumptions.append(f"the longest prompt has {first:,} tokens: rollout.rollout_max_prompt_len is not set")
    prompts, responses = min(prompt or first / 2, first), min(response or longest / 2, longest)
    assumptions.append(f"a prompt has {prompts:,.0f} tokens and a response {responses:,.0f} on average")
    return Lengths(first, longest, prompts, responses)


def _machine_assumptions(machine: Hardware, has_gpus: bool) -> Iterator[str]:
    what = "a GPU" if has_gpus else "a thread"
    yield f"training and prefill reach {machine.mfu:.0%} of {what}'s operations"
    yield f"decoding reaches {machine.mbu:.0%} of its memory's bandwidth"
    yield f"a process holds {machine.reserved_gb:g} GB before it has a model; memory is not fragmented"
    yield f"a machine's store takes {machine.disk_gb_s:g} GB/s; rewards and other steps take no time"
