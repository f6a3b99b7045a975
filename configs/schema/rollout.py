"""Options of generation and of the selection of groups."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, field_validator

from cairn.configs.schema.base import (
    Code,
    DataPath,
    EngineOptions,
    FromStore,
    ModelFolder,
    Section,
    ServerUrl,
    Text,
    Variables,
    rule,
)
from cairn.configs.schema.effect import ALWAYS, SAMPLED, When, read, spelled, when

# Rollout servers of several kinds, as in slime's `--sglang-config`.


class ServerGroup(Section):
    """Group of rollout servers of one kind."""

    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    """Work of the servers: everything, or only one side of prefill/decode disaggregation, which needs both sides."""

    num_engines: int | None = Field(None, ge=1)
    """Engines of the group; null computes `num_gpus` / `num_gpus_per_engine`."""

    num_gpus: int | None = Field(None, ge=1)
    """GPUs of the group, in place of `num_engines`."""

    num_gpus_per_engine: float | None = Field(None, ge=0)
    """GPUs of each engine of the group; null takes `rollout.num_gpus_per_engine`."""

    overrides: EngineOptions = Field(default_factory=dict)
    """Options of the group's servers, by SGLang's names. They override those of `rollout.sglang`."""

    @rule
    def _has_one_size(self) -> None:
        if (self.num_engines is None) == (self.num_gpus is None):
            raise ValueError("a server group has either num_engines or num_gpus: give one of them")

    def count(self, num_gpus_per_engine: float) -> int:
        """Return the number of engines of the group.

        Args:
            num_gpus_per_engine: GPUs of an engine where the group itself does not set them.

        Raises:
            ValueError: the group's GPUs are no multiple of an engine's.
        """
        each = self.num_gpus_per_engine if self.num_gpus_per_engine is not None else num_gpus_per_engine
        if self.num_gpus is None:
            assert self.num_engines is not None
            return self.num_engines
        if not each or self.num_gpus % each:
            raise ValueError(
                f"a server group of {self.num_gpus} GPUs cannot be cut into engines of {each:g} each: change num_gpus "
                "or num_gpus_per_engine"
            )
        return int(self.num_gpus / each)


# Options of the built-in tools, `rollout.tool_options`. Tools of the user bring their own, see docs/agents.md.


class SandboxedTool(Section):
    """A tool that runs the policy's programs, each in a sandbox of bubblewrap."""

    bwrap: str = "bwrap"
    """The program `bwrap`: a name on PATH, or its path."""

    timeout: float = Field(10.0, gt=0)
    """Seconds of wall-clock time that a program may take."""

    cpu_time: int = Field(10, ge=1)
    """Seconds of CPU time of each process of a program."""

    memory: int = Field(512 * 1024**2, ge=2**26)
    """Bytes of address space of each process, and of memory of all of them together."""

    processes: int = Field(64, ge=1)
    """Number of processes and threads that a program may have."""

    file_size: int = Field(16 * 1024**2, ge=4096)
    """Size limit in bytes of one file, of the scratch folder, of /dev/shm, and of the output of a program."""

    max_output: int = Field(16_384, ge=1)
    """Characters of a program's output that the model gets."""

    num_workers: int = Field(4, ge=1)
    """Number of programs that run concurrently for each rollout engine. Time that further programs wait counts for no
    limit."""


_TOOLS = when("rollout.tools", remedy="name the tools in rollout.tools")


class PythonTool(SandboxedTool):
    """`python`: runs a Python program and returns its output."""

    python: str | None = None
    """Path of the interpreter; by default the one that runs Cairn. Programs can import its standard library, but no
    installed package."""


class SearchTool(Section):
    """`search`: returns passages of a corpus that match a query, by BM25."""

    corpus: DataPath | None = Field(None, min_length=1)
    """JSONL or Parquet file with one passage per row; required where the tool is named."""

    text_key: Text = "text"
    """Column with the passage."""

    title_key: Text | None = None
    """Column with the passage's title, which is also searched and shown."""

    k: int = Field(3, ge=1, le=100)
    """Passages that are returned."""

    max_output: int = Field(16_384, ge=1)
    """Characters of the result that the model gets."""

    timeout: float = Field(30.0, gt=0)
    """Seconds that a search may take, not counting the first reading of the corpus."""


class ToolOptions(Section):
    """Options of the built-in tools that `rollout.tools` names, and permissions of your own tools."""

    network: bool = False
    """Whether tools of your own that run in their own processes may use a network. Those are plain functions of
    modules. Other tools run in the process of `generate` and have its network."""

    python: Annotated[PythonTool, _TOOLS] = PythonTool()
    """Options of the tool `python`."""

    shell: Annotated[SandboxedTool, _TOOLS] = SandboxedTool()
    """Options of the tool `shell`."""

    search: Annotated[SearchTool, _TOOLS] = SearchTool()
    """Options of the tool `search`."""


_STREAMING = when("rollout.pipeline", "streaming")
_IN_ROUNDS = when(
    "rollout.pipeline",
    "sync",
    "lagged",
    because="rollout.pipeline is streaming, which takes groups as they complete",
    remedy="set rollout.pipeline=lagged",
)
_SURPLUS = when(
    "rollout.draws_surplus",
    because="rollout.over_sampling_batch_size is not above rollout.rollout_batch_size, so that a batch takes all "
    "groups",
    remedy="raise rollout.over_sampling_batch_size",
)
_CHOSEN = When(
    lambda run: run.rollout.buffer_filter_path not in ("youngest_first", "oldest_first"),
    lambda run: f"rollout.buffer_filter_path is {run.rollout.buffer_filter_path}",
    "set rollout.buffer_filter_path=priority or stratified",
)
_OWN_SERVERS = When(
    lambda run: not run.rollout.external_urls,
    lambda run: "rollout.external_urls names servers that run elsewhere",
    "set its options where these servers start",
)
_GROWS_OLD = When(
    lambda run: run.rollout.draws_surplus or run.rollout.oldest_trained <= run.rollout.weights_lag,
    lambda run: (
        f"rollout.over_sampling_batch_size ({spelled(run.rollout.over_sampling_batch_size)}) is not above "
        f"rollout.rollout_batch_size ({run.rollout.rollout_batch_size}), so that no group is left over to grow old"
    ),
    "raise rollout.over_sampling_batch_size",
)
_SHORTENS = When(
    lambda run: (run.rollout.async_buffer_size or 0) <= run.rollout.weights_lag * run.rollout.rollout_batch_size,
    lambda run: (
        f"rollout.max_age × rollout_batch_size is {run.rollout.weights_lag} × {run.rollout.rollout_batch_size}, the "
        "most groups that can wait"
    ),
    "lower it or raise rollout.max_age",
)
_TOOL_CALLS = when("rollout.custom_generate_function_path", "tool_calls")
_CALLING_USERS = (
    *("rollout.custom_generate_function_path", "rollout.dynamic_sampling_filter", "rollout.rollout_sample_filter_path"),
    *("rollout.buffer_filter_path", "reward.custom_rm_path", "data.get_samples_path"),
)
_OF_USERS = When(
    lambda run: any("." in (read(run, option) or "") for option in _CALLING_USERS),
    lambda run: "no function of yours generates, grades or filters samples",
    "set rollout.custom_generate_function_path or reward.custom_rm_path",
)
_CALLED = When(
    lambda run: run.rollout.custom_generate_function_path != "single_turn",
    lambda run: "rollout.custom_generate_function_path is single_turn",
    "set it to tool_calls, or to a function of yours that calls them",
)

MOST_ITERATIONS = 1_000_000
"""Largest number of iterations of a run; the last one has the number `cairn.storage.ledger.layout.LAST_NUMBER`."""


def lag_of(pipeline: str, lag: int | None, max_age: int | None) -> int:
    """Return the number of iterations that may be open besides the newest.

    This is 0 in the `sync` pipeline, the lag in the `lagged` one, and the greatest age in the `streaming` one, with
    their defaults filled in.
    """
    if pipeline == "streaming":
        return max_age or 1
    return (lag or 1) if pipeline == "lagged" else 0


RolloutEngine = Literal["transformers", "sglang"]
"""Rollout engines, each a folder of `cairn.engines.rollout`."""


class RolloutConfig(Section):
    """Generation of samples: amounts, sampling and engines."""

    engine: RolloutEngine = "transformers"
    """The rollout engine: `transformers` samples in the actor's own process, `sglang` in a separate server."""

    model_path: ModelFolder | None = Field(None, min_length=1)
    """Folder that SGLang's servers load in place of `model.path`: the same model in FP8, or another rounding of it. The
    servers receive every version of the trainer's weights, the first included, in the format of this folder. slime:
    `--hf-checkpoint` beside `--ref-load`."""

    sglang: Annotated[EngineOptions, _OWN_SERVERS] = Field(default_factory=dict)
    """Options of `sglang.launch_server` under their own names, such as `attention_backend` or `tp_size`. slime:
    `--sglang-*`."""

    sglang_env_vars: Annotated[Variables, _OWN_SERVERS] = Field(default_factory=dict)
    """Environment variables of SGLang's servers: `{SGLANG_LOG_GC: true}`. Variables of SGLang and its kernels
    are not inherited from the machine, since they change what a server computes. docs/libraries.md has those that are
    set by default. slime: the environment of `ray job submit`."""

    router: EngineOptions | None = None
    """Options of the `sglang_router` process that routes every engine's requests, under their own names, such as
    `policy` (`cache_aware`, `round_robin`, `power_of_two`, `consistent_hashing`, …). Null starts no router, and each
    engine calls its own server. slime: `--router-*`."""

    server_groups: tuple[ServerGroup, ...] = ()
    """Groups of servers of several kinds, with `num_engines` servers in total. slime: `--sglang-config`."""

    external_urls: tuple[ServerUrl, ...] = ()
    """Servers that already run elsewhere, `http://host:port`, one for each of `num_engines`. The run never starts or
    ends them. slime: `--rollout-external-engine-addrs`."""

    num_engines: int = Field(1, ge=1)
    """Number of rollout engines. slime: `--rollout-num-gpus` / `--rollout-num-gpus-per-engine`."""

    min_num_engines: Annotated[int | None, _STREAMING] = Field(None, ge=1)
    """Streaming pipeline: number of rollout engines with which a run starts and continues. The others, up to
    `num_engines` in total, join while it runs, when the Ray cluster has room for them, and leave when their machines
    go. Null starts all `num_engines` at the beginning, and replaces a lost one before the run continues. Ray Serve:
    `min_replicas`."""

    num_gpus_per_engine: float = Field(0, ge=0)
    """GPUs reserved for each engine; 0 runs it on the CPU. slime: `--rollout-num-gpus-per-engine`."""

    num_gpus_per_node: int = Field(8, ge=1)
    """GPUs of a machine. An engine with more GPUs than this uses tensor parallelism over several machines, with an
    actor on each. slime: `--num-gpus-per-node`."""

    num_threads: int = Field(1, ge=1)
    """CPU threads of an engine. With one thread its results do not depend on the rest of the batch."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the engine's weights and activations."""

    max_running_requests: int = Field(256, ge=4)
    """Number of samples that an engine decodes concurrently. SGLang: `--max-running-requests`."""

    num_rollout: Annotated[int, ALWAYS] = Field(0, ge=1, validate_default=False)
    """Number of iterations of the run. Left out or null, it follows from `num_epoch`. slime: `--num-rollout`."""

    num_epoch: Annotated[int | None, ALWAYS] = Field(None, ge=1)
    """Number of epochs of the run, in place of `num_rollout`: the run has (rows of the data // `rollout_batch_size`) ×
    this many iterations. The configuration that the run records has both. slime: `--num-epoch`."""

    rollout_batch_size: Annotated[int, ALWAYS] = Field(ge=1)
    """Prompts trained on per iteration. slime: `--rollout-batch-size`."""

    n_samples_per_prompt: Annotated[int, SAMPLED] = Field(8, ge=1)
    """Samples per prompt, which form a group. slime: `--n-samples-per-prompt`."""

    over_sampling_batch_size: Annotated[int | None, SAMPLED, _IN_ROUNDS] = Field(None, ge=1)
    """Prompts drawn in an iteration's first round, at least `rollout_batch_size` (the default). Later rounds draw in
    proportion to the number of missing groups. slime: `--over-sampling-batch-size`."""

    pipeline: Annotated[Literal["sync", "lagged", "streaming"], SAMPLED] = "sync"
    """Overlap of generation and training. `sync`: none; each iteration uses the weights that the previous one produced.
    `lagged`: both run concurrently; each iteration is sampled with weights that are `lag` iterations older than in
    `sync`, whichever half is faster, so nothing depends on timing. `streaming`: samples are generated all the time with
    the newest weights, at most `max_age` publications ahead, and a batch consists of the groups that are complete
    first; these are recorded before training. slime: `train_async.py`, `fully_async_rollout.py`."""

    lag: Annotated[int | None, SAMPLED, when("rollout.pipeline", "lagged")] = Field(None, ge=1)
    """Lagged pipeline: number of iterations by which the weights that sample an iteration are older than the newest; 1
    by default. Needs a correction for the difference, `algorithm.use_tis` or `algorithm.use_rollout_logprobs`, or a
    loss that includes one (`dppo_tv`, `dppo_kl`)."""

    partial_rollout: Annotated[bool, SAMPLED, _IN_ROUNDS] = False
    """Abort the remaining samples once a shard has completed its share of the required groups. Their partial responses
    are retained, and the next round of rollout continues them before it draws fresh prompts. Needs
    `over_sampling_batch_size` above `rollout_batch_size`, and `max_age` above its default, so that the part before the
    abort is trained on. Without `cut_tokens`, the state at the abort depends on timing: a committed rollout stays
    unchanged, but computing it again has another result. slime: `--partial-rollout`."""

    cut_tokens: Annotated[
        int | None,
        when("rollout.partial_rollout"),
        when("rollout.custom_generate_function_path", "single_turn"),
        when(
            "rollout.cuts_responses",
            because="no response is longer than rollout.rollout_max_response_len",
            remedy="lower it",
        ),
    ] = Field(None, ge=1)
    """`partial_rollout`: number of response tokens by which a shard continues each open sample in a round. It ends
    after the round in which its share of the required groups is complete. The retained parts then do not depend on
    timing: with a batch-invariant engine a rollout that is computed again, after any kill, is equal bit for bit. Each
    round starts with a prefill of its samples, so a small number costs time. Null aborts the others as soon as the
    share is complete."""

    mask_offpolicy_in_partial_rollout: Annotated[bool, when("rollout.partial_rollout")] = False
    """In a group that was continued, train only on tokens of the weights that finished it, even if `max_age` allows
    older ones. The weight of each such token is the same as if all were trained on. slime:
    `--mask-offpolicy-in-partial-rollout`."""

    max_age: Annotated[int | None, SAMPLED, _GROWS_OLD] = Field(None, ge=0)
    """Largest age of tokens that are trained on, in publications: iterations between the weights that sampled a token
    and those that are trained. The default is 1 in the `streaming` pipeline, which starts samples only as fast as that
    allows, and in the others the lag of the rollout, which is 0 in `sync`; groups left over from over-sampling are then
    dropped. A larger value carries surplus groups over until they are too old, and needs a correction as `lag` does."""

    async_buffer_size: Annotated[int | None, SAMPLED, _STREAMING, _SHORTENS] = Field(None, ge=1)
    """Streaming pipeline: number of complete groups that may wait for training before the run stops accepting more
    prompts, by default those of one batch. A smaller number makes samples younger; a larger one lets training wait less
    for long responses; `max_age` is a limit in any case. As long as training does not have to wait, the run accepts
    only the prompts of the next batch."""

    update_weights_interval: Annotated[int, SAMPLED, _STREAMING] = Field(1, ge=1)
    """Streaming pipeline: number of iterations after which engines take new weights, at most `max_age`. slime:
    `--update-weights-interval`."""

    staleness_policy: Annotated[Code, SAMPLED, _STREAMING] = "mask"
    """Streaming pipeline: handling of a group with tokens older than `max_age`, because it took longer than `timeout`.
    `mask`: leave these tokens out of the loss. `drop`: replace the group. `decay`: multiply their advantages by 1 / (1
    + age - max_age). Or a function of your own, `package.module.function` or `file.py:function`, see
    docs/plugins.md."""

    buffer_filter_path: Annotated[Code, SAMPLED, _SURPLUS] = "youngest_first"
    """Order in which groups are used where a batch has room for only some of them, and in which unfinished groups
    continue: `youngest_first`, `oldest_first`, `priority`, `stratified`, or a function of your own,
    `package.module.function` or `file.py:function`, see docs/plugins.md. slime: `--buffer-filter-path`."""

    buffer_key: Annotated[Text | None, SAMPLED, _CHOSEN] = None
    """Key of the data rows' metadata. `priority` takes groups by the number under it, the highest first; without this
    key it uses the filter's priority or else the standard deviation of the rewards. `stratified` takes groups with
    different values under it in turn."""

    custom_generate_function_path: Code = "single_turn"
    """Generation of a sample. `single_turn`: one response to the prompt. `tool_calls`: the model may call
    `rollout.tools` and continue with their results. Or a coroutine function of your own, by import path
    (`package.module.function`) or file (`turns.py:generate`), which may call the policy several times, see
    docs/plugins.md. slime: `--custom-generate-function-path`."""

    tools: Annotated[tuple[Code, ...], _CALLED] = ()
    """Tools that episodes may call with `ctx.call`, and that `tool_calls` offers to the model: `calculator`, `python`,
    `search`, `shell`, or a `cairn.Tool` of your own, `package.module.tool` or `file.py:tool`, see docs/agents.md."""

    tool_options: ToolOptions = ToolOptions()
    """Options of the built-in tools."""

    tool_call_format: Literal["template", "tags"] = "template"
    """Format of tool calls in `tool_calls`. `template`: the format of the model's chat template, which gets the tools.
    `tags`: `<search>text</search>`, with the result as `<result>…</result>`, for models without such a template."""

    max_turns: Annotated[int, _TOOL_CALLS | _OF_USERS] = Field(16, ge=1)
    """Largest number of responses of the policy in an episode of `tool_calls`; an episode that calls tools in its last
    response is truncated. Functions written for slime read it as `args.max_turns`."""

    rollout_max_context_len: Annotated[int | None, _TOOL_CALLS | _OF_USERS] = Field(None, ge=2)
    """Longest episode of `tool_calls` in tokens, prompt and responses together; a longer one is truncated. By default
    the model's context length. slime: `--rollout-max-context-len`."""

    custom_config: Annotated[dict[str, Any], FromStore.WORDS, _OF_USERS] = Field(default_factory=dict)
    """Attributes of `args` for functions written for slime, besides those of slime's flags, see
    docs/coming-from-slime.md. slime: `--custom-config-path`, whose file has them."""

    num_episode_workers: int = Field(1, ge=1)
    """Number of workers of each engine that run a coroutine function of your own, next to the engine or on other
    machines, see docs/agents.md. Each runs its share of the engine's samples, thousands of them concurrently."""

    num_data_workers: Annotated[int, SAMPLED] = Field(0, ge=0)
    """Threads that read, render and tokenize the prompts of the next round while the engines generate. The prompts and
    their order are the same with any number; 0 makes them when they are drawn."""

    max_tokens_in_flight: int | None = Field(None, ge=1)
    """Largest number of tokens that samples may have in flight on an engine. Each request counts with its prompt and
    its longest possible response. The others wait, each sample for its turn. Null sets no limit besides the engine's
    own."""

    custom_generate_timeout: float = Field(600, gt=0)
    """Seconds that a function of your own may spend on a sample without calling the engine; then the sample fails."""

    episode_timeout: float | None = Field(None, gt=0)
    """Seconds that a function of your own may take for a sample in total, including its waits for the engine; then the
    sample fails. Null sets no limit besides `timeout`."""

    dynamic_sampling_filter: Annotated[Code | None, SAMPLED] = None
    """Filter of groups: `check_reward_nonzero_std`, `check_reward_nonzero_std_with_fallback`, or a function by import
    path (`package.module.function`) or file (`filters.py:function`). Null accepts every group without a failed sample.
    slime: `--dynamic-sampling-filter-path`."""

    rollout_sample_filter_path: Annotated[Code | None, SAMPLED] = None
    """Filter of samples that are not trained on, though their rewards count in the baselines of their groups:
    `truncated`, or a function of your own, `package.module.function` or `file.py:function`, see docs/plugins.md. slime:
    `--rollout-sample-filter-path`."""

    max_refill_rounds: Annotated[int, SAMPLED] = Field(16, ge=1)
    """Number of rounds of rollout that an iteration may take to fill its batch. After them it fails with the reasons of
    the filter."""

    shards_per_round: Annotated[int | None, SAMPLED, _IN_ROUNDS] = Field(None, ge=1)
    """Number of shards of a round, each of which is a task with its own commit; one per engine by default."""

    rollout_max_prompt_len: Annotated[int | None, SAMPLED] = Field(None, ge=1)
    """Longest prompt in tokens; longer ones are skipped. By default the model's context minus the longest response.
    slime: `--rollout-max-prompt-len`."""

    rollout_max_response_len: Annotated[int, SAMPLED] = Field(0, ge=0)
    """Longest response in tokens; required wherever responses are sampled. slime: `--rollout-max-response-len`."""

    rollout_temperature: Annotated[float, SAMPLED] = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same number. slime: `--rollout-temperature`."""

    rollout_top_p: Annotated[float, SAMPLED] = Field(1.0, gt=0, le=1)
    """Probability mass of nucleus sampling: tokens are drawn from the smallest set of most probable tokens with this
    mass. slime: `--rollout-top-p`."""

    rollout_top_k: Annotated[int, SAMPLED] = Field(-1, ge=-1)
    """Number of most probable tokens to sample from; -1 allows all. slime: `--rollout-top-k`."""

    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response besides the model's own end tokens. slime: `--rollout-stop-token-ids`."""

    rollout_stop: tuple[Text, ...] = ()
    """Strings that end a response as soon as its text, including special tokens, contains one. The token that completes
    the string is the last. A run's strings also end the responses of its benchmarks. slime: `--rollout-stop`."""

    sglang_server_concurrency: int = Field(512, ge=1)
    """Number of concurrent requests to an SGLang engine; further samples wait in the client. slime:
    `--sglang-server-concurrency`."""

    timeout: float = Field(1800, gt=0)
    """Seconds that one shard may take before it counts as hung. In the streaming pipeline: seconds that an engine may
    run without completing a sample or taking further samples or new weights, and seconds that a batch waits for a group
    that would be too old for the next one."""

    rollout_health_check_interval: float = Field(5, gt=0)
    """Seconds between two health checks of an SGLang server or of the router. slime:
    `--rollout-health-check-interval`."""

    rollout_health_check_timeout: float = Field(30, gt=0)
    """Seconds without a response after which a server or router is ended and replaced, or three times the 99th
    percentile of its response times if that is longer. slime: `--rollout-health-check-timeout`."""

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary only."""
        return self.rollout_top_p < 1 or self.rollout_top_k > 0

    rollout_health_check_first_wait: float = Field(0, ge=0)
    """Seconds after the start of an SGLang server in which failed health checks do not count: a server that compiles
    kernels for its first batches, such as DeepGEMM's, does not respond meanwhile. On GPUs, 0 stands for 300. slime:
    `--rollout-health-check-first-wait`."""

    @field_validator("num_rollout", mode="wrap")
    @classmethod
    def _null_leaves_the_length_to_the_epochs(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        return 0 if value is None else validate(value)

    @rule
    def _has_a_length(self) -> None:
        if self.num_rollout == 0 and self.num_epoch is None:
            raise ValueError("num_rollout is required and missing: Iterations of the run; or give num_epoch")

    @rule
    def _iterations_can_be_numbered(self) -> None:
        if self.num_rollout > MOST_ITERATIONS:
            raise ValueError(
                f"num_rollout ({self.num_rollout}) is above {MOST_ITERATIONS}, the most iterations that a ledger can "
                "number"
            )

    @rule
    def _something_can_be_drawn(self) -> None:
        if self.rollout_top_k == 0:
            raise ValueError("rollout_top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens")
        if self.rollout_top_k == 1:
            raise ValueError(
                "rollout_top_k is 1, which leaves one token to draw: nothing can be learned from a choice without an "
                "alternative; set it to 2 or more, or to -1 to keep all tokens"
            )

    @rule
    def _responses_may_begin(self) -> None:
        if not all(self.rollout_stop):
            raise ValueError("rollout_stop has an empty string, which every text contains: leave it out")

    @rule
    def _tools_are_called(self) -> None:
        if self.custom_generate_function_path == "tool_calls" and not self.tools:
            raise ValueError(
                "custom_generate_function_path is tool_calls, but tools names none: name those it may call"
            )

    @rule
    def _parts_are_made_and_continued(self) -> None:
        if self.partial_rollout and self.pipeline != "streaming" and not self.draws_surplus:
            raise ValueError(
                f"partial_rollout is true but over_sampling_batch_size ({self.over_sampling_batch_size}) is not above "
                f"rollout_batch_size ({self.rollout_batch_size}): nothing would be left to abort"
            )

    @rule
    def _a_stream_takes_groups_as_they_come(self) -> None:
        if self.pipeline != "streaming":
            return
        if self.max_age == 0:
            raise ValueError(
                "max_age is 0 and pipeline is streaming, which generates while it trains: set max_age to 1 or more, or "
                "pipeline to sync"
            )
        interval = self.update_weights_interval
        if interval > self.weights_lag:
            raise ValueError(
                f"update_weights_interval ({interval}) is above max_age ({self.weights_lag}): the tokens of an engine "
                "would be too old before it gets new weights; raise max_age, or lower update_weights_interval"
            )
        if self.router is not None:
            raise ValueError(
                "pipeline is streaming, which updates engines one after the other, but router sends requests to "
                "all of them: leave router out, or set pipeline to lagged or sync"
            )

    @rule
    def _engines_join_and_leave_where_they_can(self) -> None:
        least = self.min_num_engines
        if least is None or self.pipeline != "streaming":
            return
        if least > self.num_engines:
            raise ValueError(f"min_num_engines ({least}) is above num_engines ({self.num_engines}): raise num_engines")
        if self.external_urls:
            raise ValueError(
                "min_num_engines is for engines that a run places itself, but external_urls run elsewhere: leave one "
                "of them out"
            )
        if self.custom_generate_function_path != "single_turn":
            raise ValueError(
                f"min_num_engines releases machines, but custom_generate_function_path is "
                f"{self.custom_generate_function_path}, whose episodes run in a fixed number of workers on them: leave "
                "min_num_engines out"
            )

    @rule
    def _there_are_older_tokens(self) -> None:
        if self.oldest_trained < self.weights_lag:
            raise ValueError(
                f"max_age ({self.max_age}) is below the lag ({self.weights_lag}): no token would be young enough to be "
                "trained on; raise it, or leave it out"
            )
        lag = self.weights_lag
        if self.partial_rollout and self.oldest_trained == lag:
            raise ValueError(
                f"partial_rollout is true and max_age is {lag}: only the end of a continued response would be "
                f"trained on; set max_age to {lag + 1} or more, with algorithm.use_tis=true or "
                "algorithm.use_rollout_logprobs=true"
            )

    @rule
    def _the_buffer_has_a_choice(self) -> None:
        if self.buffer_filter_path == "stratified" and self.buffer_key is None:
            raise ValueError(
                "buffer_filter_path is stratified, which needs buffer_key: the metadata key whose values alternate"
            )

    @property
    def cuts_responses(self) -> bool:
        """Whether `cut_tokens` is below the longest response."""
        return self.cut_tokens is None or self.cut_tokens < self.rollout_max_response_len

    @property
    def draws_surplus(self) -> bool:
        """Whether an iteration draws more prompts than it trains on."""
        return (self.over_sampling_batch_size or 0) > self.rollout_batch_size

    @property
    def oldest_trained(self) -> int:
        """`max_age` with its default filled in."""
        return self.weights_lag if self.max_age is None else self.max_age

    @property
    def most_waiting(self) -> int:
        """`async_buffer_size` with its default filled in."""
        return self.async_buffer_size or self.rollout_batch_size

    @property
    def weights_lag(self) -> int:
        """Number of iterations by which sampling may be ahead of training: see `lag_of`."""
        return lag_of(self.pipeline, self.lag, self.max_age)

    @rule
    def _servers_are_counted_once(self) -> None:
        if self.server_groups and self.external_urls:
            raise ValueError("server_groups and external_urls exclude each other: leave one of them out")
        counts = {
            "server_groups": sum(group.count(self.num_gpus_per_engine) for group in self.server_groups),
            "external_urls": len(self.external_urls),
        }
        for option, count in counts.items():
            if count and count != self.num_engines:
                raise ValueError(
                    f"num_engines is {self.num_engines}, but {option} makes {count}: set num_engines={count}"
                )
