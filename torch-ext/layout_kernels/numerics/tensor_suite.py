"""Makes the suite of an operation on tensors from its list of cases and its functions. Knows no operation by name."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from ..dispatch import KernelSpec, OpContract, PreparedKernel
from .arguments import positive
from .cases import Case
from .checks import digest, moved, tensors_in, validate_call, whole_memory
from .preparation import described_result, entry_of, select_kernel
from .suite import OperationSuite, PreparedCase
from .tolerance import explain_reference, in_float64

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Option:
    """A setting of a case that the command line may vary: `--<flag> VALUE...`; without choices numbers from 1 on."""

    flag: str
    setting: str
    default: Sequence[Any]
    choices: Sequence[str] | None = None
    help: str = ""


@dataclass(frozen=True)
class Grid:
    """The cases of real sizes: every combination of rows, widths, dtypes and options."""

    rows: Sequence[int] = (1, 16, 256)
    widths: Sequence[int] = (1024, 4096)
    dtypes: Sequence[str] = ("bfloat16",)
    options: Sequence[Option] = ()
    width_factor: int = 1  # elements of the main input's last dimension for each of a width


@dataclass(frozen=True)
class Peer:
    """Something else that computes the operation: its name, how to load it, and why it does not take a case."""

    name: str
    load: Callable[[], Callable[..., Any]]
    refuses: Callable[[Case], str | None] | None = None


@dataclass(frozen=True)
class Rules:
    """What is particular to one operation.

    Attributes:
        operation: see `OperationSuite`.
        listed: the cases that look for faults: shapes, layouts, dtypes, values.
        arguments: makes the operation's arguments on the CPU.
        compare: (result, arguments) says why a result does not pass, or None.
        reference: loads the reference.
        exact: the operation in float64, written apart from the reference; what the reference itself is judged by.
        flops: of one call, where products dominate; None: memory does.
    """

    operation: str
    listed: Sequence[Case]
    arguments: Callable[[Case], tuple[Any, ...]]
    compare: Callable[..., str | None]
    reference: Callable[[], Callable[..., Any]]
    exact: Callable[..., Any]
    grid: Grid = field(default_factory=Grid)
    flops: Callable[[tuple[Any, ...]], float] | None = None
    peers: Sequence[Peer] = ()


def make_suite(rules: Rules) -> OperationSuite:
    """The suite of an operation."""

    def prepare(device: str, mode: str, implementation: str | None) -> PreparedKernel:
        return select_kernel(rules.operation, device, mode, implementation)

    return OperationSuite(
        operation=rules.operation,
        add_arguments=lambda parser: _add_arguments(parser, rules.grid),
        cases=lambda options: [TensorCase(case, rules, options.device) for case in _cases(options, rules)],
        prepare=prepare,
        peers=lambda _, mode: _peers(rules, mode),
    )


def _add_arguments(parser: argparse.ArgumentParser, grid: Grid) -> None:
    group = parser.add_argument_group(
        "cases", "Sizes or settings given here select every combination of them; what is not given has its default."
    )
    group.add_argument(
        "--cases", choices=("listed", "grid"), help="listed: those that look for faults; grid: real sizes"
    )
    group.add_argument("--rows", nargs="+", type=int, metavar="N", help=f"default: {_words(grid.rows)}")
    group.add_argument("--widths", nargs="+", type=int, metavar="N", help=f"default: {_words(grid.widths)}")
    group.add_argument("--dtypes", nargs="+", choices=DTYPES, metavar="NAME", help=f"default: {_words(grid.dtypes)}")
    for option in grid.options:
        kind: Any = str if option.choices else positive
        text = f"{option.help or 'of ' + _words(option.choices or ())}; default: {_words(option.default)}"
        group.add_argument(
            f"--{option.flag}", nargs="+", type=kind, choices=option.choices, metavar="VALUE", help=text
        )


def _words(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))


def _cases(options: argparse.Namespace, rules: Rules) -> list[Case]:
    grid = rules.grid
    flags = {"rows": grid.rows, "widths": grid.widths, "dtypes": grid.dtypes}
    flags |= {option.flag: option.default for option in grid.options}
    given = {flag: getattr(options, flag.replace("-", "_")) for flag in flags}
    asked = [f"--{flag}" for flag, values in given.items() if values is not None]
    if options.cases == "listed" and asked:
        raise ValueError(f"{', '.join(asked)} ask for a grid; leave --cases listed out")
    if options.cases != "grid" and not asked:
        return list(rules.listed)
    rows, widths, dtypes, *rest = (dict.fromkeys(given[flag] or default) for flag, default in flags.items())
    if min((*rows, *widths)) < 1:
        raise ValueError("--rows and --widths must be at least 1")
    names = [option.setting for option in grid.options]
    return [
        Case((row, width * grid.width_factor), dtype, settings=dict(zip(names, values, strict=True)))
        for width, row, dtype, *values in product(widths, rows, dtypes, *rest)
    ]


def _peers(rules: Rules, mode: str) -> list[PreparedKernel]:
    """Peers run eagerly; in other modes there are none."""
    if mode != "eager":
        return []
    contract = entry_of(rules.operation).operation.contract
    return [_as_plan(peer, contract) for peer in rules.peers] + [_inductor(rules, contract)]


def _as_plan(peer: Peer, contract: OpContract) -> PreparedKernel:
    spec = KernelSpec(f"peer.{peer.name}", contract, "any", ("eager",), "see its own documentation", "peer")
    return PreparedKernel(spec, peer.load(), {})


def _inductor(rules: Rules, contract: OpContract) -> PreparedKernel:
    import torch

    # One graph, or an error: after too many shapes torch.compile would otherwise run the function as it is.
    torch._dynamo.reset()
    compiled = torch.compile(rules.reference(), fullgraph=True, dynamic=False)
    return _as_plan(Peer(f"torch.compile.{rules.operation}", lambda: compiled), contract)


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }


class TensorCase:
    """A `KernelCase` of an operation on tensors."""

    def __init__(self, case: Case, rules: Rules, device: str) -> None:
        self.case, self.rules, self.device = case, rules, device
        # Digests of results that passed, with the seed of their inputs and whether the stricter judgement was made.
        self._passed: set[tuple[str, int, bool]] = set()

    @property
    def case_id(self) -> str:
        """See `Case.case_id`."""
        return self.case.case_id

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The fields of the `Case`."""
        case = self.case
        known = {"shape": list(case.shape), "dtype": case.dtype, "layout": case.layout, "values": case.values}
        return {**known, **case.settings, "seed": case.seed}

    def unsupported_reason(self, plan: PreparedKernel) -> str | None:
        """What a peer says; the package's own implementations take every case, or hand it on as they declare."""
        peers = {f"peer.{peer.name}": peer for peer in self.rules.peers}
        peer = peers.get(plan.spec.name)
        return None if peer is None or peer.refuses is None else peer.refuses(self.case)

    def prepare(self, plan: PreparedKernel) -> PreparedCase:
        """Inputs from the case's seed, made on the CPU and moved with their strides."""
        import torch

        arguments = _Arguments(self.case, self.rules, self.device)
        reference = self.rules.reference()
        as_operator = isinstance(plan.function, torch._ops.OpOverload)
        description = described_result(self.rules.operation, reference, arguments.here, as_operator=as_operator)

        def function() -> Any:
            return plan.function(*arguments.there)

        def validate(called: Callable[[], Any]) -> Mapping[str, Any]:
            return validate_call(
                called,
                inputs=arguments.tensors(),
                mutates=plan.spec.contract.mutates,
                aliases_inputs=plan.spec.contract.aliases_inputs,
                device=torch.device(self.device).type,
                expected=description,
                judge=lambda result: self._judge(plan, result, arguments),
            )

        return PreparedCase(function, validate, self._metadata(arguments, description), arguments.change)

    def _judge(self, plan: PreparedKernel, result: Any, arguments: _Arguments) -> str | None:
        is_reference = plan.spec.solution == "reference"
        key = digest(result), arguments.seed, is_reference
        if key in self._passed:
            return None
        reason = None
        if is_reference:
            # A comparison of the reference with itself would show nothing.
            exact = self.rules.exact(*in_float64(arguments.here))
            reason = explain_reference(result, exact, arguments.here)
        reason = reason or self.rules.compare(result, arguments.here)
        if reason is None:
            self._passed.add(key)
        return reason

    def _metadata(self, arguments: _Arguments, description: Any) -> dict[str, Any]:
        moved_bytes = [*arguments.tensors().values(), *(tensor for _, tensor in tensors_in(description))]
        found: dict[str, Any] = {
            "inputs": {name: _describe(tensor) for name, tensor in arguments.tensors().items()},
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in moved_bytes),
            "size": next(iter(arguments.tensors().values())).numel(),
        }
        if self.rules.flops is not None:
            found["flops"], found["dtype"] = self.rules.flops(arguments.here), self.case.dtype
        return found


class _Arguments:
    """The arguments of a case, here on the CPU and there on the device; the two never share memory."""

    def __init__(self, case: Case, rules: Rules, device: str) -> None:
        self._case, self._make, self._device = case, rules.arguments, device
        self._names = list(inspect.signature(rules.reference()).parameters)
        self.seed = case.seed
        self.here = self._make(case)
        self.there = self._on_device(case)

    def _on_device(self, case: Case) -> tuple[Any, ...]:
        import torch

        return tuple(
            moved(value, self._device) if isinstance(value, torch.Tensor) else value for value in self._make(case)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those on the device, by name."""
        import torch

        pairs = zip(self._names, self.there, strict=True)
        return {name: value for name, value in pairs if isinstance(value, torch.Tensor)}

    def change(self, seed: int) -> None:
        """Other values in the same memory."""
        import torch

        case = replace(self._case, seed=self._case.seed + seed)
        self.seed = case.seed
        self.here = self._make(case)
        for old, new in zip(self.there, self._make(case), strict=True):
            if isinstance(old, torch.Tensor):
                whole_memory(old).copy_(whole_memory(new))
