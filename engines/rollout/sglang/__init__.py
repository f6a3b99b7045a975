"""SGLang as a rollout engine: a server process of its own, spoken to over HTTP.

installation.py    which interpreter has SGLang, which options its servers take, how one is launched on CPU and GPU
cpu/               what stands in for CUDA-only packages in a server without a GPU, and nowhere else
server.py          one server process: start, log, end
client.py          its HTTP interface
route.py           whether requests go to the own server or through a router
generation.py      samples through it
weights.py         its weights, from one version to the next
engine.py          the `RolloutEngine` over both
"""
