"""What the plugin's own sources take from vLLM, read from their syntax trees.

Four kinds of use: a name that is imported, an attribute of an imported module that is read, an
attribute that is replaced (by assignment, setattr or a helper called like it), and a method that a
subclass of a vLLM class overrides.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from assay_kernels.vllm_plugin import hooks

PLUGIN_PACKAGE = "assay_kernels"


@dataclass(frozen=True, order=True)
class Use:
    """One use of vLLM by the plugin: `name` in `file` of the vllm package."""

    file: str
    name: str
    at: str
    """Where the plugin does it: file:line."""


def uses(plugin: Path, package: Path) -> set[Use]:
    """Every use of vLLM in the plugin's source folder, against the sources in `package`."""
    found: set[Use] = set()
    for path in sorted(plugin.rglob("*.py")):
        source = _Source(path, plugin, package)
        found |= set(source.uses())
    return found


def module_file(package: Path, module: str) -> str | None:
    """File of a dotted module (`vllm.a.b`) relative to the package folder, None when it is no
    module."""
    parts = module.split(".")[1:]
    candidates = [Path(*parts, "__init__.py")]
    if parts:
        candidates.append(Path(*parts).with_suffix(".py"))
    return next((c.as_posix() for c in candidates if (package / c).is_file()), None)


class _Source:
    """One file of the plugin."""

    def __init__(self, path: Path, plugin: Path, package: Path) -> None:
        self.plugin, self.package = plugin, package
        self.where = path.relative_to(plugin).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        self.vllm: dict[str, tuple[str, str]] = {}
        """Local name -> (file, name) in vLLM; the name is empty for a module."""
        self.own: dict[str, tuple[Path, str]] = {}
        """Local name -> (file, name) elsewhere in the plugin."""
        self._imports: list[Use] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                self._import_from(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "vllm":
                        file = module_file(package, alias.name) or alias.name
                        if alias.asname:
                            self.vllm[alias.asname] = (file, "")
                        self._imports.append(self._use(file, "", node))

    def _use(self, file: str, name: str, node: ast.AST) -> Use:
        return Use(file, name, f"{self.where}:{getattr(node, 'lineno', 0)}")

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            local = alias.asname or alias.name
            if module.split(".")[0] == "vllm":
                as_module = module_file(self.package, f"{module}.{alias.name}")
                file = as_module or module_file(self.package, module)
                if file is None:
                    file = module.split(".", 1)[-1].replace(".", "/") + ".py"
                name = "" if as_module else alias.name
                self.vllm[local] = (file, name)
                self._imports.append(self._use(file, name, node))
            elif module.startswith(f"{PLUGIN_PACKAGE}.") or module == PLUGIN_PACKAGE:
                parts = module.removeprefix(PLUGIN_PACKAGE).strip(".").split(".")
                stem = self.plugin.joinpath(*[p for p in parts if p])
                for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if path.is_file():
                        self.own[local] = (path, alias.name)

    def uses(self) -> Iterator[Use]:
        yield from self._imports
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                file, name = self.vllm.get(node.value.id, ("", ""))
                if file and (not name or isinstance(node.ctx, ast.Store)):
                    yield self._use(file, f"{name}.{node.attr}".lstrip("."), node)
            elif isinstance(node, ast.Call) and len(node.args) >= 2:
                yield from self._named_attribute(node)
            elif isinstance(node, ast.ClassDef):
                yield from self._overrides(node)

    def _named_attribute(self, node: ast.Call) -> Iterator[Use]:
        """`setattr(thing, "name", ..)` and every helper that is called the same way."""
        owner, attribute = node.args[:2]
        if (
            isinstance(owner, ast.Name)
            and owner.id in self.vllm
            and isinstance(attribute, ast.Constant)
        ):
            file, name = self.vllm[owner.id]
            if isinstance(attribute.value, str):
                yield self._use(file, f"{name}.{attribute.value}".lstrip("."), node)

    def _overrides(self, node: ast.ClassDef) -> Iterator[Use]:
        for file, cls in self.vllm_bases(node):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    origin = defined_in(self.package, file, cls, statement.name)
                    if origin is not None:
                        yield self._use(*origin, statement)

    def vllm_bases(self, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
        """(file, class) of vLLM's classes that `node` derives from, classes of the plugin in
        between followed."""
        for base in node.bases:
            if isinstance(base, ast.Name):
                if base.id in self.vllm:
                    yield self.vllm[base.id]
                elif base.id in self.own:
                    path, name = self.own[base.id]
                    other = _Source(path, self.plugin, self.package)
                    found = hooks.find(other.tree, name)
                    if isinstance(found, ast.ClassDef):
                        yield from other.vllm_bases(found)
                else:
                    found = hooks.find(self.tree, base.id)
                    if isinstance(found, ast.ClassDef):
                        yield from self.vllm_bases(found)
            elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
                file, name = self.vllm.get(base.value.id, ("", ""))
                if file and not name:
                    yield file, base.attr


def defined_in(package: Path, file: str, cls: str, method: str) -> tuple[str, str] | None:
    """(file, Class.method) where the class, or the first of its bases to do so, defines it."""
    tree = hooks.parse(package / file)
    node = hooks.find(tree, cls)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            parts = ["vllm", *Path(file).parent.parts]
            module = ".".join(
                [*parts[: len(parts) - node.level + 1], *([module] if module else [])]
            )
        origin = next((a.name for a in node.names if (a.asname or a.name) == cls), cls)
        source = module_file(package, module)
        return None if source is None else defined_in(package, source, origin, method)
    if not isinstance(node, ast.ClassDef):
        return None
    if hooks.find(tree, f"{cls}.{method}") is not None:
        return file, f"{cls}.{method}"
    for base in node.bases:
        if isinstance(base, ast.Name):
            found = defined_in(package, file, base.id, method)
            if found is not None:
                return found
    return None
