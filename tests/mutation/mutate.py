"""Which small changes of a source file its tests ought to notice: mutants, as replacements of a
span of text.

Not mutated, because no test could or should notice: docstrings, annotations and type aliases,
`__all__`, imports, the texts of errors and warnings (but raises are deleted), assertions,
`@overload` stubs, `del name`, and keywords that only guard or place (`UNTOUCHED_KEYWORDS`).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),  # the border, and the opposite
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {
    **{
        "min": "max",
        "amin": "amax",
        "minimum": "maximum",
        "any": "all",
        "argmin": "argmax",
        "zeros_like": "ones_like",
        "new_zeros": "new_ones",
    },
    **{
        "zeros": "ones",
        "bisect_left": "bisect_right",
        "ceil": "floor",
        "startswith": "endswith",
        "lstrip": "rstrip",
        "sum": "mean",
    },
    **{
        "index_copy": "index_add",
        "scatter_add": "scatter",
        "exp": "expm1",
        "log": "log1p",
        "log_softmax": "softmax",
    },
}
SWAPS = {**NAMES, **{new: old for old, new in NAMES.items()}}
REMOVABLE = (
    *(
        "clamp",
        "detach",
        "abs",
        "exp",
        "log",
        "sqrt",
        "square",
        "flip",
        "cumsum",
        "neg",
        "expm1",
        "sigmoid",
        "double",
        "float",
        "long",
        "contiguous",
    ),
    *("strip", "rstrip", "lstrip", "clone", "to"),
)
"""Methods whose call may be left out: `x.detach()` becomes `x`."""
DTYPES = {"float32": "float64", "float64": "float32", "int64": "int32"}
UNTOUCHED_KEYWORDS = ("strict", "device", "serialized_type_name", "stacklevel")
"""`strict=True` and `serialized_type_name` guard against what does not happen, and every device is
the CPU here.
"""
MESSAGES = ("warn", "print", "cast", "isinstance", "TypeVar")
"""Calls of which nothing is mutated: texts for people, and types."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    where: str
    """The outermost function or method that holds it (`Logprobs.__sub__`), or empty at module and
    class level.
    """
    in_body: bool
    """Inside the body of `where`, not in its defaults or decorators."""
    line: int
    lines: tuple[int, int]
    """First and last line of what has to be executed for the change to matter: the statement, or a
    compound statement's head.
    """
    operator: str
    span: tuple[int, int]
    """In bytes of the source."""
    text: str
    name: str
    """What identifies it across edits elsewhere: path, function, line and change."""

    def apply(self, source: bytes) -> bytes:
        return source[: self.span[0]] + self.text.encode() + source[self.span[1] :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in the order of the source. No two are the same text, and all
    compile.

    >>> [mutant.text for mutant in mutants_of("a.py", b"def f(x):\\n    return x < 1\\n")]
    ['None', '(x <= 1)', '(x >= 1)', '2', '0']
    """
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.seen: set[bytes] = {ast.dump(ast.parse(source)).encode()}
        self.names: dict[str, int] = {}
        self.scopes: list[ast.AST] = []
        self.head: ast.AST | None = None
        self.in_body = False
        self.bound: list[set[str]] = []

    # What is found

    def add(self, node: ast.AST, operator: str, replacement: str | ast.AST) -> None:
        """A mutant that has `replacement` in the place of `node`, unless it is no Python or was
        there before.
        """
        start, end = (self.starts[line - 1] + column for line, column in self.ends(node))
        text = replacement if isinstance(replacement, str) else _in_brackets(replacement)
        mutated = self.source[:start] + text.encode() + self.source[end:]
        try:
            dumped = ast.dump(ast.parse(mutated)).encode()
            compile(mutated, self.path, "exec")
        except SyntaxError:
            return
        if dumped in self.seen:
            return
        self.seen.add(dumped)
        outer = [scope for scope in self.scopes if not isinstance(scope, ast.ClassDef)][:1]
        classes = (
            [
                scope.name
                for scope in self.scopes[: self.scopes.index(outer[0])]
                if isinstance(scope, ast.ClassDef)
            ]
            if outer
            else []
        )
        where = ".".join([*classes, outer[0].name]) if outer else ""  # type: ignore[attr-defined]
        head = self.head or node
        first, last = self.starts[node.lineno - 1], self.starts[node.end_lineno]  # type: ignore[attr-defined]
        line, old = (
            " ".join(part.decode().split())
            for part in (self.source[first:last], self.source[start:end])
        )
        name = (
            f"{self.path} {where or 'module'}: {line if line != old else ''} [{old} ->"
            f" {' '.join(text.split())}]"
        )
        self.names[name] = self.names.get(name, 0) + 1
        if self.names[name] > 1:
            name += f" (#{self.names[name]})"
        self.found.append(
            Mutant(
                path=self.path,
                where=where,
                in_body=self.in_body,
                line=node.lineno,  # type: ignore[attr-defined]
                lines=(head.lineno, head.end_lineno),  # type: ignore[attr-defined]
                operator=operator,
                span=(start, end),
                text=text,
                name=name,
            )
        )

    @staticmethod
    def ends(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
        return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    # Where to look

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.head = (
                node
                if not hasattr(node, "body")
                else getattr(node, "test", None) or getattr(node, "iter", None) or node
            )
            self.statement(node)
            super().visit(node)
            return
        super().visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """In the order of the source; the head of a compound statement is what stands before its
        body.
        """
        head = self.head
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_comment", "ctx"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.head = head
                    self.visit(child)
        self.head = head

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any(
            getattr(decorator, "id", getattr(decorator, "attr", "")) == "overload"
            for decorator in node.decorator_list
        ):
            return
        for decorator in node.decorator_list:
            self.head = decorator
            self.visit(decorator)
        self.scopes.append(node)
        outermost = not self.in_body
        arguments = node.args
        self.bound.append(
            {
                argument.arg
                for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            }
        )
        for default in [
            *arguments.defaults,
            *(default for default in arguments.kw_defaults if default is not None),
        ]:
            self.head = (
                _Span(node.body[0].lineno, node.end_lineno) if outermost else self.head
            )  # it matters in every call
            self.visit(default)
        self.in_body = True
        for statement in node.body:
            self.visit(statement)
        self.in_body = not outermost
        self.bound.pop()
        self.scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.head = decorator
            self.visit(decorator)
        self.scopes.append(node)
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_Delete(self, node: ast.Delete) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Raise(self, node: ast.Raise) -> None: ...

    # What to change

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            self.add(node.value, "return", "None")
        if isinstance(node, ast.Break | ast.Continue):
            self.add(node, "statement", "continue" if isinstance(node, ast.Break) else "break")
        deletable = isinstance(node, ast.Raise | ast.AugAssign) or (
            isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        )
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = [
                name
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                for name in _targets(target)
            ]
            again = bool(self.bound) and all(
                not isinstance(target, ast.Name) or target.id in self.bound[-1]
                for target in targets
            )
            deletable = deletable or (again and self.in_body)
            if self.bound:
                self.bound[-1].update(
                    target.id for target in targets if isinstance(target, ast.Name)
                )
        if deletable:
            self.add(node, "statement", "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        alias = not self.in_body and (
            isinstance(node.value, ast.Subscript)
            or (isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr))
        )
        if "__all__" not in names and not alias:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC:
            self.add(
                node,
                "arithmetic",
                ast.unparse(ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)),
            )
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if getattr(node.test, "id", "") != "TYPE_CHECKING":
            self.negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare) and not (
            isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        ):
            self.add(test, "condition", ast.UnaryOp(ast.Not(), test))

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, old in enumerate(node.ops):
            for new in COMPARISONS[type(old)][: None if len(node.ops) == 1 else 1]:
                self.add(
                    node,
                    "comparison",
                    ast.Compare(
                        node.left,
                        [*node.ops[:place], new(), *node.ops[place + 1 :]],
                        node.comparators,
                    ),
                )
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            self.add(
                node, "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
            )
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.add(
            node,
            "boolean",
            ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values),
        )
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            self.number(node, -node.operand.value)  # type: ignore[operator]
            return
        self.add(node, "unary", node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", repr(not node.value))
        elif isinstance(node.value, str):
            self.add(node, "constant", repr("XX" + node.value))
        elif isinstance(node.value, int | float):
            self.number(node, node.value)

    def number(self, node: ast.expr, value: float) -> None:
        for new in (value + 1, value - 1) if isinstance(value, int) else (2 * value or 1.0,):
            if new >= 0 or value < 0:  # a size that is suddenly negative is found by anything
                self.add(node, "constant", repr(new))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (
            node.attr in DTYPES
            and isinstance(node.value, ast.Name)
            and node.value.id in ("torch", "np")
        ):
            self.add(node, "dtype", ast.Attribute(node.value, DTYPES[node.attr]))
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                self.add(bound, "slice", "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in MESSAGES:
            return
        if name == "require":  # the condition counts, the rest is the error's text
            self.visit(node.args[0])
            return
        if name in SWAPS:
            new = (
                ast.Attribute(node.func.value, SWAPS[name])
                if isinstance(node.func, ast.Attribute)
                else ast.Name(SWAPS[name])
            )
            self.add(node, "call", ast.Call(new, node.args, node.keywords))
        if (
            name in REMOVABLE
            and isinstance(node.func, ast.Attribute)
            and not _is_module(node.func.value)
        ):
            self.add(node, "call", node.func.value)
        if name in ("where", "masked") and len(node.args) >= 2:
            self.add(node, "guard", node.args[1])
        for keyword in node.keywords:
            plain = isinstance(keyword.value, ast.Constant) and isinstance(
                keyword.value.value, bool
            )  # its opposite is as good
            if keyword.arg not in (*UNTOUCHED_KEYWORDS, None) and not plain:
                self.add(
                    node,
                    "argument",
                    ast.Call(
                        node.func,
                        node.args,
                        [other for other in node.keywords if other is not keyword],
                    ),
                )
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in UNTOUCHED_KEYWORDS:
                self.visit(keyword.value)


class _Span(ast.AST):
    """Some lines, in the place of a node."""

    def __init__(self, lineno: int, end_lineno: int | None) -> None:
        self.lineno, self.end_lineno = lineno, end_lineno


def _in_brackets(node: ast.AST) -> str:
    text = ast.unparse(node)
    return (
        text
        if isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript)
        else f"({text})"
    )


def _targets(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _targets(element)
    else:
        yield target


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "math", "np", "dist", "re", "pytree")
