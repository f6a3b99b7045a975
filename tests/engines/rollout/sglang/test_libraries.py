"""SGLang's servers have the environment variables that their libraries need."""

import psutil

from cairn.engines.processes.libraries import table
from cairn.engines.rollout.sglang.engine import SGLangEngine


def test_every_process_of_a_server_has_the_variables_of_the_table(engine: SGLangEngine) -> None:
    wanted = {row.variable: row.value for row in table() if "sglang" in row.processes}
    assert {"NCCL_CUMEM_ENABLE", "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "PYTORCH_CUDA_ALLOC_CONF"} <= wanted.keys()
    server = psutil.Process(engine.health()["server_pid"])
    processes = [server, *server.children(recursive=True)]
    assert len(processes) > 1
    for process in processes:
        actual = process.environ()
        assert {name: actual.get(name) for name in wanted} == wanted, process.cmdline()
