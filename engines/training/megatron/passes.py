"""Passes of micro-batches through Megatron's schedules: with gradients to train, without to score."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from cairn.engines.training.aggregations import NO_WEIGHT, Weight
from cairn.engines.training.batching import MicroBatch
from cairn.engines.training.collate import MISMATCH, Tokens, collate_responses, collate_trained, routed_choices
from cairn.engines.training.megatron.routers import Balance, Replay
from cairn.engines.training.packing import Packed, context_order, pack, padded_length
from cairn.engines.training.protocol import merge, merge_over_ranks, numbers
from cairn.engines.types.types import TrainBatch

Objective = Callable[[torch.Tensor, Tokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""([T, outputs / ranks] of the output layer at all of this rank's tokens, the trained tokens, whose `positions` are
rows of it) → this micro-batch's share of the loss and of every metric."""

Reading = Callable[[torch.Tensor, Tokens], torch.Tensor]
"""([T, outputs / ranks] of the output layer at all of this rank's tokens, the chosen tokens, whose `positions` are rows
of it) → [N], or [N, columns], the same on all tensor-parallel ranks."""

OnOutputs = Callable[[torch.Tensor, Packed, MicroBatch], tuple[torch.Tensor, Any]]
"""([T, outputs / ranks] of all tokens, micro-batch) → loss, and a result to collect."""


class Passes:
    """Passes of micro-batches through a model on this rank."""

    def __init__(
        self,
        config: Any,
        chunks: Sequence[Any],
        device: torch.device,
        replay: Replay | None = None,
        balance: Balance | None = None,
    ) -> None:
        """
        Args:
            chunks: the model's chunks, as callable modules.
            replay: makes their routers use the experts of the rollout.
            balance: counts the tokens of their experts in updates.
        """
        self._replay, self._balance = replay, balance
        self._chunks, self._device = list(chunks), device
        self._own_format = {"fp32_output": False} if config.bf16 else {}
        """Lets Megatron's wrapper of a bfloat16 model return outputs as they are; float32 is a second, larger copy."""
        context = parallel_state.get_context_parallel_world_size()
        cut = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        self.alignment = cut * (2 * context if context > 1 else 1)
        """Number of tokens to a multiple of which every sample is padded."""

    def accumulate_gradients(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[MicroBatch],
        weights: dict[int, Weight],
        objective: Objective,
    ) -> dict[str, float]:
        """Add the gradient of this rank's share of the loss to the others'; all ranks end with the sum.

        Returns every metric of the optimizer step, the same on all ranks.

        Args:
            weights: weights of each sample's trained tokens in the loss of the optimizer step.
        """

        def make(micro_batch: MicroBatch) -> Packed:
            shares = [weights[i] if micro_batch.counted else NO_WEIGHT for i in micro_batch.samples]
            tokens = collate_trained(batch, micro_batch.samples, shares, self._device)
            return self._pack(batch, micro_batch, tokens)

        def on_outputs(outputs: torch.Tensor, packed: Packed, _: MicroBatch) -> tuple[torch.Tensor, Any]:
            return objective(outputs, packed.tokens)

        results = self._run(micro_batches, make, on_outputs, forward_only=False)
        counts = parallel_state.get_tensor_model_parallel_rank() == 0
        share = merge(map(numbers, results)) if counts else {}
        if self._replay is not None and (routed := routed_choices(batch, weights)):
            share[MISMATCH] = self._replay.differing() / routed  # every rank has its own tokens and layers
        return merge_over_ranks(share, dist.get_world_size())

    @torch.no_grad()
    def score_responses(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], reading: Reading, shape: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Return [sum of R_i, *shape] float32: the reading at every response token, sample after sample.

        The result is the same on all ranks.
        """
        ends = np.cumsum(batch.response_lengths)
        scores = torch.zeros(int(ends[-1]), *shape, device=self._device)

        def make(micro_batch: MicroBatch) -> Packed:
            return self._pack(batch, micro_batch, collate_responses(batch, micro_batch.samples, self._device))

        def on_outputs(outputs: torch.Tensor, packed: Packed, micro_batch: MicroBatch) -> tuple[torch.Tensor, Any]:
            values = reading(outputs, packed.tokens)
            if micro_batch.counted and parallel_state.get_tensor_model_parallel_rank() == 0:
                places = [np.arange(ends[i] - batch.response_lengths[i], ends[i]) for i in micro_batch.samples]
                scores[torch.from_numpy(np.concatenate(places)).to(self._device)[packed.order]] = values
            return values.sum(), None

        self._run(micro_batches, make, on_outputs, forward_only=True)
        if self._replay is not None:
            self._replay.differing()  # counts are reported only for updates
        dist.all_reduce(scores)  # one value and zeros: exact
        return scores

    def _pack(self, batch: TrainBatch, micro_batch: MicroBatch, tokens: Any) -> Packed:
        lengths = [padded_length(len(batch.input_ids[sample]), self.alignment) for sample in micro_batch.samples]
        size = parallel_state.get_context_parallel_world_size()
        return pack(
            batch,
            micro_batch.samples,
            tokens,
            lengths=lengths,
            places=context_order(lengths, size, parallel_state.get_context_parallel_rank()),
            group=parallel_state.get_context_parallel_group() if size > 1 else None,
        )

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        make: Callable[[MicroBatch], Packed],
        on_outputs: OnOutputs,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Return the results of `on_outputs` for every micro-batch on the last pipeline stage; none on the others."""

        def forward_step(data: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
            micro_batch = next(data)
            packed = make(micro_batch)
            with ExitStack() as around:
                if self._replay is not None:
                    around.enter_context(self._replay.forward(chunk, packed.routed if micro_batch.counted else None))
                if self._balance is not None and not forward_only and micro_batch.counted:
                    around.enter_context(self._balance.counting(packed.real))
                output = chunk(
                    input_ids=packed.input_ids,
                    position_ids=None,
                    attention_mask=None,
                    **self._own_format,
                    packed_seq_params=PackedSeqParams(
                        qkv_format="thd",
                        cu_seqlens_q=packed.ends,
                        cu_seqlens_kv=packed.ends,
                        cu_seqlens_q_padded=packed.ends,
                        cu_seqlens_kv_padded=packed.ends,
                        max_seqlen_q=packed.longest,
                        max_seqlen_kv=packed.longest,
                    ),
                )

            def loss_of(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                # A view whose gradient is a view too: an index would allocate a gradient of all outputs.
                loss, results = on_outputs(outputs.squeeze(0), packed, micro_batch)
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), results  # 0: nothing to divide by

            return output, loss_of

        data: Any = [iter(micro_batches) for _ in self._chunks]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # every micro-batch has its own length
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results
