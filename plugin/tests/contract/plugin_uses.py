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


Owner = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Scope = dict[str, tuple[str, str] | None]
"""Local name -> (file, name) in vLLM, the name empty for a module; None for what hides it."""


class _Source:
    """One file of the plugin."""

    def __init__(self, path: Path, plugin: Path, package: Path) -> None:
        self.plugin, self.package = plugin, package
        self.where = path.relative_to(plugin).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        self.own: dict[str, tuple[Path, str]] = {}
        """Local name -> (file, name) elsewhere in the plugin."""
        self.vllm = self._scope(self.tree, {})

    def uses(self) -> Iterator[Use]:
        yield from self._uses_below(self.tree, self.vllm)

    def _use(self, file: str, name: str, node: ast.AST) -> Use:
        return Use(file, name, f"{self.where}:{getattr(node, 'lineno', 0)}")

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, str, str]]:
        """(local name, file, name) of each thing of vLLM's that a statement imports."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    file = module_file(self.package, alias.name) or alias.name
                    yield alias.asname or "", file, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            assert node.module is not None
            for alias in node.names:
                as_module = module_file(self.package, f"{node.module}.{alias.name}")
                file = as_module or module_file(self.package, node.module)
                if file is None:
                    file = node.module.split(".", 1)[-1].replace(".", "/") + ".py"
                yield alias.asname or alias.name, file, "" if as_module else alias.name

    def _scope(
        self, owner: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, outer: Scope
    ) -> Scope:
        """What names mean inside `owner`: parameters hide, imports there add."""
        scope = dict(outer)
        if not isinstance(owner, ast.Module):
            a = owner.args
            for parameter in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
                if parameter is not None:
                    scope[parameter.arg] = None
        for node in _same_scope(owner):
            for local, file, name in self._imported(node):
                scope[local] = (file, name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PLUGIN_PACKAGE):
                self._note_own(node)
        return scope

    def _note_own(self, node: ast.ImportFrom) -> None:
        parts = (node.module or "").removeprefix(PLUGIN_PACKAGE).strip(".").split(".")
        stem = self.plugin.joinpath(*[p for p in parts if p])
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                self.own |= {a.asname or a.name: (path, a.name) for a in node.names}

    def _uses_below(self, owner: Owner, scope: Scope) -> Iterator[Use]:
        for node in _same_scope(owner):
            for _, file, name in self._imported(node):
                yield self._use(file, name, node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self._uses_below(node, self._scope(node, scope))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                file, name = scope.get(node.value.id) or ("", "")
                if file and (not name or isinstance(node.ctx, ast.Store)):
                    yield self._use(file, f"{name}.{node.attr}".lstrip("."), node)
            elif isinstance(node, ast.Call) and len(node.args) >= 2:
                yield from self._named_attribute(node, scope)
            elif isinstance(node, ast.ClassDef):
                yield from self._overrides(node, scope)

    def _named_attribute(self, node: ast.Call, scope: Scope) -> Iterator[Use]:
        """`setattr(thing, "name", ..)` and every helper that is called the same way."""
        owner, attribute = node.args[:2]
        if isinstance(owner, ast.Name) and isinstance(attribute, ast.Constant):
            file, name = scope.get(owner.id) or ("", "")
            if file and isinstance(attribute.value, str):
                yield self._use(file, f"{name}.{attribute.value}".lstrip("."), node)

    def _overrides(self, node: ast.ClassDef, scope: Scope) -> Iterator[Use]:
        for file, cls in self.vllm_bases(node, scope):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    origin = defined_in(self.package, file, cls, statement.name)
                    if origin is not None:
                        yield self._use(*origin, statement)

    def vllm_bases(self, node: ast.ClassDef, scope: Scope) -> Iterator[tuple[str, str]]:
        """(file, class) of vLLM's classes that `node` derives from, classes of the plugin in
        between followed."""
        for base in node.bases:
            if isinstance(base, ast.Name):
                known = scope.get(base.id)
                if known is not None:
                    yield known
                elif base.id in self.own:
                    path, name = self.own[base.id]
                    other = _Source(path, self.plugin, self.package)
                    found = hooks.find(other.tree, name)
                    if isinstance(found, ast.ClassDef):
                        yield from other.vllm_bases(found, other.vllm)
                else:
                    found = hooks.find(self.tree, base.id)
                    if isinstance(found, ast.ClassDef):
                        yield from self.vllm_bases(found, scope)
            elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
                file, name = scope.get(base.value.id) or ("", "")
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


def _same_scope(owner: ast.AST) -> Iterator[ast.AST]:
    """Nodes below `owner`, nested functions themselves included but not what is inside them."""
    for child in ast.iter_child_nodes(owner):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _same_scope(child)
