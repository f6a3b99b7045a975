"""SGLang as a rollout engine: a server process of its own, spoken to over HTTP.

kind.py            what the driver knows of it
installation.py    which interpreter has SGLang, which options its servers take, how one is launched on CPU and GPU
cpu/               what stands in for CUDA-only packages in a server without a GPU, and nowhere else
launch_plan.py     from the configuration to what is launched: engines, machines, server and router options
problems.py        what can be known of servers before anything starts
launch.py          launches one engine of the plan, or a machine's part of it
server.py          one server process: start, log, end
watch.py           finds a server that hangs
router.py          the router's process (start_router.py) and which servers it knows
client.py          its HTTP interface
route.py           whether requests go to the own server or through a router
generation.py      samples through it
completions.py     what it answers, as samples
loads.py           how busy it is
weights.py         its weights, from one version to the next
engine.py          the `RolloutEngine` over both
"""
