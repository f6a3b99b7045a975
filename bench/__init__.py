"""What each benchmark measures is in bench/README.md. Its processes import no compiler, as those of the product."""

from cairn.engines.processes.deferred import defer_compiler

defer_compiler()
