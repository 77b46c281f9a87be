"""The texts that may stand in the `instead` of a UserError, read off the code: through helpers that build errors."""

from __future__ import annotations

import ast
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_ERROR, _WORDS = "UserError", ("asked", "found", "why", "instead")
Names = Mapping[str, Sequence[ast.expr]]  # name → what is assigned to it


class Site(NamedTuple):
    """A call to which an `instead` is given."""

    path: str
    function: str
    first: int
    last: int


@dataclass
class Scope:
    """A function, or what stands outside of any in a module."""

    path: Path
    name: str
    parameters: Sequence[str]
    names: ChainMap[str, list[ast.expr]]  # its own, and those of the scopes around it
    calls: list[ast.Call] = field(default_factory=list)
    returned: list[ast.expr] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> list[Scope]:
        """The scopes of a module."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [cls(path, "", (), ChainMap({}))]
        left: list[tuple[ast.AST, Scope]] = [(tree, found[0])]
        while left:
            node, scope = left.pop()
            for child in ast.iter_child_nodes(node):
                inner = scope
                if isinstance(child, ast.FunctionDef):
                    own = [each.arg for each in (*child.args.args, *child.args.kwonlyargs) if each.arg != "self"]
                    inner = cls(path, child.name, own, scope.names.new_child())
                    found.append(inner)
                scope.note(child)
                left.append((child, inner))
        return found

    def note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self.calls.append(node)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned.append(node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self._assign(node.target, node.iter)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names.maps[0].setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for each, one in zip(target.elts, values, strict=False):
                self._assign(each, one)


class Offers:
    """Entries that the modules of ``paths`` offer.

    A helper is a function, of whatever module, with a parameter that ends in an `instead`: its calls are read as those
    of UserError are. Names are followed to what is assigned to them, and a call to what the one function of that name
    returns.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.scopes = [scope for path in paths for scope in Scope.of(path)]
        self.functions: Mapping[str, list[Scope]] = defaultdict(list)
        for scope in self.scopes:
            self.functions[scope.name].append(scope)
        self.helpers: dict[str, set[str]] = {_ERROR: {"instead"}}  # name → its parameters that end in an `instead`
        self.order: dict[str, Sequence[str]] = {_ERROR: _WORDS}
        before = 0
        while before != (before := sum(map(len, self.helpers.values()))):
            for scope in self.scopes:
                self._find_helpers(scope)

    def _find_helpers(self, scope: Scope) -> None:
        for name, values in scope.names.maps[0].items():
            if any(isinstance(value, ast.Call) and self._is_partial(value) for value in values):
                self.helpers.setdefault(name, set()).add("instead")
        helper = scope.parameters and not scope.name.startswith("__")
        for _, expression in self._given(scope) if helper else ():
            if reaching := {*_spliced(expression, scope.names)} & {*scope.parameters}:
                self.helpers.setdefault(scope.name, set()).update(reaching)
                self.order[scope.name] = scope.parameters

    def _given(self, scope: Scope) -> Iterator[tuple[ast.Call, ast.expr]]:
        """(call, argument) of what is given to the parameters of helpers."""
        for call in scope.calls:
            name = _last(call.func)
            wanted = self.helpers.get(name, {"instead"} if self._is_partial(call) else set())
            if wanted:
                yield from ((call, each.value) for each in call.keywords if each.arg in wanted)
                placed = zip(self.order.get(name, ()), call.args, strict=False)
                yield from ((call, value) for word, value in placed if word in wanted)

    def _is_partial(self, call: ast.Call) -> bool:
        return _last(call.func) == "partial" and bool(call.args) and _last(call.args[0]) in self.helpers

    def _parts(self, expression: ast.AST, names: Names) -> Iterator[ast.AST]:
        """The nodes of an expression, of what its names stand for, and of what the functions that it calls return."""
        left, seen = [expression], set[str]()
        while left:
            for node in ast.walk(left.pop()):
                yield node
                if isinstance(node, ast.Name) and node.id not in seen:
                    left += names.get(node.id, ())
                    seen.add(node.id)
                elif isinstance(node, ast.Call) and (called := f"{_last(node.func)}()") not in seen:
                    of_the_name = self.functions.get(called[:-2], [])
                    left += of_the_name[0].returned if len(of_the_name) == 1 else ()
                    seen.add(called)

    def texts(self) -> Iterator[tuple[Site, str]]:
        """(where, text) of the constants of each `instead`."""
        for scope in self.scopes:
            for call, expression in self._given(scope):
                for node in self._parts(expression, scope.names):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield Site(str(scope.path), scope.name, call.lineno, call.end_lineno or call.lineno), node.value


def _spliced(expression: ast.expr, names: Names) -> Iterator[str]:
    """The names whose texts become part of the expression's as they are."""
    left, seen = [expression], set[str]()
    while left:
        node = left.pop()
        if isinstance(node, ast.Name):
            yield node.id
            left += [] if node.id in seen else names.get(node.id, ())
            seen.add(node.id)
        elif isinstance(node, ast.BoolOp | ast.BinOp | ast.IfExp | ast.JoinedStr | ast.FormattedValue):
            tested = node.test if isinstance(node, ast.IfExp) else None
            left += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr) and each is not tested]


def _last(node: ast.expr) -> str:
    """The last word of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
