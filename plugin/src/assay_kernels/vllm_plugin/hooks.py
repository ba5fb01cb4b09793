"""Every place where the plugin touches vLLM, and the check that it is still there.

The places stand in `hooks.toml`: one table per source file of vLLM, one line per name in it. A line
says what the plugin relies on: the name's kind, its parameters in order where we call or override
it, and a digest of its body where the plugin replaces it or depends on what it does.

The check parses vLLM's sources with `ast` and imports nothing of it, so that one process can hold
two versions against the table. After a change of vLLM or of the plugin,

    python -m assay_kernels.vllm_plugin.hooks VERSION VLLM_PACKAGE_FOLDER

prints what moved, with the parameters and the digest that each name has now.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

CPU_VERSION = "0.32.0"
GPU_VERSION = "0.33.0"
BOTH = (CPU_VERSION, GPU_VERSION)
TABLE = Path(__file__).with_name("hooks.toml")

Kind = Literal["class", "function", "name"]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Hook:
    """One thing of vLLM's that the plugin imports, subclasses, calls or replaces.

    file: source file relative to the `vllm` package; name: as spelt there, `Class.method` for a
    method; why: what the plugin does with it, the first thing to read when it has moved;
    parameters and bodies: by version, absent where nothing is relied upon.
    """

    file: str
    name: str
    kind: Kind
    why: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    bodies: Mapping[str, str] = field(default_factory=dict)
    versions: tuple[str, ...] = BOTH

    def check(self, package: Path, version: str) -> str | None:
        """What is wrong with this hook in the `vllm` package folder `package`; None when nothing
        is."""
        where = f"vllm {version}: {self.file}: {self.name}"
        path = package / self.file
        if not path.is_file():
            return f"{where}: the file is gone ({self.why})"
        node = find(parse(path), self.name)
        if node is None:
            near = ", ".join(sorted(names_like(parse(path), self.name))) or "none"
            return f"{where}: the name is gone; alike in this file: {near} ({self.why})"
        if kind_of(node) != self.kind:
            return f"{where}: was a {self.kind}, is a {kind_of(node)} ({self.why})"
        parameters = self.parameters.get(version)
        if parameters is not None and (now := parameters_of(node)) != parameters:
            return f"{where}: took ({parameters}), takes ({now}) ({self.why})"
        expected = self.bodies.get(version)
        if expected is not None and (now := digest(node)) != expected:
            return f"{where}: its body changed: digest was {expected}, is {now} ({self.why})"
        return None


def _by_version(value: str | dict[str, str] | None) -> dict[str, str]:
    """A value in the table holds for every version, unless it is written by version."""
    if value is None:
        return {}
    return value if isinstance(value, dict) else dict.fromkeys(BOTH, value)


def read_table(path: Path = TABLE) -> tuple[Hook, ...]:
    """The hooks of `hooks.toml`; raises ValueError for an entry that says something unknown."""
    hooks = []
    for file, names in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for name, entry in cast(dict[str, dict[str, Any]], names).items():
            unknown = set(entry) - {"kind", "why", "parameters", "body", "versions"}
            if unknown or entry.get("kind") not in get_args(Kind) or not entry.get("why"):
                raise ValueError(f"{path.name}: {file}: {name}: {entry}")
            hooks.append(
                Hook(
                    file=file,
                    name=name,
                    kind=entry["kind"],
                    why=entry["why"],
                    parameters=_by_version(entry.get("parameters")),
                    bodies=_by_version(entry.get("body")),
                    versions=tuple(entry.get("versions", BOTH)),
                )
            )
    return tuple(hooks)


@cache
def parse(path: Path) -> ast.Module:
    """Syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a scope, those under `if` and `try` included: a name bound there is bound
    in the scope."""
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
    """Kind of what a statement binds; anything but a class or a function is a name."""
    if isinstance(node, ast.ClassDef):
        return "class"
    return "function" if isinstance(node, _Function) else "name"


def parameters_of(node: ast.stmt) -> str:
    """Parameters in order, without annotations; `=...` stands for any default. For a class, those
    of `__init__`."""
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


def main(argv: list[str]) -> int:
    """Hold the sources in `argv[1]` against the table for version `argv[0]`; 1 if one moved."""
    if len(argv) != 2 or argv[0] not in BOTH:
        print(__doc__, file=sys.stderr)
        return 2
    version, package = argv[0], Path(argv[1])
    moved = 0
    for hook in read_table():
        if version not in hook.versions:
            continue
        path = package / hook.file
        node = find(parse(path), hook.name) if path.is_file() else None
        now = "" if node is None else f"({parameters_of(node)}) {digest(node)}"
        problem = hook.check(package, version)
        print(f"{'MOVED' if problem else 'ok':5s} {hook.file}: {hook.name} {now}")
        if problem:
            moved += 1
            print(f"      {problem}")
    return int(moved > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
