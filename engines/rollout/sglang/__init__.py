"""SGLang as a rollout engine: a separate server process, used over HTTP.

kind.py            what the driver knows of the engine
installation.py    which interpreter has SGLang, which options its servers take, how they are launched on CPU and GPU
cpu/               replacements for CUDA-only packages, for servers without a GPU alone
launch_plan.py     from the configuration to what is launched: engines, machines, server and router options
problems.py        checks of the configuration before anything starts
launch.py          launches one engine of the plan, or a machine's part of it
server.py          one server process: start, log, end; its HTTP interface; a watch that finds a hung server
guard.py           ends a server's process group when its owner is gone
router.py          the router's process (start_router.py) and the servers that it knows
generation.py      samples through the server or a router; how busy the server is
completions.py     from the server's replies to samples
weights.py         the server's weights, from one version to the next
engine.py          the `RolloutEngine` over all of them
"""
