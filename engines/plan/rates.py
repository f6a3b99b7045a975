"""Seconds of a step from what it computes and moves, and from what a machine does in a second."""

from dataclasses import dataclass

from cairn.configs.hardware import Hardware
from cairn.engines.flops import ModelSize, size_of
from cairn.engines.plan.kv_cache import cache_need
from cairn.engines.plan.serving import Serving, served_parameters
from cairn.engines.plan.tensors import Model, Part


def model_size(model: Model) -> ModelSize:
    """What FLOPs follow from."""
    return size_of(model.config, {tensor.name: tensor.shape for tensor in model.tensors})


def bubble(stages: int, micro_batches: int, parts: int = 1) -> float:
    """Time that a pipeline stands idle, as a share of its work: (p - 1) / (v m) (Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2)."""
    return (stages - 1) / (parts * micro_batches)


@dataclass(frozen=True)
class Decoding:
    """A rollout engine at work."""

    model: Model
    serving: Serving
    weight_bytes: float
    """Of a weight."""
    cache_bytes: int
    """Of a number in the cache."""
    hardware: Hardware
    flops: float
    """That one of its GPUs does in a second at most."""

    def step(self, samples: float, context: float) -> float:
        """Seconds in which each of so many samples gets a token: each GPU reads the weights that they go through and
        what is kept of their tokens, or computes, whichever takes longer (Pope et al., "Efficiently Scaling Transformer
        Inference", 2022, section 2). Of a layer's experts a batch of B tokens goes through E (1 - (1 - k / E)^B), if
        each token's k are drawn alike.

        Args:
            context: tokens of each sample so far.
        """
        model, ranks = self.model, self.serving.tensor
        experts = sum(tensor.size for tensor in model.tensors if tensor.part is Part.EXPERT) / ranks
        touched = 1 - (1 - model.experts_per_token / model.experts) ** samples if experts else 0.0
        weights = served_parameters(model, self.serving) - experts * (1 - touched)
        need = cache_need(model, self.cache_bytes, self.serving.attention)
        read = weights * self.weight_bytes + samples / self.serving.data * need.of(context)
        computed = 2 * model.active_parameters * samples / ranks
        hardware = self.hardware
        return max(read / (hardware.hbm_gb_s * 1e9 * hardware.mbu), computed / (self.flops * hardware.mfu))

    def seconds(self, samples: float, at_once: float, prompt: float, response: float, longest: float) -> float:
        """To sample responses: as many steps as the longest response takes, or as all take that are sampled `at_once`,
        the others following as soon as one ends.

        Args:
            samples: of the engine.
            prompt: tokens of a prompt.
            response: tokens of a response, on average.
            longest: tokens of the longest response.
        """
        steps = max(longest, samples * response / max(1.0, at_once))
        batch = samples * response / steps
        return steps * self.step(batch, prompt + response / 2)

    def prefill(self, tokens: float) -> float:
        """Seconds to read prompts of so many tokens in all."""
        return 2 * self.model.active_parameters * tokens / (self.serving.tensor * self.flops * self.hardware.mfu)
