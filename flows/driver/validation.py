"""Checks of a configuration before anything starts: model folder, tokenizer, lengths, plug-ins, data.

They need no GPU and no cluster, and load no weights.
"""

import netrc
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from cairn.configs.errors import BadData, BadPrompt
from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.operations import TrackingConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.requirements import placement_problems, weight_problems
from cairn.engines.models.configs import context_length, sees_images
from cairn.engines.models.folders import check_model_folder, end_tokens
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.engines.processes.libraries import problems as variable_problems
from cairn.engines.rollout.plan import kind_of
from cairn.engines.training.options import problems as training_problems
from cairn.engines.types.errors import BadModel
from cairn.flows.driver.portable import (
    Note,
    grader_problems,
    ignore,
    plugin_problems,
    unread_grader_options,
    unread_server_options,
)
from cairn.tasks.data.demonstrations import DemonstrationData
from cairn.tasks.data.drawing import MixedData
from cairn.tasks.data.opening import open_data, template_tools
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.stream import StatefulPrompts
from cairn.tasks.grading.graders import row_check

_MOST_RENDERED = 1000
"""Number of training rows that a validation renders at most."""


def setup_problems(config: RunConfig, note: Note = ignore) -> list[str]:
    """Return sentences on problems with the model folders, the lengths against the context, and user code. Reads no
    data. `note` is called with a sentence on each option without effect."""
    problems = [*_model_problems(config), *plugin_problems(config), *kind_of(config.rollout.engine).problems(config)]
    for sentence in (*unread_server_options(config), *unread_grader_options(config)):
        note(sentence)
    problems += _image_problems(config)
    readable = [path for path in config.model.folders.values() if _is_readable(path)]
    problems += grader_problems(config, note)
    if config.model.path in readable:
        problems += [*_stop_token_problems(config), *_top_k_problems(config)]
    problems += [*placement_problems(config), *weight_problems(config), *tracking_problems(config.tracking)]
    problems += variable_problems(config.rollout, config.training)
    for path in readable:
        problems += training_problems(config.training, path)
    if config.training.lora.r and not problems:
        from cairn.engines.training.torch.lora import lora_problems  # imports peft, which only those runs need

        problems += lora_problems(config.training.lora, config.model.path)
    if (config.training.only_train_params_name_list or config.training.freeze_params_name_list) and not problems:
        # Imports the library's models, on either engine.
        if config.training.engine == "megatron":
            from cairn.engines.training.megatron.freezing import freezing_problems
        else:
            from cairn.engines.training.freezing import freezing_problems

        problems += freezing_problems(config.training, config.model.path)
    if config.algorithm.use_rollout_routing_replay and not problems:
        from cairn.engines.models.routing import replay_problems  # builds the library's model, without weights

        problems += replay_problems(config.model.path, config.training.megatron)
    if (rate := config.training.moe_router_bias_update_rate) and not problems:
        from cairn.engines.models.routing import bias_problems  # builds it too

        problems += bias_problems(config.model.path, rate)
    if config.model.path in readable:
        try:
            tokenizer = load_tokenizer(config.model.path)
            problems += [*_end_problems(config, tokenizer), *_tool_call_problems(config, tokenizer)]
        except BadModel as error:
            problems.append(f"model.path: {error}")
    if not problems:
        for option, path in _models(config).items():
            if path != config.model.path:
                problems += _vocabulary_problems(option, config.model.path, path)
    return list(dict.fromkeys(problems))


def data_problems(config: RunConfig, note: Note = ignore) -> list[str]:
    """Return sentences on problems with the data files. Reads every row, and renders at most 1000 training rows. Files
    at other URLs are only opened by the run.

    `note` is called with a sentence about training rows that a run passes over. Raises BadModel where the tokenizer
    that prompts need cannot be loaded.
    """
    tokenizer = load_tokenizer(config.model.path)

    def open_benchmark(benchmark: BenchmarkConfig) -> None:
        check = row_check(config.reward.of(benchmark.rm_type))
        PromptData.open(benchmark, benchmark.path, tokenizer, check, template_tools(config.rollout)).require_all()

    def open_training() -> None:
        data = open_data(config, tokenizer, row_check(config.reward))
        if not isinstance(data, StatefulPrompts):
            _render_some(data, longest_prompt(config) if config.samples_responses else None, note)

    sources: dict[str, tuple[str, Callable[[], object]]] = {"data": (" ".join(config.data.paths), open_training)}
    for index, benchmark in enumerate(config.eval.benchmarks):
        sources[f"eval.benchmarks.{index}"] = benchmark.path, partial(open_benchmark, benchmark)
    problems = []
    for section, (path, opened) in sources.items():
        if "://" not in path:
            try:
                opened()
            except BadData as error:
                problems.append(f"{section}: {error}")
    return problems


def longest_prompt(config: RunConfig) -> int:
    """Return the longest prompt, in tokens, that a run draws: by default it leaves room in the context for the longest
    response."""
    room = context_length(check_model_folder(config.model.path)) - config.rollout.rollout_max_response_len
    return config.rollout.rollout_max_prompt_len or room


def _render_some(data: PromptData | MixedData | DemonstrationData, longest: int | None, note: Note) -> None:
    """Render at most `_MOST_RENDERED` rows, evenly spaced. Raises BadData where no row yields a prompt of at most
    `longest` tokens, or a row would end the run."""
    count = min(len(data), _MOST_RENDERED)
    refused = []
    for number in range(count):
        try:
            row = data.row(number * len(data) // count)
            if longest is not None and len(row.prompt_ids) > longest:
                refused.append(
                    f"{len(row.prompt_ids)} tokens, where {longest} are allowed: raise rollout_max_prompt_len, lower "
                    "rollout_max_response_len, or use a model with a longer context"
                )
        except BadPrompt as error:
            refused.append(str(error))
    if len(refused) == count:
        raise BadData(f"none of {count} rows gives a prompt; the first: {refused[0]}")
    if refused:
        note(f"data: {len(refused)} of {count} rows give no prompt, and a run skips them; the first: {refused[0]}")


def _models(config: RunConfig) -> dict[str, str]:
    """Return the folders of all models that are given tokens of the policy, by option."""
    names = ("path", "ref_path", "teacher_path", "critic_path")
    folders = {f"model.{name}": getattr(config.model, name) for name in names}
    folders["rollout.model_path"] = config.rollout.model_path
    return {option: path for option, path in folders.items() if path is not None}


def _model_problems(config: RunConfig) -> Iterator[str]:
    for option, path in _models(config).items():
        try:
            model = check_model_folder(path)
            context = context_length(model)
            if sees_images(model):
                from cairn.engines.models.vision import image_processor  # slow, and few models need it

                image_processor(path)
            elif config.data.has_images:
                yield (
                    f"{option}: the model in {path} ({model.model_type}) sees no images, but multimodal_keys "
                    "names some: leave it out, or use a model with image input"
                )
        except BadModel as error:
            yield f"{option}: {error}"
        else:
            yield from _length_problems(config, path, context)


def _is_readable(path: str) -> bool:
    """Whether a model folder can be read; `_model_problems` reports the reason where it cannot."""
    try:
        check_model_folder(path)
    except BadModel:
        return False
    return True


def _vocabulary_size(path: str) -> int:
    size: int = check_model_folder(path).get_text_config().vocab_size
    return size


def _stop_token_problems(config: RunConfig) -> Iterator[str]:
    """Report stop token ids outside the vocabulary: negative ids would index the last tokens, larger ones no token.
    Runs that were created with such ids can still resume."""
    ids = config.rollout.rollout_stop_token_ids
    size = _vocabulary_size(config.model.path) if ids else 0
    for id in ids:
        if not 0 <= id < size:
            yield (
                f"rollout.rollout_stop_token_ids has {id}, which is not a token of the model in {config.model.path}: "
                f"its ids are 0 to {size - 1}"
            )


def _end_problems(config: RunConfig, tokenizer: Any) -> Iterator[str]:
    """Report an end token that no engine stops at. Runs that were created so can still resume: their responses end
    where they ended."""
    rollout, path = config.rollout, config.model.path
    why = unstopped_end(tokenizer, path, rollout.rollout_stop_token_ids, rollout.rollout_stop)
    if why is not None and config.needs_rollout_engines:
        yield f"model.path: {why}, or set rollout.rollout_stop_token_ids=[{tokenizer.eos_token_id}]"


def unstopped_end(
    tokenizer: Any, folder: str, stop_token_ids: Collection[int] = (), stop: Sequence[str] = ()
) -> str | None:
    """Return why responses would not end at the tokenizer's end token, and what to do; None where they do, or it has
    none.

    Engines end responses at the tokens that the model's configs name. A server of SGLang that has a tokenizer, as slime
    starts it, also ends them at the tokenizer's end token.
    """
    own, ends = tokenizer.eos_token_id, end_tokens(folder)
    if own is None or own in ends | {*stop_token_ids} or any(one in tokenizer.eos_token for one in stop):
        return None
    named = " and ".join(map(str, sorted(ends))) or "none"
    return (
        f"the tokenizer in {folder} ends responses with {tokenizer.eos_token} ({own}), but config.json and "
        f"generation_config.json there name {named} as eos_token_id, so no engine would stop at it: add {own} to "
        "eos_token_id in generation_config.json"
    )


def _top_k_problems(config: RunConfig) -> Iterator[str]:
    path, top_k = config.model.path, config.algorithm.distillation_topk
    if config.algorithm.learns_from_top_k and top_k > (size := _vocabulary_size(path)):
        yield f"algorithm.distillation_topk is {top_k}, but the model in {path} has {size} tokens: lower it"


def _image_problems(config: RunConfig) -> Iterator[str]:
    if config.data.has_images and config.model.teacher_url is not None:
        yield (
            f"model.teacher_url: the server at {config.model.teacher_url} scores only text, but multimodal_keys names "
            "images: set model.teacher_path instead"
        )
    if config.data.has_images and config.training.packs_rows:
        packs = "sequence_packing" if config.training.sequence_packing else "context_parallel_size"
        yield f"training.{packs} packs samples, but multimodal_keys names images, which packed rows lack: leave it out"


def _tool_call_problems(config: RunConfig, tokenizer: Any) -> Iterator[str]:
    """Report unreadable tool calls: such a call would end its episode as if the model had called no tool."""
    if (config.rollout.custom_generate_function_path, config.rollout.tool_call_format) == ("tool_calls", "template"):
        from cairn.engines.agents.generation.call_formats import unreadable_calls

        why = unreadable_calls(tokenizer)
        if why is not None:
            yield f"rollout.tool_call_format: the model in {config.model.path} cannot call tools, since {why}"


def _vocabulary_problems(option: str, policy: str, other: str) -> Iterator[str]:
    """Report a vocabulary that differs from the policy's: a reference, a teacher, a critic and servers receive
    the policy's token ids, so these must mean the same to them."""
    try:
        same = load_tokenizer(policy).get_vocab() == load_tokenizer(other).get_vocab()
    except BadModel as error:
        yield f"{option}: {error}"
        return
    known, sampled = map(_vocabulary_size, (other, policy))
    if not same or known < sampled:
        why = f"has {known} token ids, but {sampled} are sampled" if same else "has another tokenizer"
        yield f"{option}: the model in {other} {why}: use a model with the policy's vocabulary"


def _length_problems(config: RunConfig, path: str, context: int) -> Iterator[str]:
    rollout = config.rollout
    response, prompt = rollout.rollout_max_response_len, rollout.rollout_max_prompt_len
    holds = f"the context of the model in {path} has {context} tokens"
    if config.data.max_length is not None and config.data.max_length > context:
        yield f"data.max_length is {config.data.max_length}, but {holds}; lower it"
    if response >= context:
        yield f"rollout.rollout_max_response_len is {response}, which leaves no room for a prompt: {holds}; lower it"
    elif prompt is not None and prompt + response > context:
        yield (
            f"rollout.rollout_max_prompt_len + rollout.rollout_max_response_len = {prompt} + {response} = "
            f"{prompt + response}, but {holds}; lower one of them"
        )
    for index, benchmark in enumerate(config.eval.benchmarks):
        if benchmark.max_response_len >= context:
            yield (
                f"eval.benchmarks.{index}.max_response_len is {benchmark.max_response_len}, which leaves no room for "
                f"a prompt: {holds}; lower it"
            )


def tracking_problems(config: TrackingConfig) -> Iterator[str]:
    """Return sentences on configured trackers that cannot work."""
    for option, module in (("use_wandb", "wandb"), ("use_mlflow", "mlflow")):
        if getattr(config, option) and find_spec(module) is None:
            yield (
                f"tracking.{option} needs the extra {module}, which is not installed: "
                f"pip install 'cairn-rl[{module}]', or leave the option out"
            )
    if config.use_wandb and config.wandb_mode == "online" and not _has_wandb_key(config.wandb_host):
        yield (
            "tracking.use_wandb needs a key, but none is available: set WANDB_API_KEY, log in with `wandb login`, or "
            "set tracking.wandb_mode to offline"
        )


def _has_wandb_key(host: str | None) -> bool:
    """Whether W&B would find a key, by its own search order. Without a key, W&B would prompt at the terminal."""
    if any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))):
        return True
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return known.authenticators(urlsplit(host or "https://api.wandb.ai").hostname or "") is not None
