"""Replacement for sglang-kernel of SGLang 0.5.23 in a server without a GPU.

SGLang's CPU engine imports these names whether it uses them or not. On CPUs without AMX its layers take their PyTorch
path, so that of all kernels only the hash behind seeded sampling is called. The others belong to speculative decoding,
and raise an error if they are called.
"""

from typing import Any, NoReturn

import torch

_MASK = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate((block * 0xCC9E2D51) & _MASK, 15)
    state = _rotate(state ^ ((block * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 (32 bits) of (low word of seed, high word, position, column): [B] and [V] -> [B, V] uint32."""
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = _mix(torch.zeros_like(seed), seed & _MASK)
    state = _mix(state, (seed >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64) & _MASK)
    state = _mix(state[:, None], col_indices.to(torch.int64)[None, :] & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache locations, which are consecutive, into its row of the pool."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def _absent(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is for speculative decoding, which needs a GPU")

    return call


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")


class _HostMemory:
    """The part of CUDA's runtime that SGLang calls where it stores the experts of tokens: memory for GPUs to copy
    from."""

    @staticmethod
    def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
        return 0


torch.cuda.cudart = lambda: _HostMemory
