import os

from cairn.engines.processes.deferred import defer_compiler

# In all processes that import anything from here, and in those that they start:
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that have nothing to do leave the cores to others
defer_compiler()  # as processes of the product do
