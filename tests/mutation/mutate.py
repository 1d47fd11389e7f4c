"""Which small changes of a source file its tests ought to notice: mutants, as replacements of a
span of text.

Not mutated, because no test could or should notice: docstrings, annotations and type aliases,
`__all__`, imports, the texts of errors and warnings (but raises are deleted), assertions,
`@overload` stubs, `del name`, and keywords that only guard or place (`UNTOUCHED_KEYWORDS`).
"""

import ast
from dataclasses import dataclass
from typing import Any

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
    "min": "max",
    "amin": "amax",
    "minimum": "maximum",
    "any": "all",
    "argmin": "argmax",
    "zeros_like": "ones_like",
    "new_zeros": "new_ones",
    "zeros": "ones",
    "bisect_left": "bisect_right",
    "ceil": "floor",
    "startswith": "endswith",
    "lstrip": "rstrip",
    "sum": "mean",
    "index_copy": "index_add",
    "scatter_add": "scatter",
    "exp": "expm1",
    "log": "log1p",
    "log_softmax": "softmax",
}
SWAPS = {**NAMES, **{new: old for old, new in NAMES.items()}}
REMOVABLE = (
    *("clamp", "detach", "abs", "exp", "log", "sqrt", "square", "flip", "cumsum", "neg"),
    *("expm1", "sigmoid", "double", "float", "long", "contiguous"),
    *("strip", "rstrip", "lstrip", "clone", "to"),
)
"""Methods whose call may be left out: `x.detach()` becomes `x`."""
DTYPES = {"float32": "float64", "float64": "float32", "int64": "int32"}
MODULES = ("torch", "math", "np", "dist", "re", "pytree")
UNTOUCHED_KEYWORDS = ("strict", "device", "serialized_type_name", "stacklevel")
"""They guard against what does not happen, and every device is the CPU here."""
MESSAGES = ("warn", "print", "cast", "isinstance", "TypeVar")
"""Calls of which nothing is mutated: texts for people, and types."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    where: str
    """The outermost function or method that holds it (`Logprobs.__sub__`), or empty."""
    in_body: bool
    """Inside the body of `where`, not in its defaults or decorators."""
    line: int
    lines: tuple[int, int]
    """What has to be executed for the change to matter: the statement, or a compound one's head."""
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
        self.seen = {ast.dump(ast.parse(source))}
        self.names: dict[str, int] = {}
        self.classes: list[str] = []
        self.where, self.in_body = "", False
        self.lines: tuple[int, int] | None = None
        self.bound: list[set[str]] = []

    def add(self, node: Any, operator: str, replacement: str | ast.AST) -> None:
        """`replacement` in the place of `node`, unless it is no Python or was there before."""
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        text = replacement if isinstance(replacement, str) else _in_brackets(replacement)
        mutated = self.source[:start] + text.encode() + self.source[end:]
        try:
            tree = ast.parse(mutated)
            compile(tree, self.path, "exec")
        except SyntaxError:
            return
        if (dumped := ast.dump(tree)) in self.seen:
            return
        self.seen.add(dumped)
        whole = self.source[self.starts[node.lineno - 1] : self.starts[node.end_lineno]]
        line, old, new = (
            " ".join(part.split())
            for part in (whole.decode(), self.source[start:end].decode(), text)
        )
        name = (
            f"{self.path} {self.where or 'module'}: {line if line != old else ''} [{old} -> {new}]"
        )
        self.names[name] = self.names.get(name, 0) + 1
        if self.names[name] > 1:
            name += f" (#{self.names[name]})"
        self.found.append(
            Mutant(
                path=self.path,
                where=self.where,
                in_body=self.in_body,
                line=node.lineno,
                lines=self.lines or (node.lineno, node.end_lineno),
                operator=operator,
                span=(start, end),
                text=text,
                name=name,
            )
        )

    # Where to look

    def visit(self, node: Any) -> None:
        lines = self.lines
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            head = getattr(node, "test", getattr(node, "iter", node))
            self.lines = (head.lineno, head.end_lineno)
            self.statement(node)
        super().visit(node)
        self.lines = lines

    def decorators(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.lines = (decorator.lineno, decorator.end_lineno or 0)
            self.visit(decorator)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any(ast.unparse(each).endswith("overload") for each in node.decorator_list):
            return
        self.decorators(node)
        outer, self.where = self.where, self.where or ".".join([*self.classes, node.name])
        arguments = node.args
        everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.bound.append({argument.arg for argument in everything})
        if not outer:  # a default matters in every call
            self.lines = (node.body[0].lineno, node.end_lineno or 0)
        for default in filter(None, [*arguments.defaults, *arguments.kw_defaults]):
            self.visit(default)
        self.in_body = True
        for statement in node.body:
            self.visit(statement)
        self.where, self.in_body = outer, bool(outer)
        self.bound.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.decorators(node)
        self.classes.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.classes.pop()

    def nothing(self, node: ast.AST) -> None: ...

    visit_Import = visit_ImportFrom = visit_Assert = visit_Delete = nothing
    visit_JoinedStr = visit_Raise = nothing

    # What to change

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                self.add(value, "return", "None")
            case ast.Break():
                self.add(node, "statement", "continue")
            case ast.Continue():
                self.add(node, "statement", "break")
            case ast.Raise() | ast.AugAssign():
                self.add(node, "statement", "pass")
            case ast.Expr(value=value) if not isinstance(value, ast.Constant):
                self.add(node, "statement", "pass")
            case ast.Assign(targets=targets) if self.in_body:
                self.assignment(node, targets)
            case ast.AnnAssign(target=target, value=ast.expr()) if self.in_body:
                self.assignment(node, [target])

    def assignment(self, node: ast.stmt, targets: list[ast.expr]) -> None:
        """May be left out where every name has a value already."""
        parts = [part for target in targets for part in ast.walk(target)]
        new = {
            part.id
            for part in parts
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        if new <= self.bound[-1]:
            self.add(node, "statement", "pass")
        self.bound[-1] |= new

    def visit_Assign(self, node: ast.Assign) -> None:
        alias = isinstance(node.value, ast.Subscript) or (
            isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
        )
        if self.in_body or not (alias or ast.unparse(node.targets[0]) == "__all__"):
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        for part in filter(None, (node.target, node.value)):
            self.visit(part)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if getattr(node.test, "id", "") != "TYPE_CHECKING":
            self.negate(node.test)
            self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not isinstance(test, ast.Compare) and not negated:
            self.add(test, "condition", ast.UnaryOp(ast.Not(), test))

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, old in enumerate(node.ops):
            for new in COMPARISONS[type(old)][: None if len(node.ops) == 1 else 1]:
                ops = [*node.ops[:place], new(), *node.ops[place + 1 :]]
                self.add(node, "comparison", _with(node, ops=ops))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp | ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC:
            self.add(node, "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]()))
        self.generic_visit(node)

    visit_AugAssign = visit_BinOp

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "boolean", _with(node, op=new))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            self.number(node, -node.operand.value)
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
        if node.attr in DTYPES and getattr(node.value, "id", "") in ("torch", "np"):
            self.add(node, "dtype", _with(node, attr=DTYPES[node.attr]))
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in filter(None, (node.lower, node.upper)):
            if not isinstance(bound, ast.Constant | ast.UnaryOp):
                self.add(bound, "slice", "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        method = isinstance(function, ast.Attribute)
        name = getattr(function, "attr", getattr(function, "id", ""))
        if name in MESSAGES:
            return
        if name == "require":  # the condition counts, the rest is the error's text
            self.visit(node.args[0])
            return
        if name in SWAPS:
            swapped = _with(function, **{"attr" if method else "id": SWAPS[name]})
            self.add(node, "call", _with(node, func=swapped))
        if name in REMOVABLE and method and getattr(function.value, "id", "") not in MODULES:
            self.add(node, "call", function.value)
        if name in ("where", "masked") and len(node.args) >= 2:
            self.add(node, "guard", node.args[1])
        touched = [each for each in node.keywords if each.arg not in UNTOUCHED_KEYWORDS]
        for keyword in touched:
            value = getattr(keyword.value, "value", None)
            if keyword.arg and not isinstance(value, bool):  # whose opposite is as good
                others = [other for other in node.keywords if other is not keyword]
                self.add(node, "argument", _with(node, keywords=others))
        for child in (function, *node.args, *(keyword.value for keyword in touched)):
            self.visit(child)


def _with(node: ast.AST, **changes: Any) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **changes})


def _in_brackets(node: ast.AST) -> str:
    plain = ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript | ast.stmt
    return ast.unparse(node) if isinstance(node, plain) else f"({ast.unparse(node)})"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
