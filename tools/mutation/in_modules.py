"""Faults in the modules of a model that run our forwards, and in kernels that are applied to a live model."""

from __future__ import annotations

from tools.mutation.fault import Fault

PACKAGE = "torch-ext/layout_kernels/**/*.py"
NAMES = ("models/test_stock_to_all_who_look_by_name.py",)
OBSERVERS = ("models/test_stock_to_observers.py",)
MEMORY = ("models/test_stock_to_holders_of_memory.py",)
LOAD_FAULTS = ("models/test_faults.py",)
LIVE = ("kernel_plugins/test_live.py",)
LIVE_FAULTS = ("kernel_plugins/test_live_faults.py",)

FAULTS = (
    Fault(
        "a hook of every module is ignored",
        PACKAGE,
        "        or has_global_hooks()\n        or not _has_linear_forward(module)\n",
        "        or not _has_linear_forward(module)\n",
        (*LOAD_FAULTS, *OBSERVERS),
    ),
    Fault(
        "hooks of an activation are ignored",
        PACKAGE,
        "        and not has_hooks(module)\n",
        "",
        LIVE_FAULTS,
    ),
    Fault(
        "another setting of an activation is ignored",
        PACKAGE,
        "        and all(getattr(module, name, None) == value for name, value in how.act_settings)\n",
        "",
        LIVE_FAULTS,
    ),
    Fault(
        "another dtype is multiplied where stock raises",
        PACKAGE,
        "return x.dtype is weight.dtype or (_is_any_autocast() and x.dtype",
        "return x.dtype is not None or (_is_any_autocast() and x.dtype",
        OBSERVERS,
    ),
    Fault(
        "an export has our operators",
        PACKAGE,
        "return not torch.compiler.is_exporting()",
        "return True",
        OBSERVERS,
    ),
    Fault(
        "a copy of an adopted MLP lies apart",
        PACKAGE,
        "        super().__setstate__(state)  # type: ignore[misc]\n        self._layout_kernels.arrange(self)\n",
        "        super().__setstate__(state)  # type: ignore[misc]\n",
        MEMORY,
    ),
    Fault(
        "a policy by class finds no adopted module",
        PACKAGE,
        "return super().__instancecheck__(instance) if own is None else isinstance(instance, own.original)",
        "return super().__instancecheck__(instance)",
        NAMES,
    ),
    Fault(
        "undo forgets the forward that was bound before",
        PACKAGE,
        "    if adoption.was_bound:\n",
        "    if adoption.was_bound and adoption.packed:\n",
        LIVE_FAULTS,
    ),
    Fault(
        "an undo leaves a class",
        PACKAGE,
        "    for _, module in changed:\n        _take_back(module)\n",
        "    for _, module in changed[1:]:\n        _take_back(module)\n",
        LIVE,
    ),
    Fault(
        "undo drops what was put around our forward",
        PACKAGE,
        "        reason = _why_not_undo(module)\n",
        "        reason = why_not_release(module) if not BEFORE in vars(module) else ''\n",
        (*LIVE_FAULTS, *OBSERVERS),
    ),
    Fault(
        "a failure in the middle leaves a module changed",
        PACKAGE,
        "for change in reversed(done):",
        "for change in reversed(done[1:]):",
        LIVE,
    ),
    Fault(
        "of several kernels that fail one stays",
        PACKAGE,
        "            if id(module) not in before:\n",
        "            if id(module) in before:\n",
        LIVE_FAULTS,
    ),
    Fault(
        "memory of tied weights is moved",
        PACKAGE,
        "for place, count in counts.items() if count > 1}",
        "for place, count in counts.items() if count > 2}",
        (*MEMORY, *LIVE),
    ),
    Fault(
        "an id of a kernel may be taken twice",
        PACKAGE,
        "if taken is not None and taken is not kernel_cls:",
        "if taken is not None and taken is kernel_cls and not taken:",
        ("kernel_plugins/test_registry.py",),
    ),
    Fault(
        "a rank's sharded rows are one product though its plan gathers the result",
        PACKAGE,
        "        or not style.output_layouts.is_shard()\n",
        "",
        ("models/test_tensor_parallel.py",),
    ),
)
