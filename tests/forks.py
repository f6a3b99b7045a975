"""Processes that need not wait for imports: forked by one that has made them, the same for all tests of a session."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.chaos.driver", "cairn.engines.fleet.fleet", "cairn.flows.train"])
