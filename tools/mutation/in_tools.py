"""Faults in verification, in what keeps a Hub kernel's rules, and in the tools that judge."""

from __future__ import annotations

from tools.mutation.fault import Fault

PACKAGE = "torch-ext/layout_kernels/**/*.py"
RULES = ("hub/test_check_build.py", "hub/test_variant_rules.py")

FAULTS = (
    Fault(
        "a digest is not compared",
        PACKAGE,
        "metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, path))",
        "Digest.hash_variant(metadata.digest.algorithm, path)",
        ("hub/test_verify.py",),
    ),
    Fault(
        "a signature that was asked for may be absent",
        PACKAGE,
        "if not signed and must_be_signed:",
        "if signed and must_be_signed:",
        ("hub/test_verify.py",),
    ),
    Fault(
        "policies of a user do not reach the verifier",
        PACKAGE,
        "verify_variant(path, None if policies is None else list(policies))",
        "verify_variant(path, None)",
        ("hub/test_verify.py",),
    ),
    Fault(
        "bytecode is not compared with its source",
        PACKAGE,
        "data.startswith(MAGIC_NUMBER) and _same_code(expected, marshal.loads(data[HEADER_SIZE:]))",
        "data.startswith(MAGIC_NUMBER)",
        ("hub/test_uncovered.py",),
    ),
    Fault(
        "a linked folder is not reported",
        PACKAGE,
        "        if path.is_symlink()\n",
        "        if path.is_mount()\n",
        ("hub/test_uncovered.py",),
    ),
    Fault(
        "check-build: bytecode is let through",
        "tools/publishing/variant_rules.py",
        'if path.name == "__pycache__" or path.suffix in (".pyc", ".pyo"):',
        'if path.name == "__pycache__":',
        RULES,
    ),
    Fault(
        "check-build: the rule on operators' names is dropped",
        "tools/check_build.py",
        '    "operator names from _ops": rules.namespaced_operators,\n',
        "",
        RULES,
    ),
    Fault(
        "check-build: another build's id may be imported",
        "tools/publishing/rules.py",
        "if found.top == name or IDENTIFIER.fullmatch(found.top):",
        "if found.top == name:",
        RULES,
    ),
    Fault(
        "check-build: an import outside of a guard is let through",
        "tools/publishing/rules.py",
        "if not (found.optional and found.top in OPTIONAL):",
        "if found.top not in OPTIONAL:",
        RULES,
    ),
    Fault(
        "check-build: two variants may have one id",
        "tools/publishing/variant_rules.py",
        "if metadata.id in seen:",
        "if metadata.id in seen.values():",
        RULES,
    ),
    Fault(
        "check-build: a compiled file more is let through",
        "tools/publishing/variant_rules.py",
        "    if files == expected:\n",
        "    if set(files) >= set(expected):\n",
        RULES,
    ),
    Fault(
        "a newer glibc is let through",
        "tools/native/check_abi.py",
        "(int(number[1]), int(number[2])) > GLIBC_LIMIT",
        "int(number[1]) > GLIBC_LIMIT[0]",
        ("native/test_abi_faults.py",),
    ),
    Fault(
        "a compiled file names the place of torch's headers",
        "tools/native/compile.py",
        '    "-fno-canonical-system-headers",\n',
        "",
        ("tools/test_native_sources.py",),
    ),
    Fault(
        "a compiled file names the place of the tree",
        "tools/native/compile.py",
        'f"-ffile-prefix-map={ROOT}/=", ',
        "",
        ("tools/test_native_sources.py",),
    ),
    Fault(
        "an id does not depend on the version",
        "tools/build_variants.py",
        "str(version), OPS_TEMPLATE):",
        "OPS_TEMPLATE):",
        ("tools/test_build_variants.py",),
    ),
    Fault(
        "the demo takes every different token for a tie",
        "tools/demo/comparison.py",
        "self.stock_gap <= self.bound and self.our_gap <= self.bound",
        "self.stock_gap <= self.bound or self.our_gap <= self.bound",
        ("tools/test_demo.py",),
    ),
    Fault(
        "the sweep takes gradients for equal",
        "tools/sweep/compare.py",
        'TOLERANCE = {"result": 2e-5, "gradient": 1e-4}',
        'TOLERANCE = {"result": 2e0, "gradient": 1e0}',
        ("models/test_sweep.py",),
    ),
)
