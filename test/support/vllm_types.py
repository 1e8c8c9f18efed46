"""Which expressions of our source are objects of vLLM, and of which class: worked out from annotations and assignments.

Only what can be read is used: our annotations, vLLM's annotations and assignments, ``isinstance``, and a table of names
for values that are ``Any`` in our code. Order of statements is not looked at: a name has all types that it is given.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from support.vllm_source import Defined, Found, Function, Member, Sources, names_bound

ITERABLES = {
    *("list", "set", "frozenset", "Set", "deque", "Iterable", "Iterator", "Sequence", "MutableSequence", "Collection"),
    *("Reversible", "Generator", "AsyncGenerator", "AsyncIterator", "AsyncIterable"),
}
MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict", "WeakKeyDictionary"}
TRANSPARENT = {
    *("Optional", "Union", "Annotated", "Final", "ClassVar", "Required", "InitVar", "Awaitable", "SkipValidation"),
}
KEEPS_TYPE = {"copy", "deepcopy", "replace", "cast", "clone"}
MAKES_LIST = {"list", "sorted", "set", "tuple", "reversed", "iter", "frozenset", "deque"}
TAKES_ONE = {"next", "max", "min"}


@dataclass(frozen=True, slots=True)
class Type:
    """A type that an expression may have.

    ``kind`` is one of ``instance``, ``class``, ``function``, ``module``, ``super``, ``items`` (of ``parts[0]``),
    ``table`` (keys, values), ``row`` (a tuple), ``method`` (of a container), ``plain`` (not of vLLM), ``unknown``.
    """

    kind: str
    of: Found | None = None
    parts: tuple[frozenset[Type], ...] = ()
    name: str = ""
    bound: bool = False


Types = frozenset[Type]
PLAIN, UNKNOWN, NOTHING = frozenset({Type("plain")}), frozenset({Type("unknown")}), frozenset[Type]()


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Where an expression stands."""

    module: str
    owner: Found | None = None
    function: Function | None = None
    outer: Scope | None = None

    @property
    def name(self) -> str:
        """The qualified name of the function."""
        own = (
            getattr(self.function, "name", "") if self.function else getattr(getattr(self.owner, "node", 0), "name", "")
        )
        return ".".join(filter(None, [self.outer.name if self.outer else "", own]))


Source = tuple[str, ast.AST, tuple[int, ...]]


class Reader:
    """Works out types.

    Args:
        sources: ours and a release's.
        named: gives the types of a name, or of an attribute, that is ``Any`` in a scope of ours.
        mixed: a class of ours -> the one of vLLM that it is mixed into, as dotted paths.
    """

    def __init__(
        self,
        sources: Sources,
        named: Callable[[str, Scope], str | None] = lambda name, scope: None,
        mixed: Mapping[str, str] | None = None,
    ) -> None:
        self.sources = sources
        self._named, self._mixed = named, mixed or {}
        self._known: dict[tuple[int, int], Types] = {}
        self._bound: dict[int, dict[str, list[Source]]] = {}
        self._narrowed: dict[int, dict[str, list[ast.expr]]] = {}
        self._scopes: dict[int, Scope] = {}
        self._running: set[tuple[int, int]] = set()

    # -- expressions ------------------------------------------------------------------------------------------------

    def types(self, node: ast.AST, scope: Scope) -> Types:
        """Return the types of an expression; nothing for ``None``, and where an expression depends on itself."""
        key = (id(node), id(scope))
        if key in self._known:
            return self._known[key]
        if key in self._running:
            return NOTHING
        self._running.add(key)
        try:
            found = self._types(node, scope)
        finally:
            self._running.discard(key)
        if not found - UNKNOWN and isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            path = self._named(name, scope)
            found = self._narrow(node, scope) | (NOTHING if path is None else self.of_path(path)) or found
        if found - UNKNOWN - PLAIN:
            found -= UNKNOWN
        self._known[key] = found
        return found

    def of_path(self, path: str) -> Types:
        """Return the types of an annotation over dotted paths; ``plain`` is no object of vLLM."""
        return PLAIN if path == "plain" else self.annotated(ast.parse(path, mode="eval").body, "")

    def _types(self, node: ast.AST, scope: Scope) -> Types:
        match node:
            case ast.Constant(value=None):
                return NOTHING
            case ast.Name():
                return self._of_name(node.id, scope)
            case ast.Attribute():
                return self._union(self.attribute(one, node.attr) for one in self.types(node.value, scope))
            case ast.Call():
                return self._of_call(node, scope)
            case ast.Await() | ast.Starred() | ast.NamedExpr():
                return self.types(node.value, scope)
            case ast.Subscript():
                return self._union(self._item_at(one, node.slice) for one in self.types(node.value, scope))
            case ast.IfExp():
                return self.types(node.body, scope) | self.types(node.orelse, scope)
            case ast.BoolOp():
                return self._union(self.types(value, scope) for value in node.values)
            case ast.BinOp():
                sides = self.types(node.left, scope) | self.types(node.right, scope)
                return frozenset(one for one in sides if one.kind in ("items", "table", "unknown")) or PLAIN
            case ast.List() | ast.Set():
                return _items(self._union(self._spread(part, scope) for part in node.elts))
            case ast.Tuple():
                if any(isinstance(part, ast.Starred) for part in node.elts):
                    return _items(self._union(self._spread(part, scope) for part in node.elts))
                return frozenset({Type("row", parts=tuple(self.types(part, scope) for part in node.elts))})
            case ast.Dict():
                values = self._union(
                    self.types(value, scope) if key is not None else self._values(value, scope)
                    for key, value in zip(node.keys, node.values, strict=True)
                )
                return frozenset({Type("table", parts=(PLAIN, values))})
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return _items(self.types(node.elt, scope))
            case ast.DictComp():
                return frozenset({Type("table", parts=(self.types(node.key, scope), self.types(node.value, scope)))})
        return PLAIN

    def _spread(self, node: ast.expr, scope: Scope) -> Types:
        return self.elements(node.value, scope) if isinstance(node, ast.Starred) else self.types(node, scope)

    def _values(self, node: ast.expr, scope: Scope) -> Types:
        return self._union(one.parts[1] for one in self.types(node, scope) if one.kind == "table")

    def elements(self, node: ast.expr, scope: Scope) -> Types:
        """Return the types of what iterating over an expression gives."""
        return self._union(self._element(one) for one in self.types(node, scope))

    def _element(self, one: Type) -> Types:
        if one.kind in ("items", "table"):
            return one.parts[0]
        if one.kind == "row":
            return self._union(one.parts)
        if one.kind == "instance":
            iterated = self._union(
                self._result(method) for name in ("__iter__", "__aiter__") for method in self.attribute(one, name)
            )
            return self._union(self._element(inner) for inner in iterated if inner != one) or UNKNOWN
        return frozenset({one}) if one.kind in ("plain", "unknown") else UNKNOWN

    def _item_at(self, one: Type, index: ast.expr) -> Types:
        if isinstance(index, ast.Slice):
            return frozenset({one})
        if one.kind == "table":
            return one.parts[1]
        if one.kind == "items":
            return one.parts[0]
        if one.kind == "row":
            at = index.value if isinstance(index, ast.Constant) else None
            return (
                one.parts[at]
                if isinstance(at, int) and -len(one.parts) <= at < len(one.parts)
                else self._union(one.parts)
            )
        if one.kind == "instance":
            return self._union(self._result(method) for method in self.attribute(one, "__getitem__"))
        return frozenset({one}) if one.kind in ("plain", "unknown", "class") else UNKNOWN

    # -- attributes -------------------------------------------------------------------------------------------------

    def attribute(self, one: Type, name: str) -> Types:
        """Return the types of an attribute; nothing if it is not there."""
        if one.kind in ("plain", "unknown"):
            return PLAIN if name.startswith("__") else frozenset({one})
        if one.kind == "module":
            assert one.of is not None
            return self._union(self.of_found(found) for found in self.sources.imported(one.of.module, name))
        if one.kind in ("instance", "class", "super"):
            return self._of_member(one, name)
        if one.kind in ("items", "table", "row"):
            return frozenset({Type("method", parts=(frozenset({one}),), name=name)})
        return PLAIN

    def lacks(self, one: Type, name: str) -> bool:
        """Whether something of vLLM has no such attribute."""
        if one.kind == "module":
            assert one.of is not None
            found = self.sources.imported(one.of.module, name)
            return not found and name not in self.sources.names(one.of.module) and not name.startswith("__")
        if one.kind in ("instance", "class", "super"):
            assert one.of is not None
            if (name.startswith("__") and hasattr(object, name)) or name in ("__dict__", "__name__", "__mro__"):
                return False
            return not self._member(one, name) and not self.sources.inherits(one.of, name)
        return False

    def _member(self, one: Type, name: str) -> list[Member]:
        assert one.of is not None
        if one.kind == "super":
            for base in self.sources.bases(one.of):
                if base.node is not None and (found := self.sources.members(base, name)):
                    return found
            return []
        found = self.sources.members(one.of, name)
        if not found and (other := self._mixed.get(str(one.of))):
            for host in self.of_path(other):
                assert host.of is not None
                found = found or self.sources.members(host.of, name)
        return found

    def _of_member(self, one: Type, name: str) -> Types:
        members = self._member(one, name)
        if not members:
            assert one.of is not None
            others = (base for base in self.sources.lineage(one.of) if base.node is None)
            return PLAIN if any(not self.sources.ours(base.module) for base in others) else NOTHING
        annotated = [member for member in members if isinstance(member.node, ast.AnnAssign)]
        return self._union(self._of_binding(member, one, name) for member in annotated or members)

    def _of_binding(self, member: Member, one: Type, name: str) -> Types:
        node, module = member.node, member.owner.module
        if isinstance(node, Function):
            decorators = {ast.unparse(part).split("(")[0].split(".")[-1] for part in node.decorator_list}
            if decorators & {"property", "cached_property"}:
                return self.annotated(node.returns, module)
            bound = "staticmethod" not in decorators and (one.kind != "class" or "classmethod" in decorators)
            return frozenset({Type("function", Found(module, node), bound=bound)})
        if isinstance(node, ast.ClassDef):
            return frozenset({Type("class", Found(module, node))})
        if isinstance(node, ast.AnnAssign):
            return self.annotated(node.annotation, module)
        if member.method is None and any("Enum" in str(base) for base in self.sources.lineage(member.owner)):
            return frozenset({Type("instance", member.owner)})
        scope = self.scope(module, member.owner, member.method)
        return self._union(self._of_source(source, scope) for source in _sources(node, name)) or UNKNOWN

    # -- names ------------------------------------------------------------------------------------------------------

    def scope(self, module: str, owner: Found | None, function: Function | None, outer: Scope | None = None) -> Scope:
        """Return the scope of a function; the same one each time."""
        key = id(function or (owner.node if owner else None) or self.sources.tree(module))
        return self._scopes.setdefault(key, Scope(module, owner, function, outer))

    def _of_name(self, name: str, scope: Scope) -> Types:
        at: Scope | None = scope
        while at is not None:
            if at.function is not None and (bound := self._bindings(at).get(name)):
                return self._union(self._of_source(source, at) for source in bound)
            at = at.outer
        if found := self.sources.find(scope.module, name):
            return self._union(self.of_found(one) for one in found)
        return PLAIN if hasattr(builtins, name) else UNKNOWN

    def of_found(self, found: Found) -> Types:
        """Return the types of what a name leads to."""
        node = found.node
        if node is None:
            return frozenset({Type("module", found)}) if self.sources.ours(found.module) else PLAIN
        if isinstance(node, ast.ClassDef):
            return frozenset({Type("class", found)})
        if isinstance(node, Function):
            return frozenset({Type("function", found)})
        if isinstance(node, ast.AnnAssign):
            return self.annotated(node.annotation, found.module)
        if isinstance(node, ast.Assign):
            return self.types(node.value, self.scope(found.module, None, None))
        return UNKNOWN

    def _bindings(self, scope: Scope) -> dict[str, list[Source]]:
        function = scope.function
        assert function is not None
        if id(function) not in self._bound:
            bound: dict[str, list[Source]] = {}
            arguments = function.args
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                bound.setdefault(argument.arg, []).append(("parameter", argument, ()))
            for other in (arguments.vararg, arguments.kwarg):
                if other is not None:
                    bound.setdefault(other.arg, []).append(("rest", other, ()))
            for part in inside(function):
                for name in _names_given(part):
                    bound.setdefault(name, []).extend(_sources(part, name))
            self._bound[id(function)] = bound
        return self._bound[id(function)]

    def _of_source(self, source: Source, scope: Scope) -> Types:
        how, node, path = source
        if how == "parameter":
            assert isinstance(node, ast.arg)
            return self._of_parameter(node, scope)
        if how == "annotation":
            assert isinstance(node, ast.expr)
            return self.annotated(node, scope.module)
        if how == "definition":
            assert isinstance(node, Defined)
            return frozenset(
                {Type("class" if isinstance(node, ast.ClassDef) else "function", Found(scope.module, node))}
            )
        if how in ("value", "element"):
            assert isinstance(node, ast.expr)
            found = self.types(node, scope) if how == "value" else self.elements(node, scope)
            for index in path:
                found = self._union(self._item_at(one, ast.Constant(index)) for one in found)
            return found
        if how == "import":
            return self._union(self.of_found(one) for one in self._of_import(node, path, scope))
        return UNKNOWN if how == "lambda" else PLAIN

    def _of_import(self, node: ast.AST, path: tuple[int, ...], scope: Scope) -> list[Found]:
        assert isinstance(node, ast.Import | ast.ImportFrom)
        alias = node.names[path[0]]
        if isinstance(node, ast.Import):
            return [Found(alias.name if alias.asname else alias.name.split(".")[0])]
        return self.sources.imported(self.sources.absolute(scope.module, node), alias.name)

    def _of_parameter(self, argument: ast.arg, scope: Scope) -> Types:
        function = scope.function
        assert function is not None
        first = next(iter([*function.args.posonlyargs, *function.args.args]), None)
        names = {ast.unparse(part) for part in function.decorator_list}
        if argument is first and scope.owner is not None and "staticmethod" not in names:
            is_class = "classmethod" in names or function.name in ("__new__", "__init_subclass__")
            return frozenset({Type("class" if is_class else "instance", scope.owner)})
        return self.annotated(argument.annotation, scope.module)

    def _narrow(self, node: ast.expr, scope: Scope) -> Types:
        """Return the classes that ``isinstance`` asks about, anywhere in the function."""
        function = scope.function
        if function is None:
            return NOTHING
        if id(function) not in self._narrowed:
            asked: dict[str, list[ast.expr]] = {}
            for part in inside(function):
                match part:
                    case ast.Call(func=ast.Name(id="isinstance"), args=[one, kind]):
                        asked.setdefault(ast.unparse(one), []).append(kind)
            self._narrowed[id(function)] = asked
        kinds = self._narrowed[id(function)].get(ast.unparse(node), [])
        found = self._union(self.types(part, scope) for kind in kinds for part in _alternatives(kind))
        return frozenset(
            Type("instance", one.of) if one.kind == "class" and self._of_vllm(one) else Type("plain") for one in found
        )

    def _of_vllm(self, one: Type) -> bool:
        return one.of is not None and one.of.module.split(".")[0] == "vllm"

    # -- calls and annotations --------------------------------------------------------------------------------------

    def _of_call(self, node: ast.Call, scope: Scope) -> Types:
        arguments = node.args
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if isinstance(node.func, ast.Name) and hasattr(builtins, name) and arguments:
            if name == "getattr":
                return self._of_getattr(node, scope)
            if name in MAKES_LIST:
                return _items(self.elements(arguments[0], scope))
            if name == "dict":
                return self.types(arguments[0], scope)
            if name in TAKES_ONE:
                return self.elements(arguments[0], scope) if len(arguments) == 1 or name == "next" else PLAIN
            if name == "zip":
                return _items(frozenset({Type("row", parts=tuple(self.elements(one, scope) for one in arguments))}))
            if name == "enumerate":
                return _items(frozenset({Type("row", parts=(PLAIN, self.elements(arguments[0], scope)))}))
            if name == "type":
                return frozenset(
                    Type("class", one.of) if one.kind == "instance" else one for one in self.types(arguments[0], scope)
                )
        if name == "super" and scope.owner is not None:
            return frozenset({Type("super", scope.owner)})
        called = self.types(node.func, scope)
        if name in KEEPS_TYPE and arguments and called <= PLAIN:
            return self.types(arguments[-1 if name == "cast" else 0], scope)
        return self._union(self._result(one) for one in called)

    def _of_getattr(self, node: ast.Call, scope: Scope) -> Types:
        if not isinstance(node.args[1], ast.Constant):
            return UNKNOWN
        held = self._union(self.attribute(one, str(node.args[1].value)) for one in self.types(node.args[0], scope))
        return held | (self.types(node.args[2], scope) if len(node.args) > 2 else NOTHING)

    def _result(self, called: Type) -> Types:
        if called.kind == "class":
            return frozenset({Type("instance", called.of)})
        if called.kind == "function":
            assert called.of is not None and isinstance(called.of.node, Function)
            return self.annotated(called.of.node.returns, called.of.module)
        if called.kind == "method":
            return self._union(self._of_container(one, called.name) for one in called.parts[0])
        if called.kind == "instance":
            return self._union(self._result(one) for one in self.attribute(called, "__call__"))
        return frozenset({called}) if called.kind in ("plain", "unknown") else PLAIN

    def _of_container(self, one: Type, method: str) -> Types:
        if one.kind == "table":
            keys, values = one.parts
            if method == "items":
                return _items(frozenset({Type("row", parts=(keys, values))}))
            if method in ("keys", "values"):
                return _items(keys if method == "keys" else values)
            return values if method in ("get", "pop", "setdefault") else frozenset({one}) if method == "copy" else PLAIN
        if method in ("pop", "popleft"):
            return self._element(one)
        return frozenset({one}) if method in ("copy", "union", "difference") else PLAIN

    def annotated(self, node: ast.expr | None, module: str) -> Types:
        """Return the types that an annotation in a module names."""
        match node:
            case None:
                return UNKNOWN
            case ast.Constant(value=str() as text):
                return self.annotated(ast.parse(text, mode="eval").body, module)
            case ast.Constant():
                return NOTHING
            case ast.BinOp():
                return self.annotated(node.left, module) | self.annotated(node.right, module)
            case ast.Subscript():
                return self._subscripted(node, module)
            case ast.Name() | ast.Attribute():
                return self._named_type(node, module)
        return PLAIN

    def _subscripted(self, node: ast.Subscript, module: str) -> Types:
        name = ast.unparse(node.value).split(".")[-1]
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in TRANSPARENT:
            wanted = parts if name == "Union" else parts[:1]
            return self._union(self.annotated(part, module) for part in wanted)
        if name in ITERABLES:
            return _items(self.annotated(parts[0], module))
        if name in MAPPINGS:
            return frozenset(
                {Type("table", parts=(self.annotated(parts[0], module), self.annotated(parts[-1], module)))}
            )
        if name == "tuple" or name == "Tuple":
            if isinstance(parts[-1], ast.Constant) and parts[-1].value is ...:
                return _items(self.annotated(parts[0], module))
            return frozenset({Type("row", parts=tuple(self.annotated(part, module) for part in parts))})
        if name == "type":
            return frozenset(Type("class", one.of) for one in self.annotated(parts[0], module) if one.of) or PLAIN
        if name in ("Callable", "Literal"):
            return PLAIN
        return self.annotated(node.value, module)

    def _named_type(self, node: ast.expr, module: str) -> Types:
        path = ast.unparse(node)
        name = path.split(".")[-1]
        if name in ("Any", "object"):
            return UNKNOWN
        if name in ITERABLES:
            return _items(UNKNOWN)
        if name in MAPPINGS:
            return frozenset({Type("table", parts=(UNKNOWN, UNKNOWN))})
        if not module:  # a path of the table of names
            home, _, name = path.rpartition(".")
            found = self.sources.imported(home, name) if home else []
            if home and not found:
                return frozenset({Type("instance", Found(f"{home}.{name} is not there"))})
        else:
            found = self.sources.resolve(module, node)
        return self._union(self._of_alias(one) for one in found) or PLAIN

    def _of_alias(self, found: Found) -> Types:
        node = found.node
        if isinstance(node, ast.ClassDef):
            return frozenset({Type("instance", found)})
        if isinstance(node, ast.Assign) and isinstance(
            node.value, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp
        ):
            return self.annotated(node.value, found.module)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self.annotated(node.value, found.module)
        if isinstance(node, ast.Assign):  # a type variable
            return UNKNOWN
        return PLAIN

    @staticmethod
    def _union(found: Iterable[Types]) -> Types:
        return frozenset().union(*found)


def _items(of: Types) -> Types:
    return frozenset({Type("items", parts=(of,))})


def _alternatives(kind: ast.expr) -> list[ast.expr]:
    if isinstance(kind, ast.Tuple):
        return [part for one in kind.elts for part in _alternatives(one)]
    if isinstance(kind, ast.BinOp):
        return _alternatives(kind.left) + _alternatives(kind.right)
    return [kind]


def inside(function: Function) -> Iterator[ast.AST]:
    """Yield the parts of a function, without those of functions and classes inside it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        part = waiting.pop(0)
        yield part
        if not isinstance(part, Defined):
            waiting.extend(ast.iter_child_nodes(part))


def _names_given(part: ast.AST) -> set[str]:
    if isinstance(part, ast.comprehension):
        return {inner.id for inner in ast.walk(part.target) if isinstance(inner, ast.Name)}
    if isinstance(part, ast.Lambda):
        return {argument.arg for argument in part.args.args}
    if isinstance(part, ast.ExceptHandler) and part.name:
        return {part.name}
    if isinstance(part, ast.Call):
        return {argument.arg for key in _keys(part) for argument in key.args.args}
    return names_bound(part)


def _keys(call: ast.Call) -> list[ast.Lambda]:
    """The function by which a call of ``max``, ``min`` or ``sorted`` compares."""
    if ast.unparse(call.func) not in ("max", "min", "sorted"):
        return []
    return [one.value for one in call.keywords if one.arg == "key" and isinstance(one.value, ast.Lambda)]


def _sources(part: ast.AST, name: str) -> list[Source]:
    """Return what a statement gives a name, or an attribute of that name."""
    match part:
        case ast.Import() | ast.ImportFrom():
            return [
                ("import", part, (index,))
                for index, alias in enumerate(part.names)
                if (alias.asname or alias.name.split(".")[0]) == name
            ]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [("definition", part, ())]
        case ast.AnnAssign():
            return [("annotation", part.annotation, ())]
        case ast.Assign():
            return [("value", part.value, path) for one in part.targets for path in paths(one, name)]
        case ast.NamedExpr():
            return [("value", part.value, ())]
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            return [("element", part.iter, path) for path in paths(part.target, name)]
        case ast.Call():
            return [("element", part.args[0], ()) for _ in _keys(part) if part.args]
        case ast.Lambda():
            return [("lambda", part, ())]
    return [("plain", part, ())]


def paths(target: ast.expr, name: str) -> Iterator[tuple[int, ...]]:
    """Yield where in a target a name stands."""
    if isinstance(target, ast.Tuple | ast.List):
        for index, part in enumerate(target.elts):
            for path in paths(part, name):
                yield (index, *path)
    elif (isinstance(target, ast.Name) and target.id == name) or (
        isinstance(target, ast.Attribute) and target.attr == name
    ):
        yield ()
