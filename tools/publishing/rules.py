"""The rules of a Hub kernel that are read from the files of a build. Nothing of the build is imported here.

Sources: the requirements that kernel-builder's documentation states, and what `kernels` 0.17.2 does when it loads a
kernel (parsing folder names, metadata and digests).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tools.publishing.build_under_test import BuildUnderTest
from tools.publishing.names import literal_names

# Users of a kernel have these; whatever else is there must be asked for inside a guard or a function.
ALWAYS = {"torch"}
OPTIONAL = {"transformers", "kernels", "huggingface_hub", "sigstore", "numpy", "accelerate", "triton", "matplotlib"}
# Files that are imported only where their library is installed, and that library.
ADAPTERS = {"triton": ("ops/*/triton.py", "ops/triton_parts.py"), "torch_npu": ("ops/*/npu.py",)}
IDENTIFIER = re.compile(r"_[a-z0-9_]+_[a-z]+_[0-9a-z]+")


# Functions that import what the text of their first argument names.
IMPORTING = {"import_module", "__import__", "run_module", "resolve_name"}


@dataclass(frozen=True)
class _Import:
    node: ast.AST
    top: str
    optional: bool


def _imports(tree: ast.AST, optional: bool = False) -> Iterator[_Import]:
    """Absolute imports; `optional` ones stand in a function, or where an ImportError is caught."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (_Import(node, alias.name.split(".")[0], optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield _Import(node, node.module.split(".")[0], optional)
        else:
            named = _named_in_a_call(node)
            if named:
                yield _Import(node, named, optional)
            guarded = isinstance(node, ast.Try | ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(node, optional or guarded)


def _named_in_a_call(node: ast.AST) -> str:
    """The package that `importlib.import_module("package...")` or its like names; empty for all else."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in IMPORTING:
        return ""
    return _text(_given(node)[0]).split(".")[0] if _given(node) else ""


def _given(node: ast.AST) -> list[ast.expr]:
    """What a call or a subscript is given; empty for all else."""
    if isinstance(node, ast.Call):
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return [node.slice] if isinstance(node, ast.Subscript) else []


def _text(value: ast.expr) -> str:
    """A literal text; of an f-string what stands before its first value; empty for all else."""
    first = value.values[0] if isinstance(value, ast.JoinedStr) and value.values else value
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def readable(build: BuildUnderTest) -> list[str]:
    """Every Python file can be parsed; the rules below see those that can."""
    return [f"{build.where(path)} is no Python: {reason}" for path, reason in build.unreadable]


def relative_imports(build: BuildUnderTest) -> list[str]:
    """A build is imported under its id, so the package's own name finds another copy or none."""
    name = build.project.name.python_name
    problems = []
    for _, path, tree in build.sources:
        for found in _imports(tree):
            if found.top == name or IDENTIFIER.fullmatch(found.top):
                place = build.where(path, found.node)
                problems.append(f"{place} imports {found.top} by name; write a relative import")
        for node in ast.walk(tree):
            for text in map(_text, _given(node)):
                if re.fullmatch(rf"{name}([.:]\w+)*\.?", text):
                    problems.append(f"{build.where(path, node)} names {text}; a build has another name, take __name__")
    return problems


def allowed_dependencies(build: BuildUnderTest) -> list[str]:
    """Loading needs Python and torch alone; nothing else can be declared as a dependency of these backends."""
    problems = []
    for variant, path, tree in build.sources:
        for found in _imports(tree):
            if found.top in sys.stdlib_module_names | ALWAYS | {build.project.name.python_name}:
                continue
            adapters = ADAPTERS.get(found.top, ())
            if any(path.relative_to(variant).match(pattern) for pattern in adapters):
                continue
            if not (found.optional and found.top in OPTIONAL):
                problems.append(
                    f"{build.where(path, found.node)} imports {found.top}, which a user need not have; import it in a "
                    f"function or a guard, and only one of {', '.join(sorted(OPTIONAL))}"
                )
    return problems


def literal_all(build: BuildUnderTest) -> list[str]:
    """`__all__` of the package is a list of strings, which tools read without running it."""
    return [
        f"{build.where(path)} has no literal __all__; write a list of strings"
        for variant, path, tree in build.sources
        if path == variant / "__init__.py" and literal_names(tree) is None
    ]


def layers_exposed(build: BuildUnderTest) -> list[str]:
    """`kernels` takes layer classes from the attribute `layers` of the package."""
    problems = []
    for variant in build.variants:
        trees = {path: tree for _, path, tree in build.sources}
        exported = literal_names(trees.get(variant / "__init__.py", ast.Module([], []))) or []
        if "layers" not in exported or not (variant / "layers.py").is_file():
            problems.append(f"{variant.name} does not expose layers; name it in __all__ and ship layers.py")
    return problems


def namespaced_operators(build: BuildUnderTest) -> list[str]:
    """Operator names come from `_ops`: a literal namespace would be shared by every copy in the process."""
    problems = []
    for variant, path, tree in build.sources:
        if path == variant / "_ops.py":
            continue
        for node in ast.walk(tree):
            literal = _literal_namespace(node)
            if literal is not None:
                problems.append(
                    f"{build.where(path, node)} names the operator namespace {literal!r}; "
                    "use _ops.add_op_namespace_prefix"
                )
    return problems


REGISTERING = {"Library", "custom_op", "register_fake", "register_autograd", "define", "impl", "triton_op"}


def _literal_namespace(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    first = node.args[0] if node.args else None
    if name in REGISTERING and isinstance(first, ast.Constant) and isinstance(first.value, str):
        if "::" in first.value:
            return first.value.partition("::")[0]
        return first.value if name == "Library" else None
    return None
