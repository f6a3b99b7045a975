"""Import of functions by path, and classes with one instance."""

from typing import Any, ClassVar

from cairn.configs.plugins import load_callable as load_function

__all__ = ["SingletonMeta", "load_function"]


class SingletonMeta(type):
    """Metaclass of classes that have one instance in a process."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]

    @classmethod
    def clear_instances(mcs) -> None:
        """Forget all instances."""
        mcs._instances.clear()
