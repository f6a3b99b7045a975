from cairn.engines.deferred import defer_compiler

defer_compiler()  # as processes of the product do, in all that import anything from here
