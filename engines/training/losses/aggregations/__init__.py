"""How much each token counts in the loss of a batch. One aggregation a file, `weigh(counts, groups, config)`.

`counts` [N] are the trained tokens of each sample of an optimizer step, over all ranks, at least one of them positive;
`groups` [N] says which group each is of. The result is [N]: the weight of each trained token of each sample. Weights
are known before anything is cut into micro-batches or spread over ranks, so the loss is the same however that is done.
"""
