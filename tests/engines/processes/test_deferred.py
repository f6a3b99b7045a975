"""PyTorch's compiler is imported when it is used, and what it was told before is not lost."""

import gc
import subprocess
import sys

import pytest

from cairn.engines.processes.deferred import collecting_later

BEFORE = """
import os
import sys
from cairn.engines.processes.deferred import COMPILER, NEEDED_MODULE, defer_compiler

defer_compiler()
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.integrations import deepgemm

def imported():
    return {name for name in sys.modules if name.startswith(COMPILER)} - {COMPILER, NEEDED_MODULE}

@torch.compiler.disable
def left_alone(x):
    return x + 1

sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
optimizer.step()
optimizer.zero_grad()
assert left_alone(torch.ones(1)) == 2
assert not imported(), imported()
"""

AFTER = [
    "from torch._dynamo.utils import counters; assert torch._dynamo.utils.counters is counters",
    """
assert torch._dynamo.list_backends()
graphs = []
def backend(graph, inputs):
    graphs.append([node.op for node in graph.graph.nodes])
    return graph
compiled = torch.compile(lambda x: left_alone(x * 2) * 3, backend=backend)
assert compiled(torch.ones(1)) == 9
assert len(graphs) == 2, graphs
""",
]

AT_LAST = """
from torch._dynamo import trace_rules
assert imported()
assert sys.modules[COMPILER] is torch._dynamo
assert torch._dynamo.__spec__.loader is not None and torch._dynamo.utils.__spec__.name == f"{COMPILER}.utils"
marked = [function for function in vars(deepgemm).values() if id(function) in trace_rules._allowed_callable_ids]
assert marked, "what was marked before is not marked"
"""


EACH_IN_A_FORK = """
for use in sys.argv[1:]:
    if os.fork() == 0:
        exec(use)
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit(use)
"""


@pytest.mark.slow
def test_the_compiler_is_imported_for_its_first_use_whatever_that_is() -> None:
    uses = [use + AT_LAST for use in AFTER]
    ran = subprocess.run([sys.executable, "-c", BEFORE + EACH_IN_A_FORK, *uses], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_garbage_is_looked_for_again_after_the_imports() -> None:
    with collecting_later():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()
