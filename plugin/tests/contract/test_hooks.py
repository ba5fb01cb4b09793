"""vLLM still has, in both versions that we target, every place where the plugin touches it, as it
was when the plugin was written; and the table of those places leaves none out."""

import ast
import os
import textwrap
from pathlib import Path

import pytest

from assay_kernels.vllm_plugin import hooks
from assay_kernels.vllm_plugin.hooks import BOTH, Hook

from .plugin_uses import uses
from .vllm_source import UnavailableError, archive_url, package_folder

HOOKS = hooks.read_table()
PLUGIN = Path(hooks.__file__).parents[1]


def sources(version: str) -> Path:
    try:
        return package_folder(version)
    except UnavailableError as reason:
        if os.environ.get("CI"):  # there an index is at hand: a silent skip would hide a moved hook
            raise
        pytest.skip(f"sources of vllm {version}: {reason}")


@pytest.mark.parametrize("version", BOTH)
def test_every_hook_point_is_where_it_was(version: str) -> None:
    package = sources(version)
    problems = [p for h in HOOKS if version in h.versions and (p := h.check(package, version))]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("version", BOTH)
def test_the_table_covers_everything_that_the_plugin_takes_from_vllm(version: str) -> None:
    covered = {(h.file, h.name) for h in HOOKS}
    missing = [
        f"{use.at}: {use.file}: {use.name}"
        for use in sorted(uses(PLUGIN, sources(version)))
        if use.name and (use.file, use.name) not in covered
    ]
    assert not missing, "not in assay_kernels/vllm_plugin/hooks.toml:\n" + "\n".join(missing)


def operator_schemas() -> dict[str, str]:
    """The schemas of the CPU operators that the plugin supplies, without importing it."""
    tree = hooks.parse(PLUGIN / "vllm_plugin" / "standins.py")
    node = hooks.find(tree, "SCHEMAS")
    assert isinstance(node, ast.Assign)
    schemas: dict[str, str] = ast.literal_eval(node.value)
    return schemas


@pytest.mark.parametrize("version", BOTH)
def test_cpu_operators_are_called_with_the_arguments_that_our_schemas_have(version: str) -> None:
    """vLLM's wrappers pass arguments by position: their number is all that the sources tell."""
    schemas = operator_schemas()
    taken = {name: {text[: text.index(") ->")].count(",") + 1} for name, text in schemas.items()}
    given: dict[str, set[int]] = {name: set() for name in schemas}
    for path in sources(version).rglob("*.py"):
        if "torch.ops._C." not in path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(hooks.parse(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.ops._C."):
                name = ast.unparse(node.func).rsplit(".", 1)[-1]
                if name in given:
                    given[name].add(len(node.args) + len(node.keywords))
    assert given == taken


def test_hooks_are_named_once() -> None:
    keys = [(h.file, h.name, v) for h in HOOKS for v in h.versions]
    assert len(keys) == len(set(keys))


ORIGINAL = '''
class Scheduler:
    """Doc."""

    @staticmethod
    def build(num_tokens: int, *, late: bool = False) -> dict[str, int]:
        """Doc."""
        count: int = num_tokens + 1
        return {"a": count}

def helper(x, y=1):
    return x

if True:
    KERNEL = helper(3)
'''


@pytest.fixture
def fake(tmp_path: Path) -> tuple[Path, Hook]:
    (tmp_path / "mod.py").write_text(ORIGINAL)
    node = hooks.find(ast.parse(ORIGINAL), "Scheduler.build")
    assert node is not None
    hook = Hook(
        "mod.py", "Scheduler.build", "function", "why",
        parameters={"0.32.0": "num_tokens, *, late=..."}, bodies={"0.32.0": hooks.digest(node)},
    )  # fmt: skip
    return tmp_path, hook


def changed(folder: Path, before: str, after: str) -> Path:
    """A copy of the fake package with one edit (a new folder: sources are read once per path)."""
    assert before in ORIGINAL
    copy = folder / "changed"
    copy.mkdir()
    (copy / "mod.py").write_text(ORIGINAL.replace(before, after))
    return copy


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "num_tokens: int, *",
            "num_tokens: int, extra: int, *",
            "takes (num_tokens, extra, *, late=...)",
        ),
        ("late: bool = False", "late: bool", "takes (num_tokens, *, late)"),
        ("num_tokens + 1", "num_tokens + 2", "its body changed"),
        ("def build", "def build_all", "the name is gone"),
        (
            "class Scheduler",
            "class Planner",
            "the name is gone; alike in this file: Planner.build",
        ),
    ],
)
def test_a_moved_or_changed_hook_point_is_named(
    fake: tuple[Path, Hook], before: str, after: str, message: str
) -> None:
    folder, hook = fake
    assert hook.check(folder, "0.32.0") is None
    problem = hook.check(changed(folder, before, after), "0.32.0")
    assert problem is not None
    assert message in problem
    assert "vllm 0.32.0: mod.py: Scheduler.build" in problem


def test_a_missing_file_is_named(fake: tuple[Path, Hook]) -> None:
    folder, hook = fake
    problem = hook.check(folder / "elsewhere", "0.33.0")
    assert problem == "vllm 0.33.0: mod.py: Scheduler.build: the file is gone (why)"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""Doc."""\n        count', '"""Other."""\n        # a comment\n        count'),
        ("count: int = ", "count = "),
        ("-> dict[str, int]", "-> object"),
    ],
)
def test_docstrings_annotations_and_comments_do_not_count(
    fake: tuple[Path, Hook], before: str, after: str
) -> None:
    folder, hook = fake
    assert hook.check(changed(folder, before, after), "0.32.0") is None


def test_uses_are_found_in_every_form_that_python_has(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(
        "class Base:\n    def step(self): ...\n    def other(self): ...\n"
    )
    (package / "mod.py").write_text(
        "from vllm.base import Base\nclass Child(Base):\n    pass\nKERNEL = 1\n"
    )
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "a.py").write_text(
        textwrap.dedent("""
        from vllm import mod
        from vllm.mod import Child

        def install():
            from vllm.mod import KERNEL as k
            mod.KERNEL = 2
            setattr(Child, "other", None)

        class Between(mod.Child):
            pass

        class Mine(Between):
            def step(self): ...
            def own(self): ...

        limit = mod.LIMIT

        def unrelated(mod):
            return mod.shape
        """)
    )
    found = {(u.file, u.name) for u in uses(plugin, package) if u.name}
    assert found == {
        ("mod.py", "Child"),
        ("mod.py", "KERNEL"),
        ("mod.py", "LIMIT"),
        ("mod.py", "Child.other"),
        ("base.py", "Base.step"),
    }


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        (
            "application/vnd.pypi.simple.v1+json",
            '{"files": [{"url": "../../f/vllm-0.33.0.tar.gz"}]}',
        ),
        (
            "text/html",
            '<a href="x.whl">x</a> <a class="n" href="../../f/vllm-0.33.0.tar.gz#sha256=0">v</a>',
        ),
    ],
)
def test_the_archive_is_found_on_both_kinds_of_index_page(content_type: str, text: str) -> None:
    page = "https://index.example/simple/vllm/"
    assert archive_url(page, content_type, text) == "https://index.example/f/vllm-0.33.0.tar.gz"
