"""The public names of a variant, and the rule that a version keeps them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tools.publishing.build_under_test import BuildUnderTest

RECORD = Path(__file__).with_name("public_names.json")


def literal_names(tree: ast.Module) -> list[str] | None:
    """`__all__` of a module where it is a list of strings; None where it is not."""
    for node in tree.body:
        targets = [ast.unparse(t) for t in node.targets] if isinstance(node, ast.Assign) else []
        if "__all__" in targets and isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple):
            items = node.value.elts
            if all(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in items):
                return [str(ast.literal_eval(item)) for item in items]
    return None


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def public_names(variant: Path) -> dict[str, list[str]]:
    """What users of a variant name: the package's `__all__`, and the layer classes.

    Raises:
        ValueError: one of the two files is missing or no Python.
    """
    package, layers = (_tree(variant / name) for name in ("__init__.py", "layers.py"))
    names = literal_names(package) or []
    classes = [node.name for node in layers.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    imported = [name.name for node in layers.body if isinstance(node, ast.ImportFrom) for name in node.names]
    classes += [name for name in imported if name.endswith("Layout")]  # a base that has its own file
    return {"package": sorted(names), "layers": sorted(classes)}


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
        try:
            missing = removed_names(recorded, public_names(variant))
        except ValueError as error:
            problems.append(f"{variant.name} has no names that can be read: {error}")
            continue
        if missing:
            problems.append(
                f"{variant.name} lacks {', '.join(missing)}, which version {build.project.version} has; "
                "keep them, or raise version in build.toml"
            )
    return problems


def record_names(build: BuildUnderTest) -> None:
    """Add the names of a build to the record of its version; none is ever taken out.

    Raises:
        ValueError: there is no variant, or its names cannot be read.
    """
    if not build.variants:
        raise ValueError(f"{build.folder} holds no variant; run make build")
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    before = record.get(str(build.project.version), {})
    now = public_names(build.variants[0])
    merged = {part: sorted({*before.get(part, []), *names}) for part, names in now.items()}
    record[str(build.project.version)] = merged
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
