"""How samples are generated and which groups are kept."""

from typing import Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from cairn.configs.schema.base import Code, Location, Section

# Rollout servers of several kinds, as slime's `--sglang-config` describes them.


class ServerGroup(Section):
    """Servers of one kind."""

    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    """What its servers do: everything, or only one side of prefill/decode disaggregation, which needs both."""

    num_engines: int | None = Field(None, ge=1)
    """Engines of the group; null takes `num_gpus` / `num_gpus_per_engine`."""

    num_gpus: int | None = Field(None, ge=1)
    """GPUs of the group, in place of `num_engines`."""

    num_gpus_per_engine: float | None = Field(None, ge=0)
    """GPUs of each of its engines; null takes `rollout.num_gpus_per_engine`."""

    overrides: dict[str, Any] = Field(default_factory=dict)
    """Options of the group's servers, by SGLang's names; they go before those of `rollout.sglang`."""

    @model_validator(mode="after")
    def _its_size_is_given_once(self) -> "ServerGroup":
        if (self.num_engines is None) == (self.num_gpus is None):
            raise ValueError("a server group has either num_engines or num_gpus: give one of them")
        return self

    def count(self, num_gpus_per_engine: float) -> int:
        """Engines of the group, each of so many GPUs unless the group says otherwise. Raises ValueError."""
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


# What the tools of ours are given: `rollout.tool_options`. Those of yours say it themselves, see docs/agents.md.


class SandboxedTool(Section):
    """A tool that runs programs of the policy, each in a sandbox of bubblewrap."""

    bwrap: str = "bwrap"
    """The program `bwrap`: a name on PATH, or its path."""

    timeout: float = Field(10.0, gt=0)
    """Seconds on the wall clock that a program may take."""

    cpu_time: int = Field(10, ge=1)
    """Seconds of CPU time of each of its processes."""

    memory: int = Field(512 * 1024**2, ge=2**26)
    """Bytes of address space of each process, and of memory of all of them together."""

    processes: int = Field(64, ge=1)
    """Processes and threads that it may have."""

    file_size: int = Field(16 * 1024**2, ge=4096)
    """Bytes of one file, of its scratch folder, of /dev/shm, and of what it prints."""

    max_output: int = Field(16_384, ge=1)
    """Characters of what it prints that the model is told."""

    num_workers: int = Field(4, ge=1)
    """Programs that run at a time, beside each rollout engine; the others wait, which counts for none of the limits."""


class PythonTool(SandboxedTool):
    """`python`: a Python program, and what it prints."""

    python: str | None = None
    """The interpreter, by its path; by default the one that runs Cairn. Programs see its standard library and no
    installed package."""


class SearchTool(Section):
    """`search`: passages of a corpus that go with a query, by BM25."""

    corpus: Location | None = Field(None, min_length=1)
    """JSONL or Parquet file with a passage a row; to be set where the tool is named."""

    text_key: str = "text"
    """Column with the passage."""

    title_key: str | None = None
    """Column with its title, which is searched and shown too."""

    k: int = Field(3, ge=1, le=100)
    """Passages that are returned."""

    max_output: int = Field(16_384, ge=1)
    """Characters that the model is told."""

    timeout: float = Field(30.0, gt=0)
    """Seconds that a search may take; reading the corpus, the first time, does not count."""


class ToolOptions(Section):
    """Options of the tools of ours that `rollout.tools` names, and what tools of yours may do."""

    network: bool = False
    """Whether tools of yours that are called in processes of their own may reach a network: plain functions of modules.
    Others run in the process of `generate`, whose network they have."""

    python: PythonTool = PythonTool()
    """Of `python`."""

    shell: SandboxedTool = SandboxedTool()
    """Of `shell`."""

    search: SearchTool = SearchTool()
    """Of `search`."""


MOST_ITERATIONS = 1_000_000
"""`cairn.storage.ledger.layout.LAST_NUMBER` is that of the last."""


def lag_of(pipeline: str, lag: int | None, max_age: int | None) -> int:
    """Iterations that may be open besides the newest: 0 in the `sync` pipeline, the lag of the `lagged` one, the
    greatest age of the `streaming` one, with their defaults filled in."""
    if pipeline == "streaming":
        return max_age or 1
    return (lag or 1) if pipeline == "lagged" else 0


class RolloutConfig(Section):
    """Generation: what is sampled, in what amounts, by which engine."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """The rollout engine: `transformers` samples in the actor's own process, `sglang` through a server beside it."""

    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of `sglang.launch_server` by their own names, such as `attention_backend` or `tp_size`. slime:
    `--sglang-*`."""

    router: dict[str, Any] | None = None
    """Options of the `sglang_router` process through which every engine's requests go, by their own names, such as
    `policy` (`cache_aware`, `round_robin`, `power_of_two`, `consistent_hashing`, …); null has none, and each engine
    asks its own server. slime: `--router-*`."""

    server_groups: tuple[ServerGroup, ...] = ()
    """Servers of several kinds, `num_engines` in all. slime: `--sglang-config`."""

    external_urls: tuple[Location, ...] = ()
    """Servers that run elsewhere, `http://host:port`, one for each of `num_engines`: they are used and never started or
    ended. slime: `--rollout-external-engine-addrs`."""

    num_engines: int = Field(1, ge=1)
    """Rollout engines. slime: `--rollout-num-gpus` / `--rollout-num-gpus-per-engine`."""

    min_num_engines: int | None = Field(None, ge=1)
    """Of the streaming pipeline: rollout engines with which a run begins and goes on. The others join while it runs, up
    to `num_engines`, when the Ray cluster has room for them, and leave when their machines go. Null makes all
    `num_engines` at the start, and makes one that is lost again before the run goes on. Ray Serve: `min_replicas`."""

    num_gpus_per_engine: float = Field(0, ge=0)
    """GPUs reserved for each engine; 0 runs it on the CPU. slime: `--rollout-num-gpus-per-engine`."""

    num_gpus_per_node: int = Field(8, ge=1)
    """GPUs of a machine: an engine with more of them is a tensor-parallel one over several machines, with an actor on
    each. slime: `--num-gpus-per-node`."""

    num_threads: int = Field(1, ge=1)
    """CPU threads of an engine. With one thread its results do not depend on what else is in the batch."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the engine's weights and activations."""

    max_running_requests: int = Field(256, ge=4)
    """Samples that an engine decodes at a time. SGLang: `--max-running-requests`."""

    num_rollout: int = Field(0, ge=1, validate_default=False)
    """Iterations of the run; left out, or null, those of `num_epoch`. slime: `--num-rollout`."""

    num_epoch: int | None = Field(None, ge=1)
    """Epochs of the run, in place of `num_rollout`: rows of the data // `rollout_batch_size` × this many iterations.
    The configuration that the run records has both. slime: `--num-epoch`."""

    rollout_batch_size: int = Field(ge=1)
    """Prompts trained on per iteration. slime: `--rollout-batch-size`."""

    n_samples_per_prompt: int = Field(8, ge=1)
    """Samples per prompt: the size of a group. slime: `--n-samples-per-prompt`."""

    over_sampling_batch_size: int | None = Field(None, ge=1)
    """Prompts drawn in an iteration's first round, at least `rollout_batch_size` (the default). Later rounds draw
    in proportion to what is missing. slime: `--over-sampling-batch-size`."""

    pipeline: Literal["sync", "lagged", "streaming"] = "sync"
    """Whether an iteration is collected while an earlier one is learned from. `sync`: one after the other, each with
    the weights that the one before has left. `lagged`: side by side, each with the weights of `lag` iterations before
    those, whichever half is faster, so that nothing depends on time. `streaming`: samples are generated all the time
    with the newest weights, at most `max_age` publications ahead, and a batch is made of the groups that are complete
    first; which these are is recorded before it is learned from. slime: `train_async.py`, `fully_async_rollout.py`."""

    lag: int | None = Field(None, ge=1)
    """Of the lagged pipeline, 1 by default: so many iterations older than the newest are the weights that an iteration
    is collected with. Needs `algorithm.use_tis` or `algorithm.use_rollout_logprobs`, which correct for the difference,
    or a loss that does (`dppo_tv`, `dppo_kl`)."""

    partial_rollout: bool = False
    """Once a shard has finished its share of the groups that are needed, abort the others: they are kept as far as they
    came, and the next round of rollout continues them before it draws fresh prompts. Needs
    `over_sampling_batch_size` above `rollout_batch_size`, and `max_age` above its default, so that what a response had
    before the abort is trained on. What had finished at the abort is a matter of time, unless
    `cut_tokens` says otherwise: a rollout that is committed stays as it is, but doing it again does not give the same.
    slime: `--partial-rollout`."""

    cut_tokens: int | None = Field(None, ge=1)
    """Of `partial_rollout`: a shard generates in rounds of so many response tokens of each sample that is open, and
    ends after the one in which its share of the groups that are needed has finished. No time decides then what is kept
    as a part: with a batch-invariant engine the rollout comes out the same bit for bit when it is done again, after any
    kill. Each round begins by reading all that its samples have so far, so a small number costs time. Null aborts the
    others as soon as the share has finished."""

    mask_offpolicy_in_partial_rollout: bool = False
    """Of a group that was continued, train only on tokens of the weights under which it was finished, however old
    `max_age` allows others to be; each of these weighs what it would if all were trained on. slime:
    `--mask-offpolicy-in-partial-rollout`."""

    max_age: int | None = Field(None, ge=0)
    """Oldest tokens that are trained on, in publications: iterations between the weights that sampled a token and those
    that are trained. By default 1 in the `streaming` pipeline, which begins samples only as fast as that allows, and
    the lag of the rollout in the others, which is 0 in the `sync` pipeline: what over-sampling leaves
    over is then dropped. A larger bound carries
    surplus groups over until they are too old, and needs a correction as `lag` does."""

    async_buffer_size: int | None = Field(None, ge=1)
    """Of the streaming pipeline: complete groups that may wait to be learned from before no more prompts are admitted,
    by default those of one batch. Fewer keep samples younger, more spare learning a wait for long answers; `max_age`
    bounds it in any case. As long as learning waits for nothing, only the next batch is admitted."""

    update_weights_interval: int = Field(1, ge=1)
    """Of the streaming pipeline: iterations after which engines take new weights, at most `max_age`. slime:
    `--update-weights-interval`."""

    staleness_policy: Code = "mask"
    """Of the streaming pipeline: what becomes of a group with tokens that are older than `max_age` all the same, since
    it took longer than `timeout`: `mask` leaves these tokens out of the loss, `drop` replaces the group, `decay` weighs
    their advantages by 1 / (1 + age - max_age); or a function of your own, `package.module.function` or
    `file.py:function`, see docs/plugins.md."""

    buffer_filter_path: Code = "youngest_first"
    """Which groups are used first where there are more than a batch has room for, and which of those that wait
    unfinished go on first: `youngest_first`, `oldest_first`, `priority`, `stratified`, or a function of your own,
    `package.module.function` or `file.py:function`, see docs/plugins.md. slime: `--buffer-filter-path`."""

    buffer_key: str | None = None
    """A key of the data rows' metadata: `priority` takes groups by the number under it, the highest first, in place of
    what the filter says or else the standard deviation of the rewards; `stratified` deals them out by turns to the
    values under it."""

    custom_generate_function_path: Code = "single_turn"
    """What a sample goes through: `single_turn` is one response to the prompt, `tool_calls` lets the model call
    `rollout.tools` and go on with what they return; a coroutine function of your own, by import path
    (`package.module.function`) or file (`turns.py:generate`), may ask the policy several times, see docs/plugins.md.
    slime: `--custom-generate-function-path`."""

    tools: tuple[Code, ...] = ()
    """What episodes may call with `ctx.call`, and `tool_calls` lets the model call: `calculator`, `python`, `search`,
    `shell`, or a `cairn.Tool` of your own, `package.module.tool` or `file.py:tool`, see docs/agents.md."""

    tool_options: ToolOptions = ToolOptions()
    """Of the tools of ours."""

    tool_call_format: Literal["template", "tags"] = "template"
    """How `tool_calls` has the model call tools. `template`: as its chat template says, which is given the tools;
    `tags`: `<search>text</search>`, and the result as `<result>…</result>`, for models without such a template."""

    max_turns: int = Field(16, ge=1)
    """Answers of the policy in an episode of `tool_calls`; one that calls tools in its last is truncated."""

    rollout_max_context_len: int | None = Field(None, ge=2)
    """Tokens of prompt and response in an episode of `tool_calls`; one that would need more is truncated. By default
    what the model's context holds. slime: `--rollout-max-context-len`."""

    num_episode_workers: int = Field(1, ge=1)
    """Workers of each engine in which a coroutine function of your own runs, beside the engine or on other machines,
    see docs/agents.md. Each runs its share of the engine's samples, thousands of them at a time."""

    max_tokens_in_flight: int | None = Field(None, ge=1)
    """Tokens that samples may have with an engine at a time, each counted with the prompt of what it asks and all that
    it may be answered; the others wait, each sample for its turn. Null has no bound besides the engine's own."""

    custom_generate_timeout: float = Field(600, gt=0)
    """Seconds that a function of your own may spend on a sample at a time without asking the engine; then the sample
    fails."""

    episode_timeout: float | None = Field(None, gt=0)
    """Seconds that a function of your own may take for a sample in all, its waiting for the engine included; then the
    sample fails. Null has no bound besides `timeout`."""

    dynamic_sampling_filter: Code | None = None
    """Which groups are kept: `check_reward_nonzero_std`, `check_reward_nonzero_std_with_fallback`, or a function by
    import path (`package.module.function`) or file (`filters.py:function`). Null keeps every group without a failed
    sample. slime: `--dynamic-sampling-filter-path`."""

    rollout_sample_filter_path: Code | None = None
    """Which samples of the batch are not trained on, though their rewards count in the baselines of their groups:
    `truncated`, or a function of your own, `package.module.function` or `file.py:function`, see docs/plugins.md. slime:
    `--rollout-sample-filter-path`."""

    max_refill_rounds: int = Field(16, ge=1)
    """Rounds of rollout that an iteration may take to fill its batch before it fails with the reasons of the filter."""

    shards_per_round: int | None = Field(None, ge=1)
    """Parts that a round is cut into, each one task with its own commit; one per engine by default."""

    rollout_max_prompt_len: int | None = Field(None, ge=1)
    """Longer prompts, in tokens, are passed over; by default what the context leaves after the response. slime:
    `--rollout-max-prompt-len`."""

    rollout_max_response_len: int = Field(0, ge=0)
    """Longest response in tokens; to be set wherever responses are sampled. slime: `--rollout-max-response-len`."""

    rollout_temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same. slime: `--rollout-temperature`."""

    rollout_top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass: tokens are drawn from the smallest set of the most probable ones that holds it. slime:
    `--rollout-top-p`."""

    rollout_top_k: int = Field(-1, ge=-1)
    """Candidates kept per token; -1 keeps all. slime: `--rollout-top-k`."""

    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response besides the model's own end tokens. slime: `--rollout-stop-token-ids`."""

    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response as soon as its text holds one, special tokens kept: the token that completes it is
    the last. Those of a run end the responses of its own benchmarks too. slime: `--rollout-stop`."""

    sglang_server_concurrency: int = Field(512, ge=1)
    """Samples that are asked of an SGLang engine at a time; the others wait with the client. slime:
    `--sglang-server-concurrency`."""

    timeout: float = Field(1800, gt=0)
    """Seconds that one shard may take before it counts as hung; where samples are streamed, that an engine may be at
    work without ending a sample or taking others or new weights, and that a batch waits for a group which would be too
    old for the next one."""

    rollout_health_check_interval: float = Field(5, gt=0)
    """Seconds between two questions to an SGLang server, and to the router, whether it still works. slime:
    `--rollout-health-check-interval`."""

    rollout_health_check_timeout: float = Field(30, gt=0)
    """Seconds, or three times the 99th percentile of its answers if that is more, after which a server or router
    that does not answer is ended and replaced. slime: `--rollout-health-check-timeout`."""

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary only."""
        return self.rollout_top_p < 1 or self.rollout_top_k > 0

    rollout_health_check_first_wait: float = Field(0, ge=0)
    """Seconds after an SGLang server is up in which no silence counts: one that compiles kernels for its first batches,
    as DeepGEMM's do, answers nothing meanwhile. slime: `--rollout-health-check-first-wait`."""

    @field_validator("num_rollout", mode="wrap")
    @classmethod
    def _null_leaves_the_length_to_the_epochs(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        return 0 if value is None else validate(value)

    @model_validator(mode="after")
    def _has_a_length(self) -> "RolloutConfig":
        if self.num_rollout == 0 and self.num_epoch is None:
            raise ValueError("num_rollout is required and missing: Iterations of the run; or give num_epoch")
        return self

    @model_validator(mode="after")
    def _iterations_can_be_numbered(self) -> "RolloutConfig":
        if self.num_rollout > MOST_ITERATIONS:
            raise ValueError(
                f"num_rollout ({self.num_rollout}) is above {MOST_ITERATIONS}, the most iterations that a ledger can "
                "number"
            )
        return self

    @model_validator(mode="after")
    def _something_can_be_drawn(self) -> "RolloutConfig":
        if self.rollout_top_k == 0:
            raise ValueError("rollout_top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens")
        if self.rollout_top_k == 1:
            raise ValueError(
                "rollout_top_k is 1, which leaves one token to draw: nothing can be learned from a choice without an "
                "alternative; set it to 2 or more, or to -1 to keep all tokens"
            )
        return self

    @model_validator(mode="after")
    def _responses_may_begin(self) -> "RolloutConfig":
        if not all(self.rollout_stop):
            raise ValueError("rollout_stop has an empty string, which every text holds: leave it out")
        return self

    @model_validator(mode="after")
    def _tools_are_called(self) -> "RolloutConfig":
        function, fields = self.custom_generate_function_path, type(self).model_fields
        if function == "single_turn" and self.tools:
            raise ValueError(
                "tools has no effect while custom_generate_function_path is single_turn: set it to tool_calls, or to a "
                "function of yours that calls them"
            )
        if self.tool_options != ToolOptions(network=self.tool_options.network) and not self.tools:
            raise ValueError("tool_options has no effect without tools: name those that it is for in tools")
        for name in ("max_turns", "rollout_max_context_len"):
            if function != "tool_calls" and getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"{name} has no effect unless custom_generate_function_path is tool_calls: set it so, or leave "
                    f"{name} out"
                )
        if function == "tool_calls" and not self.tools:
            raise ValueError("custom_generate_function_path is tool_calls, and tools names none: name what it may call")
        return self

    @model_validator(mode="after")
    def _parts_are_made_and_continued(self) -> "RolloutConfig":
        if self.partial_rollout and (self.over_sampling_batch_size or 0) <= self.rollout_batch_size:
            raise ValueError(
                f"partial_rollout is true but over_sampling_batch_size ({self.over_sampling_batch_size}) is not above "
                f"rollout_batch_size ({self.rollout_batch_size}): nothing would be left to abort"
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise ValueError("mask_offpolicy_in_partial_rollout has no effect without partial_rollout=true")
        return self

    @model_validator(mode="after")
    def _something_is_cut(self) -> "RolloutConfig":
        cut, function, longest = self.cut_tokens, self.custom_generate_function_path, self.rollout_max_response_len
        if cut is None:
            return self
        if not self.partial_rollout:
            raise ValueError(f"cut_tokens ({cut}) has no effect without partial_rollout=true")
        if function != "single_turn":
            raise ValueError(
                f"cut_tokens ({cut}) has no effect while custom_generate_function_path is {function}: only samples of "
                "single_turn are cut off by tokens; leave it out, and they are aborted when enough have finished"
            )
        if cut >= longest:
            raise ValueError(
                f"cut_tokens ({cut}) has no effect while rollout_max_response_len is {longest}: no response is long "
                "enough to be cut off; lower cut_tokens, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _a_stream_takes_groups_as_they_come(self) -> "RolloutConfig":
        if self.pipeline != "streaming":
            for name in ("async_buffer_size", "update_weights_interval", "staleness_policy"):
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} ({value}) has no effect while pipeline is {self.pipeline}: set pipeline to streaming, "
                        "or leave it out"
                    )
            return self
        if self.max_age == 0:
            raise ValueError(
                "max_age is 0 and pipeline is streaming, which generates while it trains: set max_age to 1 or more, or "
                "pipeline to sync"
            )
        interval, buffer, batch = self.update_weights_interval, self.async_buffer_size, self.rollout_batch_size
        if interval > self.weights_lag:
            raise ValueError(
                f"update_weights_interval ({interval}) is above max_age ({self.weights_lag}): the tokens of an engine "
                "would be too old before it has other weights; raise max_age, or lower update_weights_interval"
            )
        if buffer is not None and buffer > self.weights_lag * batch:
            raise ValueError(
                f"async_buffer_size ({buffer}) has no effect above max_age × rollout_batch_size "
                f"({self.weights_lag} × {batch}), groups that ever wait: lower it, or raise max_age"
            )
        for name in ("over_sampling_batch_size", "partial_rollout", "shards_per_round"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} has no effect while pipeline is streaming, which takes groups as they are complete and "
                    "lets the others go on: leave it out"
                )
        if self.router is not None:
            raise ValueError(
                "pipeline is streaming, which brings engines to new weights one after the other, and the requests of "
                "all go through router: leave router out, or set pipeline to lagged or sync"
            )
        return self

    @model_validator(mode="after")
    def _engines_join_and_leave_where_they_can(self) -> "RolloutConfig":
        least = self.min_num_engines
        if least is None:
            return self
        if self.pipeline != "streaming":
            raise ValueError(
                f"min_num_engines ({least}) has no effect while pipeline is {self.pipeline}, whose prompts are dealt "
                "out to a fixed number of engines: set pipeline to streaming, or leave it out"
            )
        if least > self.num_engines:
            raise ValueError(f"min_num_engines ({least}) is above num_engines ({self.num_engines}): raise num_engines")
        if self.external_urls:
            raise ValueError(
                "min_num_engines is of engines that a run places itself, and external_urls run elsewhere: leave one of "
                "them out"
            )
        if self.custom_generate_function_path != "single_turn":
            raise ValueError(
                f"min_num_engines lets machines go, and custom_generate_function_path is "
                f"{self.custom_generate_function_path}, whose episodes run in a fixed number of workers on them: leave "
                "min_num_engines out"
            )
        return self

    @model_validator(mode="after")
    def _there_are_older_tokens(self) -> "RolloutConfig":
        if self.oldest_trained < self.weights_lag:
            raise ValueError(
                f"max_age ({self.max_age}) is below the lag ({self.weights_lag}): no token would be young enough to be "
                "trained on; raise it, or leave it out"
            )
        if self.oldest_trained > self.weights_lag and (self.over_sampling_batch_size or 0) <= self.rollout_batch_size:
            raise ValueError(
                f"max_age ({self.max_age}) has no effect while over_sampling_batch_size "
                f"({self.over_sampling_batch_size}) is not above rollout_batch_size ({self.rollout_batch_size}): "
                "nothing is left over that could grow old"
            )
        lag = self.weights_lag
        if self.partial_rollout and self.oldest_trained == lag:
            raise ValueError(
                f"partial_rollout is true and max_age is {lag}: of a response that was continued only the end would be "
                f"trained on; set max_age to {lag + 1} or more, with algorithm.use_tis=true or "
                "algorithm.use_rollout_logprobs=true"
            )
        return self

    @model_validator(mode="after")
    def _the_buffer_has_a_choice(self) -> "RolloutConfig":
        policy, key = self.buffer_filter_path, self.buffer_key
        chosen = policy != type(self).model_fields["buffer_filter_path"].default
        if chosen and (self.over_sampling_batch_size or 0) <= self.rollout_batch_size:
            raise ValueError(
                f"buffer_filter_path ({policy}) has no effect while over_sampling_batch_size "
                f"({self.over_sampling_batch_size}) is not above rollout_batch_size ({self.rollout_batch_size}): there "
                "are never more groups than a batch has room for; raise it, or leave buffer_filter_path out"
            )
        if policy == "stratified" and key is None:
            raise ValueError(
                "buffer_filter_path is stratified, which needs buffer_key: the key of the metadata whose values take "
                "turns"
            )
        if key is not None and policy in ("youngest_first", "oldest_first"):
            raise ValueError(
                f"buffer_key ({key}) has no effect while buffer_filter_path is {policy}; set it to priority or "
                "stratified, or leave it out"
            )
        return self

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
        """Iterations by which sampling may be ahead of learning: see `lag_of`."""
        return lag_of(self.pipeline, self.lag, self.max_age)

    @model_validator(mode="after")
    def _a_lag_needs_its_pipeline(self) -> "RolloutConfig":
        if self.lag is not None and self.pipeline != "lagged":
            raise ValueError(
                f"lag ({self.lag}) has no effect while pipeline is {self.pipeline}: set pipeline to lagged, or leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _servers_are_counted_once(self) -> "RolloutConfig":
        if self.server_groups and self.external_urls:
            raise ValueError("server_groups and external_urls exclude each other: leave one of them out")
        if self.sglang and self.external_urls:
            raise ValueError(
                "sglang has no effect on the servers of external_urls: leave it out, and give its options to those who "
                "start them"
            )
        found = {
            "server_groups": sum(group.count(self.num_gpus_per_engine) for group in self.server_groups),
            "external_urls": len(self.external_urls),
        }
        for option, count in found.items():
            if count and count != self.num_engines:
                raise ValueError(
                    f"num_engines is {self.num_engines}, but {option} makes {count}: set num_engines={count}"
                )
        return self
