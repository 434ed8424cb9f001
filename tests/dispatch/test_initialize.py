from __future__ import annotations

import sys
import threading

import pytest
import torch

from layout_kernels.dispatch import BackendModule
from layout_kernels.dispatch.catalog import discover, missing_requirement
from layout_kernels.dispatch.runtime import device_type

VARIABLE = "LAYOUT_KERNELS_OVERRIDE_SCALE"


def names(bindings):
    return {operation: kernel.spec.name for operation, kernel in bindings.items()}


def test_the_highest_priority_wins_then_the_first_name(world):
    world.simple("scale", low=1, zeta=5, alpha=5)
    world.simple("shift")
    bindings = world.runtime.initialize("cpu")
    assert names(bindings) == {"scale": "alpha.scale", "shift": "reference.shift"}
    assert bindings["scale"].function() == "alpha.scale"


def test_the_mapping_is_read_only_and_the_same_for_the_same_configuration(world):
    world.simple("scale", fast=1)
    bindings = world.runtime.initialize("cpu", overrides={"scale": "fast"})
    assert world.runtime.initialize("cpu", "eager", {"scale": "fast"}) is bindings
    assert world.runtime.initialize(torch.device("cpu"), overrides={"scale": "fast"}) is bindings
    with pytest.raises(TypeError):
        bindings["scale"] = None
    with pytest.raises(TypeError):
        bindings["scale"].excluded["x"] = "y"


@pytest.mark.parametrize(
    ("mode", "overrides"), [("eager", {"scale": "reference"}), ("aclgraph", {"scale": "reference"})]
)
def test_a_changed_configuration_of_a_device_in_use_is_an_error(world, mode, overrides):
    world.simple("scale", fast=1)
    bindings = world.runtime.initialize("cpu")
    with pytest.raises(RuntimeError, match=r"cpu is in use with mode eager.*start a new process"):
        world.runtime.initialize("cpu", mode, overrides)
    assert world.runtime.initialize("cpu") is bindings
    assert world.runtime.functions("scale")["cpu"] is bindings["scale"].function


def test_a_changed_environment_is_a_changed_configuration(world, monkeypatch):
    world.simple("scale", fast=1)
    world.runtime.initialize("cpu")
    monkeypatch.setenv(VARIABLE, "reference")
    with pytest.raises(RuntimeError, match=r"overrides {'scale': 'reference'}"):
        world.runtime.initialize("cpu")


def test_the_environment_beats_the_argument(world, monkeypatch):
    world.simple("scale", fast=1, slow=0)
    monkeypatch.setenv(VARIABLE, "slow")
    assert names(world.runtime.initialize("cpu", overrides={"scale": "reference"})) == {"scale": "slow.scale"}


def test_an_empty_variable_is_no_override(world, monkeypatch):
    world.simple("scale", fast=1, slow=0)
    monkeypatch.setenv(VARIABLE, "")
    assert names(world.runtime.initialize("cpu", overrides={"scale": "slow"})) == {"scale": "slow.scale"}


def test_an_override_does_not_reach_the_meta_device(world, monkeypatch):
    world.simple("scale", fast=1)
    monkeypatch.setenv(VARIABLE, "fast")
    assert names(world.runtime.initialize("meta")) == {"scale": "reference.scale"}
    assert names(world.runtime.initialize("cpu")) == {"scale": "fast.scale"}


def test_an_exact_name_beats_a_solution(world):
    world.add("scale", BackendModule(".a", "cpu"), BackendModule(".b", "cpu"))
    world.backend("scale", ".a", name="first", solution="second", priority=9)
    world.backend("scale", ".b", name="second", solution="other")
    assert names(world.runtime.initialize("cpu", overrides={"scale": "second"})) == {"scale": "second"}


def test_a_solution_takes_its_best_implementation(world):
    world.add("scale", BackendModule(".a", "cpu"), BackendModule(".b", "cpu"), BackendModule(".c", "cpu"))
    world.backend("scale", ".a", solution="native", priority=1)
    world.backend("scale", ".b", solution="native", priority=2)
    world.backend("scale", ".c", solution="other", priority=3)
    assert names(world.runtime.initialize("cpu", overrides={"scale": "native"})) == {"scale": "b.scale"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scales": "fast"}, "unknown operation 'scales'; there are shift, scale"),
        ({"scale": "nonsense"}, r"override 'nonsense' selects nothing for scale on cpu.*choices: fast\.scale"),
        ({"scale": "other.scale"}, r"not available: other\.scale, does not declare execution mode eager"),
    ],
)
def test_a_wrong_override_fails_before_anything_is_published(world, overrides, message):
    world.simple("shift")
    world.simple("scale", fast=1, other=2)
    world.backend("scale", ".other", priority=2, modes=("compile",))
    with pytest.raises(ValueError, match=message):
        world.runtime.initialize("cpu", overrides=overrides)
    assert world.runtime.bound_devices() == ()
    assert dict(world.runtime.functions("shift")) == {}
    # Nothing was frozen either, and a right configuration goes through.
    assert names(world.runtime.initialize("cpu", overrides={"scale": "fast"}))["scale"] == "fast.scale"


def test_a_variable_of_an_unknown_operation_lists_the_variables(world, monkeypatch):
    world.simple("scale")
    monkeypatch.setenv("LAYOUT_KERNELS_OVERRIDE_SCALES", "fast")
    with pytest.raises(ValueError, match=f"SCALES names an unknown operation; the variables are {VARIABLE}"):
        world.runtime.initialize("cpu")


def test_a_missing_package_is_recorded_and_its_backend_not_imported(world):
    world.add("scale", BackendModule(".plain", "cpu"), BackendModule(".fast", "cpu", ("no_such_package",)))
    world.backend("scale", ".plain")
    world.write("scale", ".fast", "raise RuntimeError('imported')")
    plan = world.runtime.initialize("cpu")["scale"]
    assert plan.spec.name == "plain.scale"
    assert dict(plan.excluded) == {"fast": "requires no_such_package, which is not installed"}


def test_an_override_that_names_what_is_missing_says_what_is_missing(world):
    world.add("scale", BackendModule(".plain", "cpu"), BackendModule(".fast", "cpu", ("no_such_package",)))
    world.backend("scale", ".plain")
    with pytest.raises(ValueError, match="not available: fast, requires no_such_package, which is not installed"):
        world.runtime.initialize("cpu", overrides={"scale": "fast"})


def test_an_extension_that_was_not_built_is_recorded_and_one_that_does_not_load_raises(world, monkeypatch):
    from layout_kernels import _ops

    monkeypatch.setattr(_ops, "EXTENSIONS", {})
    assert "built without the native extension for cpu" in missing_requirement(("extension:cpu",))
    monkeypatch.setattr(_ops, "EXTENSIONS", {"cpu": "no_such_extension"})
    with pytest.raises(ImportError, match="no_such_extension"):
        missing_requirement(("extension:cpu",))
    world.add("scale", BackendModule(".plain", "cpu"), BackendModule(".fast", "cpu", ("extension:cpu",)))
    world.backend("scale", ".plain")
    with pytest.raises(ImportError, match="no_such_extension"):
        world.runtime.initialize("cpu")
    assert world.runtime.bound_devices() == ()


def test_a_package_that_is_blocked_or_stood_in_for_is_judged_by_what_an_import_would_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "stand_in", type(sys)("stand_in"))
    sys.modules["stand_in"].__spec__ = None
    assert missing_requirement(("stand_in",)) is None
    monkeypatch.setitem(sys.modules, "stand_in", None)
    assert missing_requirement(("stand_in",)) == "requires stand_in, which is not installed"
    with pytest.raises(ValueError, match="name a top-level package or extension:<kind>"):
        missing_requirement(("torch.nn",))


def test_a_backend_that_fails_to_import_propagates_and_can_be_tried_again(world):
    world.add("shift", BackendModule(".plain", "cpu"))
    world.backend("shift", ".plain")
    world.add("scale", BackendModule(".broken", "cpu"), BackendModule(".plain", "cpu"))
    world.backend("scale", ".plain")
    world.backend("scale", ".broken", priority=9)
    path = world.folder / world.entries["scale"].package / "broken.py"
    good = path.read_text()
    path.write_text(good + "\nraise OSError('hash does not match')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="hash does not match"):
            world.runtime.initialize("cpu")
        assert world.runtime.bound_devices() == ()
    path.write_text(good)
    assert names(world.runtime.initialize("cpu")) == {"shift": "plain.shift", "scale": "broken.scale"}


def test_devices_are_bound_independently_and_only_their_backends_are_imported(world):
    every = ("eager", "compile", "cudagraph", "aclgraph")
    world.add("scale", BackendModule(".reference", "any"), BackendModule(".c", "cpu"), BackendModule(".g", "cuda"))
    world.backend("scale", ".reference", device="any", modes=every, priority=-1)
    world.backend("scale", ".c")
    world.backend("scale", ".g", device="cuda", modes=("cudagraph",))
    cpu = world.runtime.initialize("cpu")
    assert not world.is_imported("scale", ".g")
    cuda = world.runtime.initialize("cuda:1", "cudagraph")
    assert (names(cpu), names(cuda)) == ({"scale": "c.scale"}, {"scale": "g.scale"})
    assert world.runtime.initialize("cpu") is cpu
    assert world.runtime.bound_devices() == ("cpu", "cuda")
    assert names(world.runtime.initialize("npu", "aclgraph")) == {"scale": "reference.scale"}


def test_every_operation_must_be_prepared_or_none_is(world):
    world.simple("scale")
    world.add("shift", BackendModule(".plain", "cpu"))
    world.backend("shift", ".plain", modes=("compile",))
    with pytest.raises(ValueError, match="no implementation of shift on cpu in mode eager; choices: none"):
        world.runtime.initialize("cpu")
    assert dict(world.runtime.functions("scale")) == {}


def test_another_version_of_a_contract_is_not_selected(world):
    world.add("scale", BackendModule(".plain", "cpu"), version=2)
    text = "from layout_kernels.dispatch import OpContract, register_kernel\n"
    text += "register_kernel(name='old', contract=OpContract('scale', 1, (), False, 'exact'), device='cpu',\n"
    text += "    execution_modes=('eager',), input_domain='all', solution='old')(len)\n"
    world.write("scale", ".plain", text)
    with pytest.raises(ValueError, match="not available: old, fulfils another contract: version is 1, not 2"):
        world.runtime.initialize("cpu")


def test_first_use_binds_the_device_among_those_that_declare_eager_and_compile(world):
    world.simple("scale", eager_only=9, both=1)
    world.backend("scale", ".eager_only", priority=9, modes=("eager",))
    assert world.runtime.functions("scale")["cpu"]() == "both.scale"
    plan = world.runtime.prepared("scale", "cpu")
    assert "does not declare execution mode compile" in plan.excluded["eager_only.scale"]
    with pytest.raises(RuntimeError, match="is in use with mode eager and compile"):
        world.runtime.initialize("cpu")


def test_asking_by_name_for_what_the_first_use_bound_is_no_change(world):
    world.simple("scale", fast=1)
    world.runtime.functions("scale")["cpu"]
    bindings = world.runtime.initialize("cpu")
    assert bindings["scale"] is world.runtime.prepared("scale")
    with pytest.raises(RuntimeError, match="aclgraph"):
        world.runtime.initialize("cpu", "aclgraph")


def test_prepared_asks_which_device_when_several_are_in_use(world):
    world.simple("scale")
    assert world.runtime.prepared("scale").spec.name == "reference.scale"
    assert world.runtime.bound_devices() == ("cpu",)
    world.runtime.initialize("cuda")
    with pytest.raises(ValueError, match="name the device: cpu, cuda are all in use"):
        world.runtime.prepared("scale")
    assert world.runtime.prepared("scale", "cuda").spec.name == "reference.scale"
    with pytest.raises(ValueError, match="unknown operation 'scales'; there are scale"):
        world.runtime.prepared("scales", "cpu")


def test_a_follower_takes_the_solution_of_its_leader_where_it_offers_it(world):
    world.simple("scale", fast=5, slow=1)
    world.add("scale_backward", *world.entries["scale"].operation.backends[:2], follows="scale")
    world.backend("scale_backward", ".reference", device="any", priority=-1000)
    world.backend("scale_backward", ".fast", priority=5)
    for target, expected in ((None, "fast.scale_backward"), ("reference", "reference.scale_backward")):
        runtime = type(world.runtime)(world.registries, lambda: world.entries)
        world.registries.of("cpu").frozen = world.registries.of("any").frozen = False
        bound = runtime.initialize("cpu", overrides={"scale": target} if target else None)
        assert names(bound)["scale_backward"] == expected
    runtime = type(world.runtime)(world.registries, lambda: world.entries)
    bound = runtime.initialize("cpu", overrides={"scale": "slow", "scale_backward": "reference"})
    assert names(bound) == {"scale": "slow.scale", "scale_backward": "reference.scale_backward"}


def test_threads_that_use_a_device_first_at_once_get_one_binding(world):
    world.simple("scale", fast=1)
    start, found = threading.Barrier(8), []

    def use():
        start.wait()
        found.append(world.runtime.functions("scale")["cpu"])

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize(("given", "expected"), [("cpu", "cpu"), ("cuda:3", "cuda"), (torch.device("meta"), "meta")])
def test_devices_are_known_by_their_type(given, expected):
    assert device_type(given) == expected


def test_wrong_devices_and_modes_are_refused(world):
    world.simple("scale")
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        world.runtime.initialize("gpu")
    with pytest.raises(TypeError, match=r"device must be a name such as 'cpu' or a torch\.device, not int"):
        world.runtime.initialize(0)
    with pytest.raises(ValueError, match="execution_mode must be one of eager, compile, cudagraph, aclgraph"):
        world.runtime.initialize("cpu", "graph")


def test_the_catalog_refuses_a_module_without_an_operation():
    with pytest.raises(TypeError, match="must define OPERATION"):
        discover((".arguments",))
    with pytest.raises(ValueError, match="operation 'rms_norm' is defined by"):
        discover((".rms_norm", ".rms_norm"))
