"""Modules under the names that they have in slime."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
