"""Benchmarks; bench/README.md describes what each measures. Their processes do not import the compiler, like those of
the product."""

from cairn.engines.processes.deferred import defer_compiler

defer_compiler()
