"""When an option has an effect, stated next to its declaration.

    tis_clip: Annotated[float, when("algorithm.use_tis")] = Field(2.0, gt=0)

`idle_options` finds the options of a configuration that are set and have no effect, and writes the sentence. A
condition on a section holds for all its options. Where user code may read an option, it is never idle.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from cairn.configs.kinds import CORRECTION, ESTIMATOR, LOSS, readers
from cairn.configs.schema.base import Section


@dataclass(frozen=True)
class When:
    """An option has an effect only while a condition on the whole configuration holds."""

    holds: Callable[[Any], bool]
    why: Callable[[Any], str]
    """Clause on why it does not hold: "algorithm.use_tis is false"."""
    remedy: str
    """Change after which it holds: "set algorithm.use_tis=true"."""

    def __or__(self, other: "When") -> "When":
        return When(
            lambda run: self.holds(run) or other.holds(run),
            lambda run: f"{self.why(run)} and {other.why(run)}",
            self.remedy,
        )


ALWAYS = When(lambda run: True, lambda run: "", "")
"""On a field: the conditions of its section do not apply to it."""


def when(option: str, *values: Any, remedy: str | None = None, because: str | None = None) -> When:
    """Return the condition that an option has one of some values, or is set to anything but false, null, 0 or empty.

    Args:
        option: dotted, from the root of the configuration; properties count too.
        values: that it may have; none: any that is true.
        remedy: by default to set the option to the first of the values, or to true.
        because: clause on why the condition does not hold, in place of the option's value.
    """

    def holds(run: Any) -> bool:
        value = read(run, option)
        return value in values if values else bool(value)

    wanted = spelled(values[0]) if values else "true"
    return When(
        holds, lambda run: because or f"{option} is {spelled(read(run, option))}", remedy or f"set {option}={wanted}"
    )


def _data_hold_responses(run: Any) -> str:
    algorithm = run.algorithm
    if algorithm.learns_from == "demonstrations":
        return f"algorithm.loss_type is {algorithm.loss_type}, which learns from responses that the data holds"
    return (
        f"algorithm.advantage_estimator is {algorithm.advantage_estimator}, which learns from pairs that the data holds"
    )


SAMPLED = When(lambda run: run.samples_responses, _data_hold_responses, "choose another loss or estimator")
"""The policy samples the responses that it is trained on."""
WITH_ENGINES = When(
    lambda run: run.needs_rollout_engines,
    lambda run: f"{_data_hold_responses(run)}, and eval.eval_interval is null, so that nothing is sampled or graded",
    "set eval.eval_interval",
)
"""Something is sampled, for training or for evaluations."""


ON_GPUS = When(
    lambda run: run.uses_gpus,
    lambda run: "training.num_gpus_per_rank and rollout.num_gpus_per_engine are 0",
    "set training.num_gpus_per_rank=1",
)
"""Training or rollout engines use GPUs."""


CRITIC = When(
    lambda run: run.algorithm.trains_critic,
    lambda run: f"algorithm.advantage_estimator is {run.algorithm.advantage_estimator}, which has no critic",
    "set algorithm.advantage_estimator=ppo",
)


def learned_from(*kinds: str) -> When:
    """Return the condition that a run learns from some kinds of data: `demonstrations`, `preferences`."""

    def why(run: Any) -> str:
        if not run.samples_responses:
            return _data_hold_responses(run)
        return f"algorithm.loss_type is {run.algorithm.loss_type}, which learns from responses that are sampled"

    remedies = {"demonstrations": "algorithm.loss_type=sft_loss", "preferences": "algorithm.advantage_estimator=dpo"}
    remedy = " or ".join(remedies[kind] for kind in kinds)
    return When(lambda run: run.algorithm.learns_from in kinds, why, f"set {remedy}")


def read(run: Any, option: str) -> Any:
    """Return the value of a dotted option or property."""
    for name in option.split("."):
        run = getattr(run, name)
    return run


def spelled(value: Any) -> str:
    """Return a value as `--set` takes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Idle:
    """An option that is set and has no effect."""

    option: str
    """Dotted."""
    value: Any
    default: Any
    why: str
    remedy: str

    def __str__(self) -> str:
        shown = "" if isinstance(self.value, Section | tuple | dict) else f" ({spelled(self.value)})"
        return f"{self.option}{shown} has no effect while {self.why}; {self.remedy}, or leave it out"


def idle_options(run: Section) -> Iterator[Idle]:
    """Yield the options of a whole configuration that are set and have no effect."""
    changed = list(_changed(run, "", ()))
    idle = set()
    for name, value, default, conditions in changed:
        failed = next((condition for condition in conditions if not condition.holds(run)), None)
        if failed is not None:
            idle.add(name)
            yield Idle(name, value, default, failed.why(run), failed.remedy)
    algorithm: Any = getattr(run, "algorithm", None)
    own = {
        name.partition(".")[2]: (value, default) for name, value, default, _ in changed if name.startswith("algorithm.")
    }
    if algorithm is not None and own and not algorithm.is_read_by_user_code:
        for name, why, remedy in _unread_by_plugins(algorithm, own.keys()):
            if name in own and f"algorithm.{name}" not in idle:
                idle.add(f"algorithm.{name}")
                yield Idle(f"algorithm.{name}", *own[name], why, remedy)


def _changed(
    section: Section, prefix: str, above: tuple[When, ...]
) -> Iterator[tuple[str, Any, Any, tuple[When, ...]]]:
    """Yield name, value, default and conditions of every option that is not left at its default."""
    if section.is_read_by_user_code:
        return
    for field, info in type(section).model_fields.items():
        value, default = getattr(section, field), section.default_of(field)
        if value == default:
            continue
        own = tuple(condition for condition in info.metadata if isinstance(condition, When))
        conditions = own if ALWAYS in own else (*above, *own)
        if isinstance(value, Section) and default is not None:  # or it is set as a whole
            yield from _changed(value, f"{prefix}{field}.", conditions)
        else:
            yield f"{prefix}{field}", value, default, conditions


def _unread_by_plugins(algorithm: Any, changed: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield options that the chosen estimator, loss and correction do not read, why, and what would read them."""
    if ESTIMATOR.built_in_declaration(algorithm.advantage_estimator) is not None:
        why = f"algorithm.advantage_estimator is {algorithm.advantage_estimator}"
        yield from _read_by_others(ESTIMATOR, "advantage_estimator", algorithm.advantage_estimator, why)
    yield from _unread_by_the_loss(algorithm)
    of_corrections = {name for name in changed if name.startswith(("tis_", "rs_", "use_rs"))}
    correction = algorithm.custom_tis_function_path
    # Importing the declarations of corrections takes long.
    if of_corrections and CORRECTION.built_in_declaration(correction) is not None:
        metrics = {"tis_clip", "tis_clip_low"} if algorithm.get_mismatch_metrics else set()
        why = f"algorithm.custom_tis_function_path is {correction}"
        unread = _read_by_others(CORRECTION, "custom_tis_function_path", correction, why)
        yield from (option for option in unread if option[0] not in metrics)


def _unread_by_the_loss(algorithm: Any) -> Iterator[tuple[str, str, str]]:
    usual = type(algorithm).model_fields["loss_type"].default
    if algorithm.loss == usual:
        return  # it reads all options except those of other losses
    declaration = LOSS.built_in_declaration(algorithm.loss)
    if declaration is None:
        return
    why = f"algorithm.loss_type is {algorithm.loss}"
    if not algorithm.names_a_loss:
        estimator = algorithm.advantage_estimator
        why = f"algorithm.advantage_estimator is {estimator}, trained with the loss {algorithm.loss}"
    if "advantages" not in declaration.needs:
        read = {"loss_type", "custom_pg_loss_reducer_function_path", "calculate_per_token_loss"}
        read |= {"distillation_topk"} if algorithm.learns_from_top_k else set()
        for name in type(algorithm).model_fields.keys() - read:
            yield name, why, "choose a loss that follows advantages"
    if algorithm.ratio_to_behaviour:
        for name in ("use_tis", "use_rollout_logprobs"):
            yield name, f"{why}, whose ratio is to the policy that sampled", "choose another loss"
    for name, _, remedy in _read_by_others(LOSS, "loss_type", algorithm.loss, why):
        yield name, why, remedy if algorithm.names_a_loss else "choose another estimator"


def _read_by_others(kind: Any, option: str, chosen: str, why: str) -> Iterator[tuple[str, str, str]]:
    for name, others in readers(kind).items():
        if chosen not in others:
            yield name, why, f"set algorithm.{option}={' or '.join(others)}"
