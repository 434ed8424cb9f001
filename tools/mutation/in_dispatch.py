"""Faults in the choice of an implementation, in the registries, and in what judges numbers and times."""

from __future__ import annotations

from tools.mutation.fault import Fault

PACKAGE = "torch-ext/layout_kernels"
CHOICE = ("dispatch/test_initialize.py",)

FAULTS = (
    Fault(
        "a priority is inverted",
        f"{PACKAGE}/**/selection.py",
        "-k.spec.priority",
        "k.spec.priority",
        CHOICE,
    ),
    Fault(
        "a backward does not follow its forward",
        f"{PACKAGE}/**/selection.py",
        "(k.spec.solution != preferred_solution, ",
        "(",
        CHOICE,
    ),
    Fault(
        "a contract's version is not compared",
        f"{PACKAGE}/**/selection.py",
        "if spec.contract != contract:",
        "if spec.contract.operation != contract.operation:",
        CHOICE,
    ),
    Fault(
        "the environment does not come before the argument",
        f"{PACKAGE}/**/selection.py",
        'chosen[known[name]] = target or chosen.get(known[name], "")',
        "chosen.setdefault(known[name], target)",
        CHOICE,
    ),
    Fault(
        "an execution mode that is not declared is no obstacle",
        f"{PACKAGE}/**/selection.py",
        "if mode not in spec.execution_modes]",
        "if mode not in spec.execution_modes[:0] and mode not in modes]",
        CHOICE,
    ),
    Fault(
        "an override in the environment is ignored",
        f"{PACKAGE}/**/runtime.py",
        "parse_overrides(os.environ, overrides, entries)",
        "parse_overrides({}, overrides, entries)",
        CHOICE,
    ),
    Fault(
        "an override for a device stops a shape from being asked for",
        f"{PACKAGE}/**/runtime.py",
        'if device == "meta":',
        'if device == "none":',
        CHOICE,
    ),
    Fault(
        "what is registered for any device can come too late",
        f"{PACKAGE}/**/runtime.py",
        "        self._registries.of(ANY_DEVICE).freeze()\n",
        "",
        CHOICE,
    ),
    Fault(
        "a backend that failed to import leaves what it registered",
        f"{PACKAGE}/**/runtime.py",
        "            self._registries.drop_unloaded()\n",
        "",
        CHOICE,
    ),
    Fault(
        "a name is unique for one device only",
        f"{PACKAGE}/dispatch/registry.py",
        "if registry.device != spec.device and spec.name in registry:",
        "if registry.device == spec.device and spec.name in registry:",
        ("dispatch/test_registry.py",),
    ),
    Fault(
        "another kernel under an operator's name is taken",
        f"{PACKAGE}/**/custom_ops.py",
        "        if known is not fn:\n",
        "        if known is None:\n",
        ("dispatch/test_custom_ops.py",),
    ),
    Fault(
        "a pending negation is not carried out",
        f"{PACKAGE}/**/launch.py",
        "            or tensor.is_neg()\n",
        "",
        ("dispatch/test_launch.py",),
    ),
    Fault(
        "a function mode is passed by",
        f"{PACKAGE}/**/launch.py",
        "        and _len_function_modes() == 0\n",
        "",
        ("dispatch/test_launch.py",),
    ),
    Fault(
        "a transform is passed by",
        f"{PACKAGE}/dispatch/launch.py",
        "        and _functorch_level() is None\n",
        "",
        ("dispatch/test_launch.py",),
    ),
    Fault(
        "forward-mode differentiation loses its tangent",
        f"{PACKAGE}/**/launch.py",
        "if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):",
        "if forward_ad._current_level > 0 and any(map(_has_tangent, args)):",
        ("ops/test_gradients.py", "dispatch/test_launch.py"),
    ),
    Fault(
        "registries of plugins are one",
        f"{PACKAGE}/**/plugin.py",
        "        super().__init_subclass__(**kwargs)\n        cls._registry = {}\n",
        "        super().__init_subclass__(**kwargs)\n",
        ("**/test_plugin.py",),
    ),
    Fault(
        "a bound that is not a number bounds everything",
        f"{PACKAGE}/numerics/tolerance.py",
        '    excess = torch.where(excess.isnan(), torch.full_like(excess, float("inf")), excess)\n',
        "",
        ("numerics/test_tolerance.py",),
    ),
    Fault(
        "a result with gaps passes",
        f"{PACKAGE}/numerics/tolerance.py",
        "    if not result.is_contiguous():\n",
        "    if result.is_meta:\n",
        ("numerics/test_tolerance.py",),
    ),
    Fault(
        "an input that was written to is not noticed",
        f"{PACKAGE}/numerics/checks.py",
        "if name not in allowed and not _same_bits(whole_memory(tensor), self._before[name]):",
        "if name in allowed and not _same_bits(whole_memory(tensor), self._before[name]):",
        ("numerics/test_verify.py",),
    ),
    Fault(
        "the last output of a graph is not judged",
        f"{PACKAGE}/numerics/verify.py",
        "for index in range(1, len(outputs)):",
        "for index in range(1, len(outputs) - 1):",
        ("numerics/test_verify.py",),
    ),
    Fault(
        "a rank is one too high",
        f"{PACKAGE}/benchmark/statistics.py",
        "math.ceil(share * len(ordered)) - 1)",
        "min(math.ceil(share * len(ordered)), len(ordered) - 1))",
        ("benchmark/test_measure.py",),
    ),
    Fault(
        "a baseline that becomes faster is no drift",
        f"{PACKAGE}/benchmark/measure.py",
        "if abs(found.drift[cache]) > settings.drift_limit:",
        "if found.drift[cache] > settings.drift_limit:",
        ("benchmark/test_measure.py",),
    ),
)
