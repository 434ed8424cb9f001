"""Which implementation runs: overrides, compatibility, priority. Reads what is declared, never a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .contract import ANY_DEVICE, OpContract, PreparedKernel
from .registry import RegisteredKernel

PREFIX = "LAYOUT_KERNELS_OVERRIDE_"


def parse_overrides(
    environ: Mapping[str, str], overrides: Mapping[str, str] | None, operations: Iterable[str]
) -> dict[str, str]:
    """The override of each operation that has one: the environment's before the argument's. Empty values are none.

    Raises:
        ValueError: an override of an operation that is not in the catalog.
    """
    known = {operation.upper(): operation for operation in operations}
    chosen: dict[str, str] = {}
    for operation, target in (overrides or {}).items():
        if operation not in known.values():
            raise ValueError(f"override of an unknown operation {operation!r}; there are {', '.join(known.values())}")
        chosen[operation] = target
    for variable, target in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX)
        if name not in known:
            choices = ", ".join(PREFIX + operation for operation in known)
            raise ValueError(f"{variable} names an unknown operation; the variables are {choices}")
        chosen[known[name]] = target or chosen.get(known[name], "")
    return {operation: target for operation, target in chosen.items() if target}


def incompatibility(kernel: RegisteredKernel, contract: OpContract, device: str, modes: Iterable[str]) -> str | None:
    """Why an implementation cannot be selected, or None."""
    spec = kernel.spec
    if spec.contract != contract:
        fields = [name for name in vars(contract) if getattr(spec.contract, name) != getattr(contract, name)]
        differences = (f"{n} is {getattr(spec.contract, n)!r}, not {getattr(contract, n)!r}" for n in fields)
        return f"fulfils another contract: {'; '.join(differences)}"
    if spec.device not in (device, ANY_DEVICE):
        return f"runs on {spec.device}, not on {device}"
    missing = [mode for mode in modes if mode not in spec.execution_modes]
    if missing:
        return (
            f"does not declare execution mode {' and '.join(missing)}; it declares {', '.join(spec.execution_modes)}"
        )
    return None


def select(
    contract: OpContract,
    candidates: Iterable[RegisteredKernel],
    device: str,
    modes: tuple[str, ...],
    *,
    target: str | None = None,
    preferred_solution: str | None = None,
    excluded: Mapping[str, str] | None = None,
) -> PreparedKernel:
    """The implementation of one operation for a device type and execution modes.

    Args:
        contract: of the operation.
        candidates: what is registered for the device; other operations' implementations among them are left aside.
        device: device type.
        modes: every one must be declared.
        target: an override, a full name or a solution; the full name comes first.
        preferred_solution: comes before priority, where there is one of it.
        excluded: backends that were not imported, with reasons.

    Raises:
        ValueError: an override that names nothing, or nothing compatible; or no implementation is left.
    """
    reasons = dict(excluded or {})
    compatible: list[RegisteredKernel] = []
    mine = [kernel for kernel in candidates if kernel.spec.contract.operation == contract.operation]
    for kernel in mine:
        reason = incompatibility(kernel, contract, device, modes)
        if reason is None:
            compatible.append(kernel)
        else:
            reasons[kernel.spec.name] = reason
    compatible.sort(key=lambda k: (k.spec.solution != preferred_solution, -k.spec.priority, k.spec.name))
    eligible = compatible if target is None else _matching(compatible, target)
    if not eligible:
        raise ValueError(_explain(contract.operation, device, modes, target, compatible, reasons))
    return PreparedKernel(eligible[0].spec, eligible[0].function, MappingProxyType(reasons))


def _matching(kernels: list[RegisteredKernel], target: str) -> list[RegisteredKernel]:
    exact = [kernel for kernel in kernels if kernel.spec.name == target]
    return exact or [kernel for kernel in kernels if kernel.spec.solution == target]


def _explain(
    operation: str,
    device: str,
    modes: tuple[str, ...],
    target: str | None,
    compatible: list[RegisteredKernel],
    reasons: Mapping[str, str],
) -> str:
    where = f"{operation} on {device} in mode {' and '.join(modes)}"
    what = f"no implementation of {where}" if target is None else f"override {target!r} selects nothing for {where}"
    choices = ", ".join(f"{k.spec.name} (solution {k.spec.solution})" for k in compatible) or "none"
    kind = "" if target is None else target.partition(".")[0]
    if "." in (target or "") and kind != device and not any(k.spec.name == target for k in compatible):
        what += f": by its name it is for {kind}, and an override holds for every device that is used"
    left_out = "".join(f"; not available: {name}, {reason}" for name, reason in reasons.items())
    return f"{what}; choices: {choices}{left_out}"
