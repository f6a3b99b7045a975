"""The training engine, its optimizer and its batches."""

from typing import Literal

from pydantic import Field, model_validator

from configs.schema.base import Section


class TrainingConfig(Section):
    """How weights are updated."""

    engine: Literal["torch"] = "torch"
    """The training engine: `torch` trains any Hugging Face causal LM, with FSDP2 over more than one rank."""

    world_size: int = Field(1, ge=1)
    """Ranks, one Ray actor each. slime: `--actor-num-nodes` × `--actor-num-gpus-per-node`."""

    num_gpus_per_rank: float = Field(0, ge=0)
    """GPUs reserved for each rank; 0 trains on the CPU over gloo."""

    num_threads: int = Field(2, ge=1)
    """CPU threads of a rank."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward; master weights and optimizer state stay float32. Megatron: `--bf16`."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Megatron: `--recompute-granularity full`."""

    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step; by default what `num_steps_per_rollout` implies. Megatron: `--global-batch-size`."""

    num_steps_per_rollout: int = Field(1, ge=1)
    """Optimizer steps per iteration. slime: `--num-steps-per-rollout`."""

    max_tokens_per_gpu: int | None = Field(None, ge=1)
    """Most tokens, padding included, of a micro-batch; a longer sample is one by itself. Null means one micro-batch.
    slime: `--max-tokens-per-gpu`."""

    optimizer: Literal["adam"] = "adam"
    """AdamW. Megatron: `--optimizer`."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate. Megatron: `--lr`."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay. Megatron: `--min-lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Megatron: `--lr-decay-style`."""

    lr_warmup_iters: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from zero. Megatron: `--lr-warmup-iters`."""

    lr_decay_iters: int | None = Field(None, ge=1)
    """Optimizer steps, warm-up included, until `min_lr`; by default the whole run. Megatron: `--lr-decay-iters`."""

    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices. Megatron: `--weight-decay`."""

    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Megatron: `--adam-beta1`."""

    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Megatron: `--adam-beta2`."""

    adam_eps: float = Field(1e-8, gt=0)
    """Megatron: `--adam-eps`."""

    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off. Megatron: `--clip-grad`."""

    timeout: float = Field(3600, gt=0)
    """Seconds that one training step, score or save may take before it counts as hung."""

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingConfig":
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) is above lr ({self.lr})")
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            raise ValueError(
                f"lr_warmup_iters ({self.lr_warmup_iters}) must be below lr_decay_iters ({self.lr_decay_iters})"
            )
        return self
