"""Checks of a configuration that need neither the model nor the data, as for a recipe of another machine.

They need no PyTorch, which takes seconds to import, unless the user's code does.
"""

from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from pathlib import Path

from cairn.configs.catalogue import published_relative
from cairn.configs.kinds import OPTIONS, named
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.requirements import placement_problems, weight_problems
from cairn.engines.rollout.plan import NAMES, kind_of
from cairn.engines.training.needs import advantage_needs, loss_needs
from cairn.engines.training.options import config_problems
from cairn.tasks.grading.graders import get_grader, require_findable_answer
from cairn.tasks.grading.opening import stores_answers, unread_options

Note = Callable[[str], None]
"""Called with a sentence on what stops no run, but may surprise."""


def ignore(sentence: str) -> None:
    """Do nothing with a sentence."""


def portable_problems(config: RunConfig, note: Note = ignore) -> list[str]:
    """Return sentences on problems that show without the files of models and data, as for a recipe of another machine.

    The training engine's options are checked against the published config of a model with the folder's name, where
    there is one. `note` as in `setup_problems`, and called where there is none.
    """
    problems = [*plugin_problems(config), *grader_problems(config, note)]
    problems += [*kind_of(config.rollout.engine).layout_problems(config.rollout)]
    for sentence in (*unread_server_options(config), *unread_grader_options(config)):
        note(sentence)
    problems += [*placement_problems(config), *weight_problems(config)]
    if config.training.engine == "megatron" or config.training.packs_rows:
        from cairn.engines.plan.published import published_model

        relative = published_relative(Path(config.model.path).name)
        if relative is None:
            note(f"model.path: there is no published model {Path(config.model.path).name!r} to check the layout with")
        else:
            problems += config_problems(config.training, published_model(relative).config)
    return list(dict.fromkeys(problems))


def plugin_problems(config: RunConfig) -> Iterator[str]:
    """Yield sentences on code that a configuration names and that cannot be used."""
    reported = set[str]()
    for option, kind in OPTIONS.items():
        for place, name in named(config, option).items():
            try:
                reads = kind.declaration(name).reads
            except BadPlugin as error:
                reported.add(str(error))
                yield f"{place}: {error}"
            else:
                yield from _unknown_reads(config, place, name, reads)
    yield from _missing_teacher(config)
    try:
        get_grader(config.reward)
        stores_answers(config.reward)
    except BadPlugin as error:
        if str(error) not in reported:
            yield f"reward: {error}"
    for index, benchmark in enumerate(config.eval.benchmarks):
        if benchmark.rm_type is not None:
            try:
                get_grader(config.reward.of(benchmark.rm_type))
            except BadPlugin as error:
                yield f"eval.benchmarks.{index}: {error}"


def unread_server_options(config: RunConfig) -> Iterator[str]:
    """Yield sentences on options of another rollout engine."""
    rollout, kind = config.rollout, kind_of(config.rollout.engine)
    for option in dict.fromkeys(option for name in NAMES for option in kind_of(name).options):
        if option not in kind.options and getattr(rollout, option):
            yield f"rollout.{option} has no effect while rollout.engine is {rollout.engine}; leave it out"


def unread_grader_options(config: RunConfig) -> Iterator[str]:
    """Yield sentences on options of graders that grade nothing."""
    own = config.reward.rm_type if config.reward.custom_rm_path is None else None
    used = {own, *(benchmark.rm_type for benchmark in config.eval.benchmarks)}
    for option, name in (("rm_url", "remote_rm"), *((name, name) for name in ("judge", "code", "reward_model"))):
        if getattr(config.reward, option) is not None and name not in used:
            yield (
                f"reward.{option} has no effect, since only the grader {name} reads it; set reward.rm_type={name}, or "
                "leave it out"
            )
    if config.reward.rm_api_key_env is not None and "remote_rm" not in used:
        yield "reward.rm_api_key_env has no effect, since only the grader remote_rm reads it; leave it out"


def grader_problems(config: RunConfig, note: Note) -> Iterator[str]:
    """Report actions that graders do not support, and note options that they do not read."""
    yield from _spent_row_problems(config)
    benchmarks = config.eval.benchmarks
    configured = [config.reward, *(config.reward.of(b.rm_type) for b in benchmarks if b.rm_type is not None)]
    if not config.samples_responses:  # only evaluations are graded
        configured = [config.reward.of(benchmark.rm_type) for benchmark in benchmarks]
    try:
        graders = [get_grader(reward) for reward in configured]
    except BadPlugin:  # `plugin_problems` reports it
        return
    try:
        for grader in graders:
            require_findable_answer(grader.name)
        for sentence in unread_options(config.reward, graders):
            note(sentence)
    except BadPlugin as error:
        yield f"reward: {error}"


def _spent_row_problems(config: RunConfig) -> Iterator[str]:
    own = config.reward.rm_type if config.reward.custom_rm_path is None else None
    if own == "reward_model" and config.data.get_samples_path is not None:
        yield (
            "reward.rm_type is reward_model, which reads the rows of the data again, but data.get_samples_path "
            f"({config.data.get_samples_path}) yields each only once: use data in files, or another grader"
        )


def _unknown_reads(config: RunConfig, place: str, name: str, reads: Collection[str]) -> Iterator[str]:
    section = place.rpartition(".")[0]
    options = type(getattr(config, section)).model_fields if reads else {}
    for option in sorted(set(reads) - set(options)):
        near = get_close_matches(option, options, 1)
        meant = f": did you mean {near[0]}?" if near else ": correct it"
        yield f"{place}: {name!r} reads {option!r}, which is not an option of {section}{meant}"


def _missing_teacher(config: RunConfig) -> Iterator[str]:
    if config.model.has_teacher or not config.algorithm.names_user_code:
        return
    try:
        needs = advantage_needs(config.algorithm) | loss_needs(config.algorithm)
    except BadPlugin:  # `plugin_problems` reports it
        return
    why = needs.get("teacher_log_probs", needs.get("teacher_top_log_probs"))
    if why is not None:
        yield (
            f"algorithm.{why} needs the log-probs of a teacher: set model.teacher_path to its folder, or "
            "model.teacher_url"
        )
