"""What can be known of a configuration before anything starts: model folder, tokenizer, lengths, plug-ins, data.

Needs no GPU and no cluster; no weights are loaded.
"""

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any

from transformers import AutoTokenizer

from cairn.configs.kinds import OPTIONS, declared, named
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.data import DataConfig
from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.errors import BadModel
from cairn.engines.fleet.machines import placement_problems
from cairn.engines.models import check_model_folder, context_length
from cairn.engines.rollout.factory import kind_of
from cairn.engines.training.needs import advantage_needs, loss_needs
from cairn.engines.training.options import problems as training_problems
from cairn.engines.weights.options import weight_problems
from cairn.flows.trackers.requirements import tracking_problems
from cairn.storage.records import FORMAT
from cairn.tasks.data import BadData, PromptData
from cairn.tasks.rewards import get_grader
from cairn.tasks.rules import untold


def setup_problems(config: RunConfig, began: int = FORMAT) -> list[str]:
    """Sentences on the model folders, the lengths against the context, and user code. Reads no data. `began`: format of
    the run's manifest, for what it may go on with though a new run may not begin with it."""
    problems = [*_model_problems(config), *_plugin_problems(config), *_server_problems(config, began)]
    problems += [*placement_problems(config), *weight_problems(config), *tracking_problems(config.tracking)]
    for path in config.model.folders.values():
        problems += training_problems(config.training, path)
    if config.training.lora.r and not problems:
        from cairn.engines.training.torch.lora import lora_problems  # imports peft, which only those runs need

        problems += lora_problems(config.training.lora, config.model.path)
    try:
        load_tokenizer(config.model.path)
    except BadModel as error:
        problems.append(f"model.path: {error}")
    if config.model.teacher_path is not None and not problems:
        problems += _teacher_problems(config.model.path, config.model.teacher_path)
    return list(dict.fromkeys(problems))


def data_problems(config: RunConfig) -> list[str]:
    """Sentences on the data files, every row of which is read; those at other URLs are left for the run to open.

    Raises BadModel where the tokenizer that prompts need cannot be loaded.
    """
    tokenizer = load_tokenizer(config.model.path)
    sources: dict[str, DataConfig | BenchmarkConfig] = {"data": config.data}
    sources |= {f"eval.benchmarks.{index}": benchmark for index, benchmark in enumerate(config.eval.benchmarks)}
    problems = []
    for section, source in sources.items():
        if "://" not in source.path:
            try:
                prompts = PromptData.open(source, source.path, tokenizer)
                if isinstance(source, BenchmarkConfig):
                    prompts.require_all()
            except BadData as error:
                problems.append(f"{section}: {error}")
    return problems


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of a model folder. Raises BadModel."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    # The library reports a broken tokenizer with whatever its many tokenizer classes raise.
    except Exception as error:
        why = str(error).partition("\n")[0].rstrip(": ")
        raise BadModel(f"{path} has no tokenizer that can be loaded ({why}): put the model's own there") from error
    # Without files the library makes up a tokenizer without words.
    if not tokenizer("0")["input_ids"]:
        raise BadModel(f"{path} has no tokenizer: put the model's own there, beside its weights")
    return tokenizer


def _model_problems(config: RunConfig) -> Iterator[str]:
    for option in ("path", "ref_path", "teacher_path", "critic_path"):
        path = getattr(config.model, option)
        if path is None:
            continue
        try:
            context = context_length(check_model_folder(path))
        except BadModel as error:
            yield f"model.{option}: {error}"
        else:
            yield from _length_problems(config, path, context)


def _teacher_problems(student: str, teacher: str) -> Iterator[str]:
    """A teacher is given the student's token ids, so they must mean the same to it."""
    try:
        same = load_tokenizer(student).get_vocab() == load_tokenizer(teacher).get_vocab()
    except BadModel as error:
        yield f"model.teacher_path: {error}"
        return
    known, sampled = (check_model_folder(path).get_text_config().vocab_size for path in (teacher, student))
    if not same or known < sampled:
        why = f"knows {known} token ids, and {sampled} are sampled" if same else "has another tokenizer"
        yield f"model.teacher_path: the model in {teacher} {why}: distil from a teacher of the same vocabulary"


def _length_problems(config: RunConfig, path: str, context: int) -> Iterator[str]:
    rollout = config.rollout
    response, prompt = rollout.rollout_max_response_len, rollout.rollout_max_prompt_len
    holds = f"the context of the model in {path} holds {context} tokens"
    if response >= context:
        yield f"rollout.rollout_max_response_len is {response}, which leaves no room for a prompt: {holds}"
    elif prompt is not None and prompt + response > context:
        yield (
            f"rollout.rollout_max_prompt_len + rollout.rollout_max_response_len = {prompt} + {response} = "
            f"{prompt + response}, but {holds}; lower one of them"
        )
    for index, benchmark in enumerate(config.eval.benchmarks):
        if benchmark.max_response_len >= context:
            yield (
                f"eval.benchmarks.{index}.max_response_len is {benchmark.max_response_len}, which leaves no room for "
                f"a prompt: {holds}"
            )


def _server_problems(config: RunConfig, began: int) -> Iterator[str]:
    rollout, kind = config.rollout, kind_of(config.rollout.engine)
    for option in ("sglang", "router", "server_groups", "external_urls"):
        if option not in kind.options and getattr(rollout, option):
            yield f"rollout.{option} is set, but rollout.engine is {rollout.engine}, which does not read it"
    yield from kind.problems(config, untold(rollout, began) is None)


def _plugin_problems(config: RunConfig) -> Iterator[str]:
    for option, kind in OPTIONS.items():
        for place, name in named(config, option).items():
            try:
                function = kind.load(name)
            except BadPlugin as error:
                yield f"{place}: {error}"
            else:
                yield from _unknown_reads(config, place, name, declared(function).reads)
    yield from _teacher_that_is_missing(config)
    if config.reward.custom_rm_path is None:
        try:
            get_grader(config.reward)
        except BadPlugin as error:
            yield f"reward: {error}"
    for index, benchmark in enumerate(config.eval.benchmarks):
        if benchmark.rm_type is not None:
            try:
                get_grader(config.reward.model_copy(update={"rm_type": benchmark.rm_type, "custom_rm_path": None}))
            except BadPlugin as error:
                yield f"eval.benchmarks.{index}: {error}"


def _unknown_reads(config: RunConfig, place: str, name: str, reads: Collection[str]) -> Iterator[str]:
    section = place.rpartition(".")[0]
    options = type(getattr(config, section)).model_fields if reads else {}
    for option in sorted(set(reads) - set(options)):
        near = get_close_matches(option, options, 1)
        meant = f": did you mean {near[0]}?" if near else ": correct it"
        yield f"{place}: {name!r} reads {option!r}, which is no option of {section}{meant}"


def _teacher_that_is_missing(config: RunConfig) -> Iterator[str]:
    if config.model.teacher_path is not None or not config.algorithm.names_user_code:
        return
    try:
        needs = advantage_needs(config.algorithm) | loss_needs(config.algorithm)
    except BadPlugin:  # told where it is named
        return
    if "teacher_log_probs" in needs:
        why = needs["teacher_log_probs"]
        yield f"algorithm.{why} needs the log-probs of a teacher: set model.teacher_path to its folder"
