"""Every place where the plugin touches vLLM, as a table, and the check that it is still there.

The check parses vLLM's sources with `ast` and imports nothing of it, so one process can hold two versions against
the table. A `Hook` says what the plugin relies on: that a name exists where we look for it, its kind, its parameters
in order and, where the plugin replaces a function or depends on what it does, a digest of its body. Run

    python -m assay_kernels.vllm_plugin.hooks VLLM_PACKAGE_FOLDER

to print the table's verdict on a source tree, with the digest and parameters that it has now.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CPU_VERSION = "0.32.0"
GPU_VERSION = "0.33.0"
BOTH = (CPU_VERSION, GPU_VERSION)

Kind = Literal["class", "function", "method", "name"]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Hook:
    """One thing of vLLM's that the plugin imports, subclasses, calls or replaces."""

    file: str
    """Source file, relative to the `vllm` package."""
    name: str
    """`Class`, `function`, `Class.method` or a module-level name, as it is spelt in that file."""
    kind: Kind
    why: str
    """What the plugin does with it: the first thing to read when it has moved."""
    parameters: str | None = None
    """Parameters as in the signature, without annotations: `self, layer, x, bias=...`. None: not relied upon."""
    bodies: Mapping[str, str] = field(default_factory=dict)
    """Version -> digest of the normalised body, where the plugin replaces it or relies on what it does."""
    versions: tuple[str, ...] = BOTH

    def check(self, package: Path, version: str) -> str | None:
        """What is wrong with this hook in the `vllm` package folder `package`; None when nothing is."""
        where = f"vllm {version}: {self.file}: {self.name}"
        path = package / self.file
        if not path.is_file():
            return f"{where}: the file is gone ({self.why})"
        node = find(_tree(path), self.name)
        if node is None:
            near = ", ".join(sorted(names_like(_tree(path), self.name))) or "none"
            return f"{where}: the name is gone; same last part elsewhere in the file: {near} ({self.why})"
        if kind_of(node) != self.kind:
            return f"{where}: was a {self.kind}, is a {kind_of(node)} ({self.why})"
        if self.parameters is not None and (now := parameters_of(node)) != self.parameters:
            return f"{where}: took ({self.parameters}), takes ({now}) ({self.why})"
        expected = self.bodies.get(version)
        if expected is not None and (now := digest(node)) != expected:
            return f"{where}: its body changed: digest was {expected}, is {now} ({self.why})"
        return None


def _tree(path: Path, _cache: dict[Path, ast.Module] = {}) -> ast.Module:  # noqa: B006
    if path not in _cache:
        _cache[path] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return _cache[path]


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a scope, those under `if` and `try` included: a name bound there is bound in the scope."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from statements(getattr(statement, block, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from statements(handler.body)


def bound_names(statement: ast.stmt) -> list[str]:
    """Names that a statement binds in its scope."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name)]
    return []


def find(tree: ast.Module, name: str) -> ast.stmt | None:
    """The statement that binds the dotted `name`; the first one where `if` and `else` both do."""
    scope: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((s for s in statements(scope) if part in bound_names(s)), None)
        if found is None:
            return None
        scope = found.body if isinstance(found, ast.ClassDef) else []
    return found


def names_like(tree: ast.Module, name: str) -> set[str]:
    """Dotted names of `tree` that end in the last part of `name`: where it may have gone."""
    last = name.rsplit(".", 1)[-1]
    found = {last} if find(tree, last) is not None else set()
    for owner in statements(tree.body):
        if isinstance(owner, ast.ClassDef) and find(tree, f"{owner.name}.{last}") is not None:
            found.add(f"{owner.name}.{last}")
    return found - {name}


def kind_of(node: ast.stmt) -> Kind:
    """Kind of what a statement binds; a function whose first parameter is self or cls is a method, and so is a
    static method."""
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, _Function):
        first = (node.args.posonlyargs + node.args.args)[:1]
        static = any(
            isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
        )
        return "method" if static or (first and first[0].arg in ("self", "cls")) else "function"
    return "name"


def parameters_of(node: ast.stmt) -> str:
    """Parameters in order, without annotations; `=...` stands for any default. For a class, those of `__init__`."""
    if isinstance(node, ast.ClassDef):
        init = next(
            (s for s in node.body if isinstance(s, _Function) and s.name == "__init__"), None
        )
        return "" if init is None else parameters_of(init)
    if not isinstance(node, _Function):
        return ""
    a = node.args
    positional = a.posonlyargs + a.args
    first_default = len(positional) - len(a.defaults)
    out = [p.arg + ("=..." if i >= first_default else "") for i, p in enumerate(positional)]
    if a.posonlyargs:
        out.insert(len(a.posonlyargs), "/")
    if a.vararg or a.kwonlyargs:
        out.append("*" + (a.vararg.arg if a.vararg else ""))
    out += [
        p.arg + ("=..." if d is not None else "")
        for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    if a.kwarg:
        out.append("**" + a.kwarg.arg)
    return ", ".join(out)


def digest(node: ast.AST) -> str:
    """Digest of what a definition does: docstrings, annotations, comments and layout do not count.

    `ast.dump` differs between Python versions (empty fields), so the tree is written out here.
    """
    return hashlib.sha256(_normal_form(node).encode()).hexdigest()[:16]


def _normal_form(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_normal_form(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return _normal_form(ast.Assign(targets=[node.target], value=node.value))
    fields = []
    for name, value in ast.iter_fields(node):
        if name in (
            "annotation",
            "returns",
            "type_comment",
            "type_params",
            "type_ignores",
            "ctx",
            "kind",
        ):
            continue
        if name == "body" and isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            value = [s for s in value if not _is_string(s)]
        if value is not None and value != []:
            fields.append(f"{name}={_normal_form(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


HOOKS: tuple[Hook, ...] = ()


def main(argv: list[str]) -> int:
    """Print what each hook looks like in the source tree `argv[0]`; exit 1 when one does not fit."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    package = Path(argv[0])
    version = next((v for v in BOTH if v in str(package.resolve())), CPU_VERSION)
    wrong = 0
    for hook in HOOKS:
        if version not in hook.versions:
            continue
        problem = hook.check(package, version)
        wrong += problem is not None
        path = package / hook.file
        node = find(_tree(path), hook.name) if path.is_file() else None
        now = "" if node is None else f"{digest(node)} ({parameters_of(node)})"
        print(f"{'MOVED' if problem else 'ok':5s} {hook.file}::{hook.name} {now}")
        if problem:
            print(f"      {problem}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
