"""Carry our own code to the Hub: follow imports, flatten modules into one folder, or keep the package layout.

A repository that loads with `trust_remote_code=True` holds every module of ours that it needs, flat beside its config,
each importing the others as `from .module import Name`. A Space holds the same modules in their packages.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

OWN_PACKAGES = ("hf_models", "hf_pipelines", "datasets_scripts")
FORBIDDEN = re.compile(r"^(train|trainer|benchmark)_|^cli$")  # house rule 2
# what the loaders of diffusers and transformers look for, character for character
_LOADER_REGEX = re.compile(r"^\s*from\s+\.(\S+)\s+import", flags=re.MULTILINE)
_FROM_CLAUSE = re.compile(rb"^from\s*[\w.\s\\]*?(?<=[\s.])import\b")


@dataclass(frozen=True)
class Reference:
    """What one imported name stands for: `name` in `module`, or the module itself where `name` is `None`."""

    module: str
    name: str | None


@dataclass(frozen=True)
class OwnImport:
    """One `from … import …` statement that reaches our own code, and what each of its names stands for."""

    node: ast.ImportFrom
    references: tuple[Reference, ...]


def is_own(module: str) -> bool:
    """Whether a dotted module name lies in one of our packages."""
    return module.split(".")[0] in OWN_PACKAGES


def find_file(module: str) -> Path | None:
    """Find the source file of one of our modules (`__init__.py` for a package).

    Args:
        module (`str`): Dotted name; it starts with one of our packages.

    Returns:
        `Path` or `None`: the file, or `None` where there is no such module.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a parent is missing, or is a plain module
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin)


@dataclass(frozen=True)
class SourceModule:
    """One of our modules as source text.

    Args:
        name (`str`): Dotted name, such as `hf_models.small_flow.modeling_small_flow`.
        path (`Path`): Its file.
    """

    name: str
    path: Path

    @classmethod
    def find(cls, name: str) -> "SourceModule":
        """Find a module by its dotted name; `ValueError` if there is none."""
        path = find_file(name)
        if path is None:
            raise ValueError(f"`module` {name!r} does not exist in {', '.join(OWN_PACKAGES)}.")
        return cls(name, path)

    @property
    def is_package(self) -> bool:
        """Whether this is the `__init__` of a package."""
        return self.path.name == "__init__.py"

    @property
    def basename(self) -> str:
        """Last part of the name: the module's name in a flat folder."""
        return self.name.rpartition(".")[2]

    @cached_property
    def source(self) -> bytes:
        """UTF-8 source with Unix line ends."""
        return self.path.read_text(encoding="utf-8").encode()

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the source."""
        return ast.parse(self.source, filename=str(self.path))

    def absolute(self, node: ast.ImportFrom) -> str:
        """Dotted name of the module that a `from … import` statement names."""
        if node.level == 0:
            return node.module or ""
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        parents = package.split(".")
        base = parents[: len(parents) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)

    def own_imports(self) -> Iterator[OwnImport]:
        """Yield the statements anywhere in the file that import our own code.

        Raises:
            ValueError: The file says `import hf_models…` or `from … import *`, or imports what does not exist.
        """
        for node in ast.walk(self.tree):
            where = f"{self.path}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import) and any(is_own(alias.name) for alias in node.names):
                raise ValueError(
                    f"{where}: `{ast.unparse(node)}` cannot be carried to the Hub; write `from … import Name` instead."
                )
            if not isinstance(node, ast.ImportFrom) or not is_own(self.absolute(node)):
                continue
            if any(alias.name == "*" for alias in node.names):
                raise ValueError(f"{where}: `{ast.unparse(node)}` cannot be carried to the Hub; name what you import.")
            base = self.absolute(node)
            references = []
            for alias in node.names:
                reference = resolve(base, alias.name)
                if reference is None:
                    raise ValueError(f"{where}: `{ast.unparse(node)}`: {base} has no {alias.name!r}.")
                references.append(reference)
            yield OwnImport(node, tuple(references))


def resolve(base: str, name: str) -> Reference | None:
    """Find where a name is defined, seeing through packages whose names load lazily from a stub.

    Args:
        base (`str`): Dotted name of the module or package it is imported from.
        name (`str`): The imported name.

    Returns:
        `Reference` or `None`: the defining module and the name in it; `None` where `base` or the name is missing.
    """
    path = find_file(base)
    if path is None:
        return None
    package = SourceModule(base, path)
    if not package.is_package:
        return Reference(base, name)
    for file in (path.with_suffix(".pyi"), path):
        if not file.is_file():
            continue
        for node in SourceModule(base, file).tree.body:
            if not isinstance(node, ast.ImportFrom) or not is_own(package.absolute(node)):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = package.absolute(node)
                    return Reference(f"{base}.{name}", None) if source == base else resolve(source, alias.name)
    if find_file(f"{base}.{name}") is not None:
        return Reference(f"{base}.{name}", None)
    defined = any(getattr(node, "name", None) == name for node in package.tree.body)
    return Reference(base, name) if defined else None


# ---------------------------------------------------------------------------------------------------- flattening


@dataclass
class _Graph:
    """The modules reachable from some entries, and for each the modules it imports itself."""

    modules: dict[str, SourceModule] = field(default_factory=dict)
    imports: dict[str, list[OwnImport]] = field(default_factory=dict)

    def add(self, name: str, importer: str) -> None:
        pending = [(name, importer)]
        while pending:
            name, importer = pending.pop()
            if name in self.modules:
                continue
            module = SourceModule.find(name)
            if FORBIDDEN.match(module.basename):
                raise ValueError(
                    f"{importer} imports {name}: what a Hub repo carries never imports a trainer, a benchmark or the "
                    "command line (house rule 2)."
                )
            if module.is_package:
                raise ValueError(f"{importer} imports a name defined in {module.path}; define it in a module instead.")
            twin = next((other for other in self.modules.values() if other.basename == module.basename), None)
            if twin is not None:
                raise ValueError(
                    f"{importer} needs two modules called {module.basename!r}, which cannot lie in one folder: "
                    f"{twin.name} and {name}."
                )
            self.modules[name] = module
            self.imports[name] = list(module.own_imports())
            pending += [(target, name) for target in self.direct(name)]

    def direct(self, name: str) -> list[str]:
        found = (reference.module for statement in self.imports[name] for reference in statement.references)
        return list(dict.fromkeys(found))

    def closure(self, name: str) -> set[str]:
        """Every module that `name` needs; it holds `name` itself where imports run in a circle."""
        seen: set[str] = set()
        pending = self.direct(name)
        while pending:
            current = pending.pop()
            if current not in seen:
                seen.add(current)
                pending += self.direct(current)
        return seen


def flatten(entry: str, also: Iterable[str] = (), named: Iterable[str] = ()) -> dict[str, str]:
    """Copy a module and all the modules of ours it needs into one flat folder.

    The loaders of diffusers and transformers find companion files by reading `from .x import` lines, and diffusers
    reads them in one file only. So every module names all it needs, directly or not, whatever its role: a module that
    is the entry of one folder and a companion in another has the same bytes in both.

    Args:
        entry (`str`): Dotted name of the module that is loaded.
        also (`Iterable[str]`): More modules that the folder must hold; `entry` names them.
        named (`Iterable[str]`): Relative modules such as `model.codec` in sub-folders that `entry` must name too.

    Returns:
        `dict[str, str]`: source text by file name, such as `{"modeling_x.py": …}`.

    Raises:
        ValueError: An import cannot be carried: `import hf_models.x`, a trainer, two modules of one name, a name that
            does not exist. The message names the file.
    """
    graph = _Graph()
    graph.add(entry, entry)
    for name in also:
        graph.add(name, entry)
    files = {}
    for name, module in graph.modules.items():
        needed = graph.closure(name) - {name}
        if name == entry:
            needed = set(graph.modules) - {name}
        companions = sorted(graph.modules[other].basename for other in needed)
        text = _rewrite(module, graph.imports[name]).decode()
        text += _name_companions(text, [*companions, *(sorted(named) if name == entry else ())])
        files[f"{module.basename}.py"] = text
    return dict(sorted(files.items()))


def find_cycle(entry: str) -> str | None:
    """Return the name of a module that imports itself through others of ours, or `None` where none does."""
    graph = _Graph()
    graph.add(entry, entry)
    return next((name for name in graph.modules if name in graph.closure(name)), None)


def _rewrite(module: SourceModule, statements: list[OwnImport]) -> bytes:
    """Replace the import statements by relative ones; every other byte stays."""
    source = module.source
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for statement in sorted(statements, key=lambda item: -item.node.lineno):
        node = statement.node
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[starts[node.lineno - 1] : start]
        source = source[:start] + _relative(statement, source[start:end], before) + source[end:]
    return source


def _relative(statement: OwnImport, text: bytes, before: bytes) -> bytes:
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for alias, reference in zip(statement.node.names, statement.references, strict=True):
        basename = reference.module.rpartition(".")[2]
        source, name = ("", basename) if reference.name is None else (basename, reference.name)
        local = alias.asname or alias.name
        groups.setdefault(source, []).append((name, None if local == name else local))
    unchanged = all(
        alias.name == (reference.name or reference.module.rpartition(".")[2])
        for alias, reference in zip(statement.node.names, statement.references, strict=True)
    )
    if len(groups) == 1 and unchanged:  # keeps line breaks, parentheses and comments
        return _FROM_CLAUSE.sub(f"from .{next(iter(groups))} import".encode(), text, count=1)
    lines = [
        f"from .{source} import " + ", ".join(f"{name} as {local}" if local else name for name, local in names)
        for source, names in groups.items()
    ]
    separator = "; " if before.strip() else "\n" + before.decode()
    return separator.join(lines).encode()


def _name_companions(text: str, modules: list[str]) -> str:
    visible = set(_LOADER_REGEX.findall(text))
    missing = [module for module in modules if module not in visible]
    if not missing:
        return ""
    lines = (f"    from .{name} import __name__ as _{name.replace('.', '_')}  # noqa: F401\n" for name in missing)
    comment = "# The Hub loaders fetch the files that this one names; these are needed by the files it imports.\n"
    return "\n\n" + comment + "if False:\n" + "".join(lines)


# ---------------------------------------------------------------------------------------------------- package layout


def package_closure(files: Iterable[Path]) -> dict[str, Path]:
    """Collect the modules of ours that some scripts need, in their packages.

    Args:
        files (`Iterable[Path]`): Scripts outside our packages, such as the `app.py` of a Space.

    Returns:
        `dict[str, Path]`: source files by relative path, such as `{"hf_models/__init__.pyi": …}`.

    Raises:
        ValueError: A script imports what does not exist.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    pending: list[str] = []
    for file in files:
        pending += _imported(SourceModule("__main__", file))
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        module = SourceModule.find(name)
        folder = name.replace(".", "/") if module.is_package else name.rpartition(".")[0].replace(".", "/")
        found[f"{folder}/{module.path.name}"] = module.path
        if module.is_package and module.path.with_suffix(".pyi").is_file():
            found[f"{folder}/__init__.pyi"] = module.path.with_suffix(".pyi")
        if parent := name.rpartition(".")[0]:
            pending.append(parent)  # Python runs the parents' `__init__` first
        pending += _imported(module)
    return dict(sorted(found.items()))


def _imported(module: SourceModule) -> list[str]:
    """Names of our modules that a file imports in any form, lazily exported names seen through."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if is_own(alias.name)]
        elif isinstance(node, ast.ImportFrom) and is_own(base := module.absolute(node)):
            found.append(base)
            for alias in node.names:
                reference = resolve(base, alias.name)
                # a plain assignment in a package's `__init__` is no module; the package itself is in already
                found += [reference.module] if reference else []
    return found
