"""The rules of a Hub kernel that are read from the files of a build. Nothing of the build is imported here.

Sources: the requirements that kernel-builder's documentation states, and what `kernels` 0.17.2 does when it loads a
kernel (parsing folder names, metadata and digests).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kernels._rust import Digest, DigestValidationError, Metadata
from kernels.variants import get_variants_local

from tools.native import check_abi
from tools.project import Project, backend_name

# Users of a kernel have these; whatever else is there must be asked for inside a guard or a function.
ALWAYS = {"torch"}
OPTIONAL = {"transformers", "kernels", "huggingface_hub", "sigstore", "numpy", "accelerate", "triton", "matplotlib"}
# Files that are imported only where their library is installed, and that library.
ADAPTERS = {"triton": ("ops/*/triton.py", "ops/triton_parts.py"), "torch_npu": ("ops/*/npu.py",)}
IDENTIFIER = re.compile(r"_[a-z0-9_]+_[a-z]+_[0-9a-z]+")
RECORD = Path(__file__).with_name("public_names.json")


@dataclass(frozen=True)
class BuildUnderTest:
    """A folder of variants, and the project that they are a build of."""

    project: Project
    folder: Path

    @cached_property
    def variants(self) -> list[Path]:
        """Folders of the variants, also those without metadata."""
        return sorted(path for path in self.folder.glob("torch*") if path.is_dir())

    @cached_property
    def sources(self) -> list[tuple[Path, Path, ast.Module]]:
        """Variant, file and syntax tree of each Python file."""
        return [
            (variant, path, ast.parse(path.read_bytes()))
            for variant in self.variants
            for path in sorted(variant.rglob("*.py"))
        ]

    def where(self, path: Path, node: ast.AST | None = None) -> str:
        """The place of a problem, relative to the build."""
        line = "" if node is None else f":{getattr(node, 'lineno', 0)}"
        return f"{path.relative_to(self.folder)}{line}"


@dataclass(frozen=True)
class _Import:
    node: ast.stmt
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
            guarded = isinstance(node, ast.Try | ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(node, optional or guarded)


def relative_imports(build: BuildUnderTest) -> list[str]:
    """A build is imported under its id, so an absolute import of the package finds another copy or none."""
    name = build.project.name.python_name
    return [
        f"{build.where(path, found.node)} imports {found.top} by name; write a relative import"
        for _, path, tree in build.sources
        for found in _imports(tree)
        if found.top == name or IDENTIFIER.fullmatch(found.top)
    ]


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


def _literal_all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = [ast.unparse(t) for t in node.targets] if isinstance(node, ast.Assign) else []
        if "__all__" in targets and isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple):
            items = node.value.elts
            if all(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in items):
                return [str(ast.literal_eval(item)) for item in items]
    return None


def literal_all(build: BuildUnderTest) -> list[str]:
    """`__all__` of the package is a list of strings, which tools read without running it."""
    return [
        f"{build.where(path)} has no literal __all__; write a list of strings"
        for variant, path, tree in build.sources
        if path == variant / "__init__.py" and _literal_all(tree) is None
    ]


def layers_exposed(build: BuildUnderTest) -> list[str]:
    """`kernels` takes layer classes from the attribute `layers` of the package."""
    problems = []
    for variant in build.variants:
        trees = {path: tree for _, path, tree in build.sources}
        exported = _literal_all(trees.get(variant / "__init__.py", ast.Module([], []))) or []
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


def no_bytecode(build: BuildUnderTest) -> list[str]:
    """Bytecode is no part of a digest's promise, and Python would run it in place of the source."""
    return [
        f"{build.where(path)} is bytecode; remove it"
        for path in sorted(build.folder.rglob("*"))
        if path.name == "__pycache__" or path.suffix in (".pyc", ".pyo")
    ]


def metadata_and_digest(build: BuildUnderTest) -> list[str]:
    """`metadata.json` is what the official parser takes, says what the folder says, and its digest agrees."""
    if not build.variants:
        return [f"{build.folder} holds no variant; run make build"]
    problems = []
    seen: dict[str, str] = {}
    known = {variant.variant_str for variant in get_variants_local(build.folder)}
    for variant in build.variants:
        found = list(_metadata_problems(build, variant, known))
        problems += [f"{variant.name}: {problem}" for problem in found]
        if not found:
            identifier = Metadata.read_from_file(variant / "metadata.json").id
            if identifier in seen:
                problems.append(f"{variant.name} has the id of {seen[identifier]}; ids must differ")
            seen[identifier] = variant.name
    return problems


def _metadata_problems(build: BuildUnderTest, variant: Path, known: set[str]) -> Iterator[str]:
    if variant.name not in known:
        yield "`kernels` does not know a folder of this name"
    try:
        metadata = Metadata.read_from_file(variant / "metadata.json")
    except ValueError as error:
        yield f"metadata.json is refused: {error}"
        return
    if str(metadata.name) != str(build.project.name):
        yield f"metadata.json names {metadata.name}, build.toml {build.project.name}"
    backend = backend_name(metadata.backend.backend_type)
    if not metadata.id.startswith(f"_{build.project.name.python_name}_{backend}_"):
        yield f"the id {metadata.id} is not _{build.project.name.python_name}_{backend}_<unique>"
    if metadata.version is None or not metadata.license:
        yield "metadata.json lacks version or license"
    if metadata.digest is None:
        yield "metadata.json has no digest"
        return
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    except DigestValidationError as error:
        yield f"the digest does not agree: {error}"


def abi_limits(build: BuildUnderTest) -> list[str]:
    """Compiled files load on Python from 3.9, Linux since manylinux_2_28, and torch from its stable ABI on."""
    problems = []
    for variant in build.variants:
        files = sorted(variant.rglob("*.so"))
        compiled = variant.name.startswith("torch-stable-abi")
        if compiled != bool(files):
            problems.append(f"{variant.name} holds {len(files)} extensions; only, and every, compiled variant has one")
        problems += [f"{build.where(file)} {problem}" for file in files for problem in _abi_problems(file)]
    return problems


def _abi_problems(file: Path) -> list[str]:
    try:
        return check_abi.problems(file)
    except RuntimeError as error:
        return [f"cannot be read: {error}"]


def public_names(variant: Path) -> dict[str, list[str]]:
    """What users of a variant name: the package's `__all__`, and the layer classes."""
    package = _literal_all(ast.parse((variant / "__init__.py").read_bytes())) or []
    layers = ast.parse((variant / "layers.py").read_bytes())
    classes = [node.name for node in layers.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    imported = [
        name.name for node in layers.body if isinstance(node, ast.ImportFrom) and node.level for name in node.names
    ]
    classes += [name for name in imported if name.endswith("Layout")]
    return {"package": sorted(package), "layers": sorted(classes)}


def removed_names(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    """Names of `old` that `new` lacks."""
    return [f"{part}.{name}" for part, names in old.items() for name in names if name not in new.get(part, [])]


def names_only_added(build: BuildUnderTest) -> list[str]:
    """Within one version users keep every name; to remove one, raise `version` in build.toml."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8")).get(str(build.project.version))
    if recorded is None:
        return [f"{RECORD.name} has no names for version {build.project.version}; run tools.check_build --record"]
    problems = []
    for variant in build.variants:
        missing = removed_names(recorded, public_names(variant))
        if missing:
            problems.append(
                f"{variant.name} lacks {', '.join(missing)}, which version {build.project.version} has; "
                "keep them, or raise version in build.toml"
            )
    return problems


def record_names(build: BuildUnderTest) -> None:
    """Add the names of a build to the record of its version; none is ever taken out."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    before = record.get(str(build.project.version), {})
    now = public_names(build.variants[0])
    merged = {part: sorted({*before.get(part, []), *names}) for part, names in now.items()}
    record[str(build.project.version)] = merged
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
