"""How the losses of tokens become the loss of a batch."""

from collections.abc import Sequence


def token_weights(mask_sums: Sequence[int], *, per_token: bool) -> list[float]:
    """The weight of each trained token of each sample, such that the batch's loss is the weighted sum over its tokens.

    The weights are known before anything is cut into micro-batches or spread over ranks, so the sum is the same however
    that is done.

    Args:
        mask_sums: trained tokens of every sample of the optimizer step, over all ranks; at least one is positive.
        per_token: False gives the mean over samples of the mean over a sample's trained tokens, in which a sample
            without trained tokens counts as 0; True gives the mean over all trained tokens.
    """
    if per_token:
        return [1 / sum(mask_sums)] * len(mask_sums)
    return [1 / (len(mask_sums) * max(count, 1)) for count in mask_sums]
