"""Read the declarations of public names from the source code, without importing it.

The source contains what a running interpreter does not show: the comments of fields, and defaults
as they are written. Reading it takes a fraction of a second, and needs neither torch nor any
framework.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "elasticlib"

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


class Module:
    """The source code of one module of elasticlib, named relative to the package."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = PACKAGE.joinpath(*name.split("."))
        self.is_package = path.is_dir()
        self.path = path / "__init__.py" if self.is_package else path.with_suffix(".py")
        text = self.path.read_text()
        self.tree = ast.parse(text)
        self.docstring = ast.get_docstring(self.tree) or ""
        self._comments: dict[int, tuple[str, bool]] = {}  # text, and whether it has its own line
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comment = token.string.lstrip("#").strip()
                self._comments[token.start[0]] = (comment, not token.line[: token.start[1]].strip())
        self._definitions: dict[str, Definition] = {}
        self._imports: dict[str, tuple[str, str]] = {}  # module and name of what is imported
        for node in self.tree.body:
            self._read(node)

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            self._definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    self._definitions[target.id] = node
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for name, value in zip(target.elts, node.value.elts, strict=False):
                        self._definitions[ast.unparse(name)] = ast.Assign([name], value)
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
            parents = package[: len(package) - node.level + 1]
            module = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                self._imports[alias.asname or alias.name] = (module, alias.name)

    def find(self, name: str) -> tuple[Module, Definition] | None:
        """Return the definition of a name, and its module; None if it is not in elasticlib."""
        if name in self._definitions:
            return self, self._definitions[name]
        if name in self._imports and self._imports[name][0]:
            module, original = self._imports[name]
            return read_module(module).find(original)
        return None

    def comment_of(self, node: ast.stmt) -> str:
        """Return the comment on the lines of a statement, or else the one above it."""
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            comment, has_own_line = self._comments.get(line, ("", True))
            if comment and not has_own_line:
                return comment
        lines: list[str] = []
        line = node.lineno - 1
        while line in self._comments and self._comments[line][1]:
            lines.insert(0, self._comments[line][0])
            line -= 1
        return " ".join(text for text in lines if not text.startswith("--"))


@functools.cache
def read_module(name: str) -> Module:
    """Return a module, such as `stores.interface`."""
    return Module(name)


class Field(NamedTuple):
    """A field or attribute of a class."""

    name: str
    type: str
    default: str | None  # None if there is none
    description: str
    is_keyword_only: bool = False


class PublicName(NamedTuple):
    """A public name, and where it is defined."""

    package: str  # from which users import the name
    name: str
    module: Module
    node: Definition

    @property
    def docstring(self) -> str:
        """The docstring; of a constant, its comment."""
        if isinstance(self.node, ast.ClassDef | ast.FunctionDef):
            return ast.get_docstring(self.node) or ""
        return self.module.comment_of(self.node)


def public_name(package: str, module_name: str, name: str) -> PublicName:
    """Return a public name.

    Raises:
        LookupError: it is not defined, or it or one of its public methods has no docstring.
    """
    found = read_module(module_name).find(name)
    if found is None:
        raise LookupError(f"{module_name} does not define {name}")
    public = PublicName(package, name, *found)
    check_documented(f"{package}.{name}", public.module, public.node)
    return public


def check_documented(name: str, module: Module, node: Definition) -> None:
    """Raise LookupError for a class or function without a docstring, or a method without one."""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        return
    if not ast.get_docstring(node):
        raise LookupError(f"{name} is public and has no docstring")
    # The hooks of an integration are documented by the framework that calls them.
    has_hooks = module.name.startswith("integrations.")
    if not isinstance(node, ast.ClassDef) or is_enum(node) or has_hooks:
        return
    for method in methods_of(node):
        is_public = not method.name.startswith(("_", "test_"))
        if is_public and not inherited_docstring(module, node, method.name):
            raise LookupError(f"{name}.{method.name} is public and has no docstring")


def inherited_docstring(module: Module, node: ast.ClassDef, method: str) -> str:
    """Return the docstring of a method, in the class or in one of its base classes."""
    for _, base in (module, node), *bases_of(module, node):
        for function in methods_of(base):
            docstring = ast.get_docstring(function)
            if function.name == method and docstring:
                return docstring
    return ""


def bases_of(
    module: Module, node: ast.ClassDef, is_end: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[Module, ast.ClassDef]]:
    """Yield the base classes that elasticlib defines, and theirs.

    Args:
        module: The module of the class.
        node: The class.
        is_end: Returns whether the bases of a base class with this name are left out.
    """
    for base in node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        found = module.find(expression.id) if isinstance(expression, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]
            if not is_end(found[1].name):
                yield from bases_of(found[0], found[1], is_end)


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the functions in the body of a class; of an overloaded one, the implementation."""
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return [item for item in functions if "overload" not in decorators_of(item)]


def decorators_of(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return the names of the decorators, without their module and arguments."""
    expressions = (
        item.func if isinstance(item, ast.Call) else item for item in node.decorator_list
    )
    return [ast.unparse(expression).rpartition(".")[2] for expression in expressions]


def is_attrs_class(node: ast.ClassDef) -> bool:
    """Return whether `attrs` makes the constructor of a class from its fields."""
    return not {"frozen", "define"}.isdisjoint(decorators_of(node))


def is_enum(node: ast.ClassDef) -> bool:
    """Return whether a class is an enumeration."""
    return any(ast.unparse(base).rpartition(".")[2].endswith("Enum") for base in node.bases)


def fields_of(module: Module, node: ast.ClassDef) -> list[Field]:
    """Return the public fields and class attributes, with their comments or docstrings."""
    is_keyword_only = any(
        isinstance(item, ast.Call) and any(keyword.arg == "kw_only" for keyword in item.keywords)
        for item in node.decorator_list
    )
    fields = []
    for statement, docstring in _with_docstrings(node.body):
        target, annotation = _target_of(statement)
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            default = _Default(module, getattr(statement, "value", None))
            fields.append(
                Field(
                    target.id,
                    annotation,
                    default.text,
                    docstring or module.comment_of(statement),
                    is_keyword_only or default.is_keyword_only,
                )
            )
    return fields


def attributes_of(module: Module, node: ast.ClassDef) -> list[Field]:
    """Return the public attributes that the constructor sets and documents, and the properties."""
    attributes = []
    for function in methods_of(node):
        if function.name == "__init__":
            for statement, docstring in _with_docstrings(function.body):
                target, annotation = _target_of(statement)
                if isinstance(target, ast.Attribute) and docstring:
                    attributes.append(Field(target.attr, annotation, None, docstring))
        elif not {"property", "cached_property"}.isdisjoint(decorators_of(function)):
            returns = "" if function.returns is None else ast.unparse(function.returns)
            docstring = inherited_docstring(module, node, function.name)
            if not function.name.startswith("_"):
                attributes.append(Field(function.name, returns, None, docstring))
    return attributes


def signature(name: str, function: ast.FunctionDef, module: Module, *, is_method: bool) -> str:
    """Return the signature of a function, in lines of at most 100 columns."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    parts = [
        _parameter(module, argument, default)
        for argument, default in zip(positional, [*defaults, *arguments.defaults], strict=True)
    ]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if is_method and "staticmethod" not in decorators_of(function):
        del parts[0]
    if arguments.vararg is not None:
        parts.append(f"*{_parameter(module, arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    for argument, default_value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(_parameter(module, argument, default_value))
    if arguments.kwarg is not None:
        parts.append(f"**{_parameter(module, arguments.kwarg, None)}")
    is_constructor = function.name == "__init__"
    returns = "" if is_constructor or function.returns is None else ast.unparse(function.returns)
    return _layout(name, parts, f" -> {returns}" if returns else "")


def attrs_signature(name: str, module: Module, node: ast.ClassDef) -> str:
    """Return the signature of the constructor that `attrs` makes, without types."""
    fields = fields_of(module, node)
    parts = [_with_default(field) for field in fields if not field.is_keyword_only]
    keywords = [_with_default(field) for field in fields if field.is_keyword_only]
    return _layout(name, [*parts, *(["*", *keywords] if keywords else [])], "")


def _with_default(field: Field) -> str:
    return field.name if field.default is None else f"{field.name}={field.default}"


def _layout(name: str, parts: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    body = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{body}){returns}"


def _parameter(module: Module, argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
    if default is None:
        return text
    equals = " = " if argument.annotation is not None else "="
    return f"{text}{equals}{_value_text(module, default)}"


def _with_docstrings(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement with the docstring that follows it, if there is one."""
    for statement, following in zip(body, [*body[1:], None], strict=True):
        value = following.value if isinstance(following, ast.Expr) else None
        docstring = value.value if isinstance(value, ast.Constant) else ""
        is_text = isinstance(docstring, str)
        yield statement, inspect.cleandoc(docstring) if is_text else ""  # type: ignore[arg-type]


def _target_of(statement: ast.stmt) -> tuple[ast.expr | None, str]:
    """Return the target of an assignment, and its annotation."""
    if isinstance(statement, ast.AnnAssign):
        annotation = ast.unparse(statement.annotation)
        return (None, "") if annotation.startswith("ClassVar") else (statement.target, annotation)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0], ""
    return None, ""


class _Default:
    """The default of a field, and whether only a keyword can give the field."""

    def __init__(self, module: Module, value: ast.expr | None) -> None:
        self.is_keyword_only = False
        self.text = None if value is None else _value_text(module, value)
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("attrs.field", "attr.ib"):
            keywords = {keyword.arg: keyword.value for keyword in value.keywords}
            self.is_keyword_only = "kw_only" in keywords
            self.text = None
            if "default" in keywords:
                self.text = _value_text(module, keywords["default"])
            elif "factory" in keywords:
                empty = {"dict": "{}", "list": "[]", "set": "set()", "tuple": "()"}
                factory = ast.unparse(keywords["factory"])
                self.text = empty.get(factory, f"{factory}()")


def _value_text(module: Module, value: ast.expr) -> str:
    """Return the source of a default. A constant of elasticlib is replaced by its value."""
    if isinstance(value, ast.Name):
        found = module.find(value.id)
        definition = None if found is None else found[1]
        constant = getattr(definition, "value", None)
        if isinstance(constant, ast.Constant) or _is_tuple_of_constants(constant):
            return ast.unparse(constant)
    if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "DEFAULTS":
        from elasticlib.launch.flags import DEFAULTS

        return repr(DEFAULTS[ast.literal_eval(value.slice)])
    return re.sub(r"\s+", " ", ast.unparse(value))


def _is_tuple_of_constants(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Tuple) and all(
        isinstance(item, ast.Constant | ast.Attribute) for item in value.elts
    )
