"""Faults in the choice of an implementation, in the registries, and in what judges numbers and times."""

from __future__ import annotations

from tools.mutation.fault import Fault

PACKAGE = "torch-ext/layout_kernels/**/*.py"
CHOICE = ("dispatch/test_initialize*.py",)

FAULTS = (
    Fault(
        "a priority is inverted",
        PACKAGE,
        "-k.spec.priority",
        "k.spec.priority",
        CHOICE,
    ),
    Fault(
        "a backward does not follow its forward",
        PACKAGE,
        "(k.spec.solution != preferred_solution, ",
        "(",
        CHOICE,
    ),
    Fault(
        "a contract's version is not compared",
        PACKAGE,
        "if spec.contract != contract:",
        "if spec.contract.operation != contract.operation:",
        CHOICE,
    ),
    Fault(
        "the environment does not come before the argument",
        PACKAGE,
        'chosen[known[name]] = target or chosen.get(known[name], "")',
        "chosen.setdefault(known[name], target)",
        CHOICE,
    ),
    Fault(
        "an execution mode that is not declared is no obstacle",
        PACKAGE,
        "if mode not in spec.execution_modes]",
        "if mode not in spec.execution_modes[:0] and mode not in modes]",
        CHOICE,
    ),
    Fault(
        "an override in the environment is ignored",
        PACKAGE,
        "parse_overrides(os.environ, overrides, entries)",
        "parse_overrides({}, overrides, entries)",
        CHOICE,
    ),
    Fault(
        "an override for a device stops a shape from being asked for",
        PACKAGE,
        'if device == "meta":',
        'if device == "none":',
        CHOICE,
    ),
    Fault(
        "what is registered for any device can come too late",
        PACKAGE,
        "        self._registries.of(ANY_DEVICE).freeze()\n",
        "",
        CHOICE,
    ),
    Fault(
        "a backend that failed to import leaves what it registered",
        PACKAGE,
        "            self._registries.drop_unloaded()\n",
        "",
        CHOICE,
    ),
    Fault(
        "a name is unique for one device only",
        PACKAGE,
        "if registry.device != spec.device and spec.name in registry:",
        "if registry.device == spec.device and spec.name in registry:",
        ("dispatch/test_registry.py",),
    ),
    Fault(
        "another kernel under an operator's name is taken",
        PACKAGE,
        "        if known is not fn:\n",
        "        if known is None:\n",
        ("dispatch/test_custom_ops.py",),
    ),
    Fault(
        "a pending negation is not carried out",
        PACKAGE,
        "            or tensor.is_neg()\n",
        "",
        ("dispatch/test_launch.py",),
    ),
    Fault(
        "a function mode is passed by",
        PACKAGE,
        "        and _len_function_modes() == 0\n",
        "",
        ("dispatch/test_launch.py",),
    ),
    Fault(
        "a transform is passed by",
        PACKAGE,
        "        and _len_function_modes() == 0\n        and _functorch_level() is None\n",
        "        and _len_function_modes() == 0\n",
        ("dispatch/test_launch.py",),
    ),
    Fault(
        "forward-mode differentiation loses its tangent",
        PACKAGE,
        "if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):",
        "if forward_ad._current_level > 0 and any(map(_has_tangent, args)):",
        ("ops/test_gradients.py", "dispatch/test_launch.py"),
    ),
    Fault(
        "registries of plugins are one",
        PACKAGE,
        "        super().__init_subclass__(**kwargs)\n        cls._registry = {}\n",
        "        super().__init_subclass__(**kwargs)\n",
        ("**/test_plugin.py",),
    ),
    Fault(
        "a bound that is not a number bounds everything",
        PACKAGE,
        '    excess = torch.where(excess.isnan(), torch.full_like(excess, float("inf")), excess)\n',
        "",
        ("numerics/test_tolerance.py",),
    ),
    Fault(
        "a result with gaps passes",
        PACKAGE,
        "    if not result.is_contiguous():\n",
        "    if result.is_meta:\n",
        ("numerics/test_tolerance.py",),
    ),
    Fault(
        "an input that was written to is not noticed",
        PACKAGE,
        "if name not in allowed and not _same_bits(whole_memory(tensor), self._before[name]):",
        "if name in allowed and not _same_bits(whole_memory(tensor), self._before[name]):",
        ("numerics/test_verify.py",),
    ),
    Fault(
        "the last output of a graph is not judged",
        PACKAGE,
        "for index in range(1, len(outputs)):",
        "for index in range(1, len(outputs) - 1):",
        ("numerics/test_verify.py",),
    ),
    Fault(
        "a rank is one too high",
        PACKAGE,
        "math.ceil(share * len(ordered)) - 1)",
        "min(math.ceil(share * len(ordered)), len(ordered) - 1))",
        ("benchmark/test_measure.py",),
    ),
    Fault(
        "a baseline that becomes faster is no drift",
        PACKAGE,
        "if abs(found.drift[cache]) > settings.drift_limit:",
        "if found.drift[cache] > settings.drift_limit:",
        ("benchmark/test_measure.py",),
    ),
)
