"""Shape expressions of dynamic graphs: parsed at build, evaluated at boot by a bounded evaluator of our own.

Dynamo writes what must hold between symbolic sizes and integers as Python text, as `2 <= L['x'].size()[0]`. Here it
becomes a tree of JSON lists, `["<=", 2, ["at", "L:x", "@size:0"]]`: numbers are themselves, `at` is a path (see
cachectl.identity.guard_paths), the rest is an operator with its operands. Nothing is handed to eval().

Standard library only.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cachectl.identity.guard_paths import Path, path_of, readable
from cachectl.identity.guard_values import Unsayable

__all__ = ["evaluate", "parse_expression", "paths_in", "render"]

_DEPTH_LIMIT = 200
_BITS_LIMIT = 4096
# JSON has no infinity: it is an operator without operands.
_INFINITY = frozenset({"inf", "int_oo", "oo"})

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "neg", ast.UAdd: "pos", ast.Not: "not", ast.Invert: "invert"}

# Functions that sympy's printers leave in the text, and the operator each is.
_FUNCTIONS = {
    "abs": "abs",
    "Abs": "abs",
    "min": "min",
    "Min": "min",
    "max": "max",
    "Max": "max",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "round": "round",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "IntPow": "**",
    "FloatPow": "**",
    "Eq": "==",
    "Ne": "!=",
    "Lt": "<",
    "Le": "<=",
    "Gt": ">",
    "Ge": ">=",
    "is_integer": "is_integer",
    "math.floor": "floor",
    "math.ceil": "ceil",
    "math.trunc": "trunc",
    "math.sqrt": "sqrt",
    "math.pow": "**",
    "math.isnan": "isnan",
    "math.isinf": "isinf",
    "math.exp": "exp",
    "math.log": "log",
    "math.log2": "log2",
    "math.sin": "sin",
    "math.cos": "cos",
    "math.tanh": "tanh",
    "torch.sym_float": "float",
    "torch.sym_int": "int",
}


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _BITS_LIMIT:
        raise OverflowError("a power too large to compute")
    return base**exponent


def _shift(value: Any, places: Any) -> Any:
    if places > _BITS_LIMIT:
        raise OverflowError("a shift too large to compute")
    return value << places


_OPERATORS: dict[str, Callable[..., Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "/": operator.truediv,
    "%": operator.mod,
    "**": _power,
    "<<": _shift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "neg": operator.neg,
    "pos": operator.pos,
    "not": operator.not_,
    "invert": operator.invert,
    "abs": abs,
    "min": min,
    "max": max,
    "int": int,
    "float": float,
    "bool": bool,
    "round": round,
    "is_integer": lambda value: float(value).is_integer(),
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "sqrt": math.sqrt,
    "isnan": math.isnan,
    "isinf": math.isinf,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "inf": lambda: math.inf,
}


def parse_expression(text: str, aliases: Mapping[str, Path | None] | None = None) -> Any:
    """Return the tree of an expression in Dynamo's words.

    Raises:
        Unsayable: an operator, function or source that the evaluator doesn't know.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unsayable(f"the shape expression {text!r}") from error
    return _tree(tree, aliases or {}, 0)


def evaluate(tree: Any, value_at: Callable[[tuple[str, ...]], Any], depth: int = 0) -> Any:
    """Return an expression's value.

    Args:
        value_at: gives the live value at a path. Only int, float and bool are computed with.

    Raises:
        Unsayable: an unknown operator, too deep a tree, or a value that is no plain number.
        ArithmeticError: a division by zero or an overflow; ValueError where mathematics has no value.
    """
    if type(tree) in (int, float, bool):
        return tree
    if type(tree) is not list or not tree or depth > _DEPTH_LIMIT:
        raise Unsayable("a shape expression that this program can't read")
    kind, operands = tree[0], tree[1:]
    if kind == "at":
        value = value_at(tuple(operands))
        if type(value) not in (int, float, bool):
            raise Unsayable(f"a {type(value).__name__} where a number is wanted")
        return value
    if kind == "and":
        return all(evaluate(operand, value_at, depth + 1) for operand in operands)
    if kind == "or":
        return any(evaluate(operand, value_at, depth + 1) for operand in operands)
    if kind == "if":
        chosen = operands[0] if evaluate(operands[1], value_at, depth + 1) else operands[2]
        return evaluate(chosen, value_at, depth + 1)
    if kind not in _OPERATORS:
        raise Unsayable(f"the operator {kind!r} in a shape expression")
    return _OPERATORS[kind](*(evaluate(operand, value_at, depth + 1) for operand in operands))


def paths_in(tree: Any) -> Iterator[Path]:
    """Yield the paths that an expression reads."""
    if type(tree) is list and tree:
        if tree[0] == "at":
            yield tuple(tree[1:])
        else:
            for operand in tree[1:]:
                yield from paths_in(operand)


def render(tree: Any) -> str:
    """Return an expression in words for people."""
    if type(tree) is not list or not tree:
        return str(tree)
    kind, operands = str(tree[0]), tree[1:]
    if kind == "at":
        return readable(operands)
    texts = [render(operand) for operand in operands]
    if (len(texts) > 1 and not kind.isalpha()) or kind in ("and", "or"):
        return "(" + f" {kind} ".join(texts) + ")"
    return f"{kind}({', '.join(texts)})"


def _tree(tree: ast.expr, aliases: Mapping[str, Path | None], depth: int) -> Any:
    if depth > _DEPTH_LIMIT:
        raise Unsayable("a shape expression nested too deeply")
    deeper = depth + 1
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float, bool):
        return tree.value
    if isinstance(tree, ast.Name) and tree.id in _INFINITY:
        return ["inf"]
    if isinstance(tree, ast.BoolOp):
        kind = "and" if isinstance(tree.op, ast.And) else "or"
        return [kind, *(_tree(value, aliases, deeper) for value in tree.values)]
    if isinstance(tree, ast.UnaryOp):
        return [_UNARY[type(tree.op)], _tree(tree.operand, aliases, deeper)]
    if isinstance(tree, ast.BinOp) and type(tree.op) in _ARITHMETIC:
        left, right = _tree(tree.left, aliases, deeper), _tree(tree.right, aliases, deeper)
        return [_ARITHMETIC[type(tree.op)], left, right]
    if isinstance(tree, ast.IfExp):
        return ["if", *(_tree(part, aliases, deeper) for part in (tree.body, tree.test, tree.orelse))]
    if isinstance(tree, ast.Compare):
        return _comparison(tree, aliases, deeper)
    if isinstance(tree, ast.Call) and not tree.keywords:
        name = ast.unparse(tree.func)
        if name in _FUNCTIONS and not (name in ("int", "float") and len(tree.args) != 1):
            return [_FUNCTIONS[name], *(_tree(argument, aliases, deeper) for argument in tree.args)]
        if isinstance(tree.func, ast.Attribute) and tree.func.attr == "is_integer" and not tree.args:
            return ["is_integer", _tree(tree.func.value, aliases, deeper)]
    return ["at", *path_of(tree, aliases)]


def _comparison(tree: ast.Compare, aliases: Mapping[str, Path | None], depth: int) -> Any:
    operands = [_tree(operand, aliases, depth) for operand in (tree.left, *tree.comparators)]
    if any(type(op) not in _COMPARISONS for op in tree.ops):
        raise Unsayable(f"the comparison {ast.unparse(tree)}")
    # `2 <= x <= 8` is two comparisons.
    pairs = [[_COMPARISONS[type(op)], operands[place], operands[place + 1]] for place, op in enumerate(tree.ops)]
    return pairs[0] if len(pairs) == 1 else ["and", *pairs]
