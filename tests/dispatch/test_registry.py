from __future__ import annotations

import dataclasses

import pytest

from layout_kernels.dispatch import KernelRegistry, KernelSpec, OpContract, register_kernel

CONTRACT = OpContract("scale", 1, (), False, "exact")


def spec(name="cpu.scale", device="cpu", **changes):
    return dataclasses.replace(KernelSpec(name, CONTRACT, device, ("eager",), "all", "native"), **changes)


def register(name="cpu.scale", device="cpu", **changes):
    fields = {"contract": CONTRACT, "execution_modes": ("eager",), "input_domain": "all", "solution": "native"}
    return register_kernel(name=name, device=device, **{**fields, **changes})


def test_the_decorator_returns_the_callable_itself_and_records_what_it_declares(world):
    @register(priority=7, execution_modes=["eager", "compile"])
    def scale(x):
        return x

    found = world.registries.of("cpu").get("cpu.scale")
    assert found.function is scale
    assert found.spec == spec(execution_modes=("eager", "compile"), priority=7)
    assert found.module == __name__


def test_an_existing_callable_is_registered_without_a_wrapper(world):
    existing = len
    assert register()(existing) is existing
    assert world.registries.of("cpu").get("cpu.scale").function is existing


def test_priority_is_0_unless_given(world):
    register()(len)
    assert world.registries.of("cpu").get("cpu.scale").spec.priority == 0


@pytest.mark.parametrize("device", ["cpu", "any", "cuda"])
def test_a_duplicate_name_is_an_error_on_every_device(world, device):
    register()(len)
    with pytest.raises(ValueError, match=r"'cpu\.scale' is already registered for cpu"):
        register(device=device)(max)
    assert world.registries.of("cpu").get("cpu.scale").function is len


def test_a_registration_after_freeze_is_an_error():
    registry = KernelRegistry("cpu")
    registry.freeze()
    with pytest.raises(RuntimeError, match=r"register before initialize\(\)"):
        registry.register(spec(), len, "here")
    assert list(registry) == []


def test_each_device_freezes_on_its_own(world):
    world.registries.of("cpu").freeze()
    register("cuda.scale", "cuda")(len)
    with pytest.raises(RuntimeError, match="frozen"):
        register()(len)


def test_get_of_an_unknown_name_lists_the_known_ones():
    registry = KernelRegistry("cpu")
    registry.register(spec(), len, "here")
    with pytest.raises(ValueError, match=r"no implementation 'cpu\.scal' .* registered: cpu\.scale"):
        registry.get("cpu.scal")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"contract": "scale"}, TypeError, "must be an OpContract, not str"),
        ({"execution_modes": "eager"}, TypeError, "a tuple of names, not the text 'eager'"),
        ({"execution_modes": ()}, ValueError, "must be some of eager, compile, cudagraph, aclgraph"),
        ({"execution_modes": ("eager", "graph")}, ValueError, "given \\('eager', 'graph'\\)"),
    ],
)
def test_what_is_declared_is_checked(world, changes, error, message):
    with pytest.raises(error, match=message):
        register(**changes)


def test_what_cannot_be_called_is_not_registered(world):
    with pytest.raises(TypeError, match="must be callable, not int"):
        register()(3)


def test_the_data_classes_are_frozen():
    for made in (CONTRACT, spec()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.version = 2


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"device": "gpu"}, ValueError, "unknown device 'gpu'"),
        ({"device": "cpu:0"}, ValueError, "given 'cpu:0': write 'cpu'"),
        ({"device": "cuda:1"}, ValueError, "given 'cuda:1': write 'cuda'"),
        ({"device": 3}, TypeError, "device must be a name"),
        ({"priority": "99"}, TypeError, r"priority must be a whole number, not str \('99'\)"),
        ({"priority": 1.5}, TypeError, "priority must be a whole number, not float"),
        ({"priority": True}, TypeError, "priority must be a whole number, not bool"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": None}, TypeError, "name must be text, not NoneType"),
        ({"solution": " "}, ValueError, "solution must not be empty"),
        ({"input_domain": 7}, TypeError, "input_domain must be text, not int"),
    ],
)
def test_a_field_that_could_never_be_selected_is_refused_when_it_is_registered(world, fields, error, message):
    with pytest.raises(error, match=message):
        register(**{"name": "cpu.scale", "device": "cpu", **fields})
    assert not list(world.registries.of("cpu"))


def test_the_other_register_kernel_is_named():
    class Kernel:
        pass

    with pytest.raises(TypeError, match=r"kernel_plugins\.register_kernel"):
        register_kernel(Kernel)


def test_modes_may_come_one_by_one(world):
    register(execution_modes=(mode for mode in ("eager", "compile")))(len)
    assert world.registries.of("cpu").get("cpu.scale").spec.execution_modes == ("eager", "compile")
