"""Tools: a calculator, and Python in the sandbox."""

import ast
import math
import operator
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from threading import Semaphore
from typing import Any

from nemorl.checks import at_least, short
from nemorl.rollout.sandbox import ProgramLimits, check_sandbox, parse, run_program

MAX_BITS, MAX_CHARACTERS = 1024, 1000
LIMITS = ProgramLimits(cpu=5, wall=10.0)
PROGRAMS_AT_A_TIME = Semaphore(len(os.sched_getaffinity(0)))


class Calculator:
    """A tool that computes with exact fractions."""

    def reset(self) -> None:
        """Do nothing."""

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses
        """
        if len(expression) > MAX_CHARACTERS:
            raise ValueError(f"an expression must have at most {MAX_CHARACTERS} characters")
        value = _value(parse(expression.strip(), mode="eval").body)
        exact = value.denominator == 1 and abs(value) < 2**MAX_BITS
        return str(value if exact else float(value))


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            return Fraction(str(number))
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in OPERATORS:
            return Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"{short(ast.unparse(node))} is not + - * / // % ** of numbers")


def _power(base: Fraction, exponent: Fraction) -> Fraction | float:
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1
    exact = exponent.denominator == 1 and bits * abs(exponent) <= MAX_BITS
    return base**exponent if exact else math.pow(base, exponent)


OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True, kw_only=True)
class PythonTool:
    """A tool that runs programs in the sandbox."""

    limits: ProgramLimits = LIMITS
    longest: int = 2000
    """Characters of a result; longer ones lose their middle."""

    def __post_init__(self) -> None:
        at_least(2, longest=self.longest)

    @staticmethod
    def check(rows: Any) -> None:
        """Raise RuntimeError where no sandbox works."""
        check_sandbox()

    def reset(self) -> None:
        """Do nothing."""

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The whole program
        """
        with PROGRAMS_AT_A_TIME:
            result = run_program(code, limits=self.limits)
        said, half = result.stdout, self.longest // 2
        if result.outcome != "ok":
            said += re.sub('"/.*/program', '"program', result.stderr)
            said += f"\nFailed: {result.outcome}"
        said = said.strip() or "(no output)"
        return said if len(said) <= self.longest else f"{said[:half]}\n…\n{said[-half:]}"


class Toolbox(Calculator, PythonTool):
    """Both."""
