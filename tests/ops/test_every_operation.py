"""What holds for every operation, over its own list of cases and every implementation that this machine can load."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from layout_kernels.dispatch import EXECUTION_MODES, OpContract

from .catalog import BACKWARD_OF, ENTRIES, OPERATIONS, implementations, operator, subjects, suite, tensors_of


@pytest.fixture
def poisoned_memory():
    """Memory that torch hands out holds NaN, so an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_complete(operation):
    entry = ENTRIES[operation].operation
    assert isinstance(entry.contract, OpContract)
    assert entry.contract.operation == operation
    assert entry.contract.numerical_mode
    public = getattr(operator(operation), operation)
    for section in ("Args:", "Returns:", "Raises:", "source:"):
        assert section in public.__doc__, f"the docstring of {operation} has no {section!r}"
    cases = suite(operation).CASES
    assert len({case.case_id for case in cases}) == len(cases)
    assert {case.dtype for case in cases} >= {"float32", "bfloat16"}
    assert any(0 in case.shape for case in cases)
    assert any(case.layout != "contiguous" for case in cases)
    assert any(case.values == "nonfinite" for case in cases)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_reference_stands_behind_every_operation_on_every_device(name):
    references = [kernel.spec for kernel in implementations(name) if kernel.spec.solution == "reference"]
    assert len(references) == 1
    assert references[0].device == "any"
    assert references[0].execution_modes == EXECUTION_MODES
    assert references[0].priority < 0


@pytest.mark.parametrize("name", ENTRIES)
def test_operator_and_implementations_take_the_same_arguments(name):
    forward = ENTRIES[name].operation.follows or name
    module = operator(forward)
    schema = (module.FORWARD if name == forward else module.BACKWARD)._schema
    names = [argument.name for argument in schema.arguments]
    for kernel in implementations(name):
        assert list(inspect.signature(kernel.function).parameters) == names, kernel.spec.name
    if name == forward:
        assert list(inspect.signature(getattr(module, name)).parameters) == names
    assert not any(argument.alias_info for argument in schema.arguments)


@pytest.mark.parametrize("subject", subjects())
@pytest.mark.usefixtures("poisoned_memory")
def test_implementations_agree_with_the_reference_and_leave_their_arguments_alone(subject):
    for kernel in implementations(subject.name):
        arguments = subject.arguments()
        before = [(tensor.clone(), tensor._version) for tensor in tensors_of(arguments)]
        result = kernel.function(*arguments)
        assert subject.compare(result, subject.arguments()) is None, kernel.spec.name
        for tensor, (content, version) in zip(tensors_of(arguments), before, strict=True):
            assert tensor._version == version, kernel.spec.name
            torch.testing.assert_close(tensor, content, rtol=0, atol=0, equal_nan=True)
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(arguments) if tensor.numel()}
        for tensor in tensors_of(result):
            assert not tensor.numel() or tensor.untyped_storage().data_ptr() not in storages, kernel.spec.name


@pytest.mark.parametrize("subject", subjects())
def test_the_operator_gives_what_the_selected_implementation_gives(subject):
    arguments = subject.arguments()
    result = subject.operator(*arguments)
    assert subject.compare(result, arguments) is None


@pytest.mark.parametrize("subject", subjects())
def test_fake_tensors_have_the_shape_strides_and_dtype_of_the_result(subject):
    arguments = subject.arguments()
    real = tensors_of(subject.operator(*arguments))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = tensors_of(subject.operator(*fakes))
    assert len(fake) == len(real)
    for expected, found in zip(real, fake, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


def _few():
    # opcheck traces the operator several times, for seconds; values make no difference to what it looks at.
    small = subjects(lambda case: case.values == "normal" and case.shape[-1] <= 96)
    by_operator = {}
    for parameter in small:
        by_operator.setdefault(parameter.values[0].name, []).append(parameter)
    return [parameter for found in by_operator.values() for parameter in found[:: max(1, len(found) // 3)][:3]]


@pytest.mark.parametrize("subject", _few())
def test_opcheck(subject):
    arguments = [
        value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value for value in subject.arguments()
    ]
    torch.library.opcheck(subject.operator, tuple(arguments))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_public_function_equals_the_operator_and_the_implementation(operation):
    module = operator(operation)
    for case in suite(operation).CASES[:6]:
        arguments = suite(operation).arguments(case)
        direct = getattr(module, operation)(*arguments)
        torch.testing.assert_close(direct, module.FORWARD(*arguments), rtol=0, atol=0, equal_nan=True)
        on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        described = getattr(module, operation)(*on_meta)
        assert (described.shape, described.dtype, described.device.type) == (direct.shape, direct.dtype, "meta")


def test_every_backward_has_a_forward():
    assert set(BACKWARD_OF) <= set(OPERATIONS)
