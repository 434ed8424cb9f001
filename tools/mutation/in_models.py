"""Faults in what a load does: registries, layouts, checkpoints, and what is recognised as which layer."""

from __future__ import annotations

from tools.mutation.fault import Fault

PACKAGE = "torch-ext/layout_kernels/**/*.py"
NAMES = ("models/test_stock_to_all_who_look_by_name.py",)
OBSERVERS = ("models/test_stock_to_observers.py",)
SAVERS = ("models/test_stock_to_savers_and_loaders.py",)
LOADS = ("models/test_loading_equals_stock.py",)
REFUSALS = ("models/test_refusals.py",)
LOAD_FAULTS = ("models/test_faults.py",)

PROCESS = (
    Fault(
        "class patches are not restored",
        PACKAGE,
        "for shared in (patches, names):",
        "for shared in (names,):",
        REFUSALS,
    ),
    Fault(
        "conversion rules are not restored",
        PACKAGE,
        "        stack.enter_context(_restored(lambda: _copied_conversions(conversion_mapping), put_conversions))\n",
        "",
        REFUSALS,
    ),
    Fault(
        "the list of devices is not restored",
        PACKAGE,
        "            stack.enter_context(_restored(devices.copy, partial(_refill, devices)))\n",
        "",
        REFUSALS,
    ),
    Fault(
        "recorders of outputs keep our classes",
        PACKAGE,
        "                recorded[name] = recorders\n",
        "",
        REFUSALS,
    ),
    Fault(
        "a constructor that raises leaves classes replaced",
        PACKAGE,
        "        modeling_utils.apply_patches = original\n        put_back()\n",
        "        modeling_utils.apply_patches = original\n",
        (*REFUSALS, *LOAD_FAULTS),
    ),
    Fault(
        "a KernelConfig serves one load only",
        PACKAGE,
        'deepcopy(kwargs["kernel_config"])',
        'kwargs["kernel_config"]',
        LOAD_FAULTS,
    ),
    Fault(
        "nn.Linear keeps its hub name",
        PACKAGE,
        "            delattr(nn.Linear, name)\n",
        "            pass\n",
        ("models/test_linear.py",),
    ),
    Fault(
        "weights on disk are written under our names",
        PACKAGE,
        'if "disk" in (load_config.device_map or {}).values():',
        'if "disk" in (load_config.device_map or {}):',
        LOADS,
    ),
    Fault(
        "a quantised model does not settle early",
        PACKAGE,
        'if getattr(model.config, "quantization_config", None) is not None:',
        'if getattr(model, "quantization_config", None) is not None:',
        OBSERVERS,
    ),
)

LAYOUTS = (
    Fault(
        "layouts settle in part where one is refused",
        PACKAGE,
        "            for layout in layouts:\n                layout.finish_loading()\n",
        "            for layout in layouts[:1]:\n                layout.finish_loading()\n",
        (*REFUSALS, *NAMES),
    ),
    Fault(
        "a fused parent keeps its class",
        PACKAGE,
        "                parent.__class__ = class_patches.unfused_class(type(parent))\n",
        "",
        NAMES,
    ),
    Fault(
        "settled modules forget their mode",
        PACKAGE,
        "module.train(layout.training if mode is None else mode)",
        "module.train(True)",
        OBSERVERS,
    ),
    Fault(
        "loaded weights may be initialised again",
        PACKAGE,
        "                part._is_hf_initialized = True  #",
        "                part._is_hf_initialized = False  #",
        SAVERS,
    ),
    Fault(
        "a missing weight is no error",
        PACKAGE,
        "        if missing:\n            wanted",
        "        if missing and not self.rules():\n            wanted",
        REFUSALS,
    ),
    Fault(
        "gate and up are swapped when a layout settles",
        PACKAGE,
        "mlp.gate_proj._parameters[kind], mlp.up_proj._parameters[kind] = _halves(merged)",
        "mlp.up_proj._parameters[kind], mlp.gate_proj._parameters[kind] = _halves(merged)",
        NAMES,
    ),
    Fault(
        "gate and up of different shapes are merged",
        PACKAGE,
        "if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):",
        "if (gate.bias is None) != (up.bias is None):",
        (*REFUSALS, "**/test_layers.py"),
    ),
    Fault(
        "a weight that is tied is divided twice",
        PACKAGE,
        "        merged.layout_kernels_halves = found\n",
        "",
        (*LOADS, *NAMES, "models/test_sweep.py"),
    ),
    Fault(
        "a norm keeps the epsilon of another class",
        PACKAGE,
        "        self.variance_epsilon = found.eps\n",
        "",
        ("**/test_converter.py",),
    ),
    Fault(
        "a layout takes a norm of another flavour",
        PACKAGE,
        "if found.finding.flavour != self.flavour and (scale is not None or found.finding.flavour is None):",
        "if found.finding.flavour is None:",
        REFUSALS,
    ),
    Fault(
        "a layer bound to another flavour runs",
        PACKAGE,
        "    if found != flavour:\n",
        "    if not found:\n",
        REFUSALS,
    ),
    Fault(
        "a key of another module is taken for a layout's",
        PACKAGE,
        "if match is not None or self.has(key):",
        "if match is not None:",
        ("**/test_converter.py",),
    ),
    Fault(
        "a table answers for the model before",
        PACKAGE,
        "            self._layouts = []\n",
        "",
        ("**/test_converter.py",),
    ),
    Fault(
        "pages that somebody has written to are dropped",
        PACKAGE,
        'elif name == "Anonymous:" and values[0] == "0" and current is not None:',
        'elif name == "Anonymous:" and current is not None:',
        ("**/test_mapped_memory.py",),
    ),
    Fault(
        "keys that exclude each other are accepted",
        PACKAGE,
        "if _parents(first, model) & _parents(second, model):",
        "if first == second:",
        REFUSALS,
    ),
)

RECOGNITION = (
    Fault(
        "an answer is shared by norms with other settings",
        PACKAGE,
        "key = (type(module), type(module).forward, settings(module), shape)",
        "key = (type(module), type(module).forward, shape)",
        ("**/test_norms_and_mlps.py",),
    ),
    Fault(
        "an MLP that clamps large values is taken for a plain one",
        PACKAGE,
        "itertools.product((False, True), (1.0, 40.0, 2000.0))",
        "itertools.product((False, True), (1.0,))",
        ("**/test_norms_and_mlps.py",),
    ),
    Fault(
        "an examination draws from the caller's random state",
        PACKAGE,
        ', torch.device("cpu"), torch.random.fork_rng(devices=[]):',
        ', torch.device("cpu"):',
        ("**/test_norms_and_mlps.py",),
    ),
    Fault(
        "a result that is read later is no obstacle to a fusion",
        PACKAGE,
        ".count(name) == 1 and not _read_later(second, name)",
        ".count(name) == 1",
        ("models/test_plan.py", *LOAD_FAULTS),
    ),
    Fault(
        "a key that covers longer class names is not anchored",
        PACKAGE,
        'return f"^{cls.__name__}$" if longer else cls.__name__',
        "return cls.__name__",
        ("models/test_plan.py",),
    ),
    Fault(
        "a plan fuses where other parents have another child",
        PACKAGE,
        "if not reason and everywhere[cls] != len(members):",
        "if not reason and everywhere[cls] < len(members):",
        ("models/test_plan.py", "models/test_sweep.py"),
    ),
    Fault(
        "a gated norm's groups are not looked for",
        PACKAGE,
        "        found.append(size)\n",
        "        found.append(width)\n",
        ("**/test_gated_norms.py",),
    ),
)

FAULTS = (*PROCESS, *LAYOUTS, *RECOGNITION)
