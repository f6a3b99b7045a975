"""Layers of a model that predict several tokens ahead (multi-token prediction): kept as they are.

| names | models |
|---|---|
| `model.layers.N.…`, N at or above `num_hidden_layers` | DeepSeek V3, Kimi K2, GLM-4.5 and later |
| `mtp.…` | Qwen3-Next, Qwen3.5 |
| `model.mtp_layers.…` | MiMo |

No engine trains them, and transformers drops them in silence when it loads a model. They are no part of a state, a
checkpoint or a checksum of weights, which say what was trained; every folder that a run writes has them again, from the
folder that the run began with.
"""

import re


def is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to such a layer of a model of so many hidden layers."""
    layer = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
    return bool(re.match(r"(model\.)?(mtp|mtp_layers)\.", name)) or (layer is not None and int(layer[1]) >= layers)
