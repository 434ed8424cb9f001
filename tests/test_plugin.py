from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest

from layout_kernels.plugin import BasePlugin, PluginConfig, ensure_methods_implemented, get_plugin_config


class Timers(BasePlugin):
    pass


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch):
    monkeypatch.setattr(Timers, "_registry", {})


@dataclass
class Params:
    name: str = "wall"
    repeats: int = 3


def test_a_function_is_found_and_called_by_name():
    @Timers("wall").register()
    def wall(a, b=0):
        return a, b

    assert wall(1) == (1, 0)
    assert Timers("wall")(1, b=2) == (1, 2)


def test_a_name_is_resolved_at_each_use_and_not_before():
    router = Timers("later")
    with pytest.raises(ValueError, match=r"'later'.*not registered"):
        router()
    Timers("later").register()(lambda: 1)
    assert router() == 1


def test_registries_of_subclasses_are_separate():
    class Others(Timers):
        pass

    Timers("wall").register()(lambda: "timer")
    with pytest.raises(ValueError, match="not registered"):
        Others("wall")()
    Others("wall").register()(lambda: "other")
    assert (Timers("wall")(), Others("wall")()) == ("timer", "other")
    assert BasePlugin.names() == ()


def test_registering_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"Timers\(\)\.register\(\) needs a name"):
        Timers().register()


def test_an_unknown_name_lists_the_known_ones():
    Timers("cpu").register()(lambda: 0)
    Timers("cuda").register()(lambda: 0)
    with pytest.raises(ValueError, match="registered: 'cpu', 'cuda'"):
        Timers("gpu")()
    with pytest.raises(ValueError, match="registered: 'cpu', 'cuda'"):
        _ = Timers("gpu").start


def test_a_second_registration_warns_and_wins():
    Timers("wall").register()(lambda: 1)
    with pytest.warns(UserWarning, match=r"Timers\('wall'\) was registered before"):
        Timers("wall").register()(lambda: 2)
    assert Timers("wall")() == 2


def test_classes_are_used_without_an_instance():
    @Timers("cuda").register()
    class Events:
        unit = "ms"

        def __init__(self):
            raise RuntimeError("made an instance")

        @staticmethod
        def start(x):
            return x + 1

        @classmethod
        def label(cls):
            return cls.__name__

        def stop(self):
            return self

        @property
        def elapsed(self):
            return 0

    assert Timers("cuda").start(1) == 2
    assert Timers("cuda").label() == "Events"
    assert Timers("cuda").unit == "ms"
    with pytest.raises(TypeError, match="is the class"):
        Timers("cuda")()
    for attribute in ("stop", "elapsed"):
        with pytest.raises(AttributeError, match="needs an instance"):
            getattr(Timers("cuda"), attribute)


def test_a_function_has_no_methods():
    Timers("wall").register()(lambda: 1)
    with pytest.raises(AttributeError, match="is a function"):
        _ = Timers("wall").start


@pytest.mark.parametrize("value", [None, 3, "text"])
def test_what_cannot_be_called_is_not_registered(value):
    with pytest.raises(TypeError, match="takes a function or a class"):
        Timers("wall").register()(value)
    assert Timers.names() == ()


def test_hasattr_answers_instead_of_raising():
    @Timers("cuda").register()
    class Events:
        @staticmethod
        def start():
            return 1

    assert hasattr(Timers("cuda"), "start")
    assert not hasattr(Timers("cuda"), "missing")
    assert not hasattr(Timers("unknown"), "start")
    assert not hasattr(Timers("unknown"), "__array__")


def test_copies_pickles_and_repr_keep_the_name_and_resolve_nothing():
    router = Timers("unknown")
    for twin in (copy.copy(router), copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert type(twin) is Timers
        assert twin.name == "unknown"
    assert repr(router) == "Timers('unknown')"
    assert repr(Timers.__new__(Timers)) == "Timers(None)"


def test_params_from_an_instance_a_dict_and_nothing():
    given = Params(repeats=7)
    assert Timers.parse_params(given, Params) is given
    assert Timers.parse_params({"repeats": 5}, Params) == Params(repeats=5)
    assert Timers.parse_params(PluginConfig(name="cpu"), Params) == Params(name="cpu")
    assert Timers.parse_params(None, Params) == Params()


def test_unknown_keys_are_refused_with_both_lists():
    with pytest.raises(ValueError, match="'repeat', 'warm'; it has 'name', 'repeats'"):
        Timers.parse_params({"repeat": 1, "warm": 2, "name": "x"}, Params)


@pytest.mark.parametrize("config", [3, "wall", [("repeats", 1)], Timers])
def test_other_configurations_are_refused(config):
    with pytest.raises(TypeError, match="config must be a dict, None or an instance of Params"):
        Timers.parse_params(config, Params)


@pytest.mark.parametrize("params", [dict, Params(), 3])
def test_params_must_be_a_dataclass(params):
    with pytest.raises(TypeError, match="must be a dataclass"):
        Timers.parse_params({}, params)


def test_a_configuration_is_wrapped_and_asked_for_its_name():
    config = get_plugin_config({"name": "cuda", "any": 1})
    assert isinstance(config, PluginConfig)
    assert (config.name, config["any"]) == ("cuda", 1)
    assert get_plugin_config(None) is None
    for nameless in ({}, {"name": ""}, {"name": 3}):
        with pytest.raises(ValueError, match="needs a 'name'"):
            get_plugin_config(nameless)
    with pytest.raises(TypeError, match="must be a mapping or None, not str"):
        get_plugin_config("cuda")


def test_missing_methods_are_found_when_the_class_is_defined():
    class Base(ABC):
        def __init_subclass__(cls):
            super().__init_subclass__()
            ensure_methods_implemented(cls)

        @staticmethod
        @abstractmethod
        def start(): ...

        @classmethod
        @abstractmethod
        def stop(cls): ...

    with pytest.raises(TypeError, match="Half does not implement stop"):

        class Half(Base):
            @staticmethod
            def start():
                return 1

    class Whole(Base):
        @staticmethod
        def start():
            return 1

        @classmethod
        def stop(cls):
            return 2

    class Narrower(Base):
        @staticmethod
        @abstractmethod
        def pause(): ...

    assert (Whole.start(), Whole.stop()) == (1, 2)
    assert issubclass(Narrower, Base)


@pytest.mark.parametrize("hidden", ["register", "names", "parse_params", "name"])
def test_a_class_whose_methods_a_routing_object_would_hide_is_refused(hidden):
    kind = type("Wall", (), {hidden: staticmethod(lambda: 1), "other": staticmethod(lambda: 2)})
    with pytest.raises(ValueError, match=rf"Wall has {hidden}, which Timers\('wall'\)"):
        Timers("wall").register()(kind)
    assert Timers.names() == ()
