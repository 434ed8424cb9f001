"""`BasePlugin`: implementations looked up by name, resolved when they are first used.

`class Timer(BasePlugin)` makes a registry; `@Timer("cpu").register()` puts a function or a class into it under a name;
`Timer("cpu")(...)` or `Timer("cpu").method(...)` looks the name up and calls. Classes are never instantiated.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

Registered = TypeVar("Registered", bound=Callable[..., Any])
Params = TypeVar("Params")


class UnknownPluginError(ValueError, AttributeError):
    """A name that is not registered. Also an AttributeError, so that `hasattr` on a routing object answers."""


class BasePlugin:
    """A routing object: it keeps a name and finds what is registered under it at each use.

    Subclass it to make a registry; each subclass has one of its own, which starts empty.

    Args:
        name: what is to be registered or looked up.
    """

    _registry: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._registry = {}

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def register(self) -> Callable[[Registered], Registered]:
        """A decorator that registers a function, or a class of static and class methods, and returns it as it is.

        A second registration under a name warns and takes its place.

        Raises:
            ValueError: no name was given.
        """
        kind, name = type(self), self.name
        if not name:
            raise ValueError(f"{kind.__name__}().register() needs a name: {kind.__name__}('<name>').register()")

        def register(implementation: Registered) -> Registered:
            if not callable(implementation):
                raise TypeError(f"{kind.__name__}({name!r}) takes a function or a class, not {implementation!r}")
            hidden = [own for own in ("name", "names", "parse_params", "register") if hasattr(implementation, own)]
            if inspect.isclass(implementation) and hidden:
                raise ValueError(
                    f"{implementation.__qualname__} has {', '.join(hidden)}, which {kind.__name__}({name!r}).<name> "
                    "would never reach: a routing object has these itself. Give them other names"
                )
            if name in kind._registry:
                warnings.warn(f"{kind.__name__}({name!r}) was registered before; the new one is used", stacklevel=2)
            kind._registry[name] = implementation
            return implementation

        return register

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The registered names, sorted."""
        return tuple(sorted(cls._registry))

    def _resolve(self) -> Any:
        # Not self.name: while a copy is being made there may be no such attribute yet.
        name = self.__dict__.get("name")
        if name not in self._registry:
            known = ", ".join(map(repr, self.names())) or "none; import the module that registers it"
            raise UnknownPluginError(f"{type(self).__name__}({name!r}) is not registered; registered: {known}")
        return self._registry[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the registered function.

        Raises:
            ValueError: nothing is registered under the name.
            TypeError: a class is.
        """
        implementation = self._resolve()
        if inspect.isclass(implementation):
            raise TypeError(
                f"{self!r} is the class {implementation.__qualname__}; call one of its methods, it is no function"
            )
        return implementation(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        # Protocols such as copy and pickle ask for special methods; they are about this object, not what it routes to.
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        implementation = self._resolve()
        if not inspect.isclass(implementation):
            raise AttributeError(f"{self!r} is a function without {attribute!r}; call it")
        kind = inspect.getattr_static(implementation, attribute, None)
        if inspect.isfunction(kind) or isinstance(kind, property):
            raise AttributeError(
                f"{implementation.__qualname__}.{attribute} needs an instance, and {self!r} makes none; make it a "
                "staticmethod or a classmethod"
            )
        return getattr(implementation, attribute)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__.get('name')!r})"

    @staticmethod
    def parse_params(config: Any, params: type[Params]) -> Params:
        """The parameters of an implementation as an instance of its dataclass.

        Args:
            config: an instance of `params`, returned as it is; a dict of its fields; or None for the defaults.
            params: a dataclass. Its `__post_init__` may check values.

        Raises:
            ValueError: keys that are no fields.
            TypeError: `params` is no dataclass, or `config` is something else, or lacks a field without a default.
        """
        if not (inspect.isclass(params) and dataclasses.is_dataclass(params)):
            raise TypeError(f"params must be a dataclass, not {params!r}")
        if isinstance(config, params):
            return config
        if config is None:
            return params()
        if not isinstance(config, dict):
            raise TypeError(
                f"config must be a dict, None or an instance of {params.__name__}, not {type(config).__name__}"
            )
        allowed = [field.name for field in dataclasses.fields(params) if field.init]
        unknown = [key for key in config if key not in allowed]
        if unknown:
            given, fields = ", ".join(map(repr, unknown)), ", ".join(map(repr, allowed))
            raise ValueError(f"{params.__name__} has no fields {given}; it has {fields}")
        return params(**config)


class PluginConfig(dict[str, Any]):
    """What a user gives for a plugin: its `name`, and the fields of its parameters."""

    @property
    def name(self) -> str:
        """Which implementation.

        Raises:
            ValueError: there is no name.
        """
        name = self.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"a plugin's configuration needs a 'name'; given {dict(self)!r}")
        return name


def get_plugin_config(config: Mapping[str, Any] | None) -> PluginConfig | None:
    """Wrap a top-level parameter; None stays None. Only `name` is looked at: the implementation parses the rest.

    Raises:
        TypeError: neither a mapping nor None.
        ValueError: a mapping without a name.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(f"a plugin's configuration must be a mapping or None, not {type(config).__name__}")
    wrapped = PluginConfig(config)
    _ = wrapped.name
    return wrapped


def ensure_methods_implemented(cls: type) -> None:
    """For the `__init_subclass__` of an abstract base: refuse a concrete class in which abstract methods are left.

    Such classes are never instantiated, which is when Python itself would look. A class that declares abstract methods
    of its own is a base in turn, and is let through.

    Raises:
        TypeError: it names the class and the methods.
    """
    if any(getattr(member, "__isabstractmethod__", False) for member in vars(cls).values()):
        return
    missing = [
        name for name in dir(cls) if getattr(inspect.getattr_static(cls, name, None), "__isabstractmethod__", False)
    ]
    if missing:
        raise TypeError(f"class {cls.__qualname__} does not implement {', '.join(missing)}")
