"""What the code refuses, read out of where it does: messages with `…` for what a run fills in.

A refusal is the argument of `ConfigError` or `RequestError`, or a sentence that a function returns
to whoever raises them. It says the reason, a semicolon, the remedy.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.tables.code import file_of, parsed

GAP = "…"
OR = " *or* "
FIRST, LAST = "⟨", "⟩"
"""Around reasons that one sentence may give."""
Bound = dict[str, list[str]]
"""What a name may stand for."""

_CODE = re.compile(r"(?<![\w`\".])(--[a-z][\w-]*|[A-Z]+_[A-Z_0-9]+(?:=\w+)?|[a-z]+(?:_[a-z0-9]+)+)")


def start_up(paths: Iterable[Path]) -> list[str]:
    """What refused starts say, in the order of the files; not those about one file or value."""
    texts = dict.fromkeys(_in_code(text) for path in paths for text in _of_start(path))
    told = [text for text in texts if _says_something(text) and not text.startswith(GAP)]
    return [text for text in told if not text.endswith(f": {GAP}")]


def of_requests(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Reasons of refused requests, as the metric calls them, and what the client reads."""
    found = []
    for path in paths:
        for function in _functions(path):
            for call in _calls(function, ("RequestError",)):
                kinds = [part.value for part in call.args[2:3] if isinstance(part, ast.Constant)]
                texts = filter(_says_something, _texts(call.args[0], path, {}))
                found += [(str(kind), _in_code(text)) for kind in kinds for text in texts]
    return list(dict.fromkeys(found))


def _of_start(path: Path) -> Iterator[str]:
    for function in _functions(path):
        if function.name.startswith("why_"):  # a warning
            continue
        bound = _assigned(function, path)
        for call in _calls(function, ("ConfigError",)):
            yield from _texts(call.args[0], path, bound)
        if function.returns is not None and ast.unparse(function.returns) in (
            "list[str]",
            "str | None",
        ):
            for node in ast.walk(function):
                for sentence in _sentences(node):
                    yield from _texts(sentence, path, bound)


def _functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]


def _calls(function: ast.FunctionDef, names: tuple[str, ...]) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in names:
            yield node


def _sentences(node: ast.AST) -> list[ast.expr]:
    """Parts of a function that lists problems which may be one."""
    if isinstance(node, ast.Return) and node.value is not None:
        return [node.value]
    if isinstance(node, ast.List):
        return node.elts
    if isinstance(node, ast.ListComp):
        return [node]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append"):
        return node.args
    return []


def _assigned(function: ast.FunctionDef, path: Path) -> Bound:
    """What a function's own names stand for: texts, and the keys of dictionaries of texts."""
    bound: Bound = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if isinstance(node.value, ast.Dict):
            keys = [key for key in node.value.keys if key is not None]
            bound[node.targets[0].id] = [text for key in keys for text in _texts(key, path, bound)]
        elif isinstance(node.value, ast.JoinedStr | ast.Constant):
            bound[node.targets[0].id] = _texts(node.value, path, bound)
    return bound


def _texts(node: ast.expr, path: Path, bound: Bound) -> list[str]:
    """What an expression may say."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return _joined(node.values, path, bound)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([node.left, node.right], path, bound)
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value, path, bound)
    if isinstance(node, ast.Name):
        return bound.get(node.id) or _constant(node.id, path) or [GAP]
    if isinstance(node, ast.ListComp):
        return _of_each(node, path, bound)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _returned(node, path, bound)
    return [GAP]


def _joined(parts: list[ast.expr], path: Path, bound: Bound) -> list[str]:
    texts = [""]
    for part in parts:
        texts = [before + text for before in texts for text in _texts(part, path, bound)]
    return texts


def _of_each(node: ast.ListComp, path: Path, bound: Bound) -> list[str]:
    """One sentence with all keys of a dictionary: `[f"{name} …" for name, on in names.items()]`."""
    loop = node.generators[0]
    dictionary = ast.unparse(loop.iter).removesuffix(".items()")
    if dictionary not in bound or not isinstance(loop.target, ast.Tuple):
        return []
    together = f"{FIRST}{OR.join(bound[dictionary])}{LAST}"
    return _texts(node.elt, path, {**bound, ast.unparse(loop.target.elts[0]): [together]})


def _constant(name: str, path: Path) -> list[str]:
    """A text at the top of a module, here or where it is imported from."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            known = isinstance(node.value, ast.JoinedStr | ast.Constant)
            return _texts(node.value, path, {}) if known else []
    home = _home(name, path)
    return _constant(name, home) if home else []


def _returned(call: ast.Call, path: Path, bound: Bound) -> list[str]:
    """What a helper of the package makes of a reason."""
    name = ast.unparse(call.func)
    function = next((each for each in _functions(path) if each.name == name), None)
    if function is None:
        home = _home(name, path)
        return _returned(call, home, bound) if home else [GAP]
    if function.returns is None or ast.unparse(function.returns) != "str":
        return []
    names = [argument.arg for argument in function.args.args]
    given = dict(zip(names, (_texts(each, path, bound) for each in call.args), strict=False))
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return [text for value in values if value for text in _texts(value, path, given)]


def _home(name: str, path: Path) -> Path | None:
    """The file of the package from which a file imports a name."""
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return file_of(node.module or "")
    return None


def _says_something(text: str) -> bool:
    """Whether a text is a sentence."""
    return len(re.findall(r"[a-z]{2,}", text)) > 3


def _in_code(text: str) -> str:
    """A message in a line, with what one types as code."""
    return _CODE.sub(r"`\1`", " ".join(text.split()))
