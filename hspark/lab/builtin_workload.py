"""A workload that needs no file: mechanical edits of the standard library's own functions, and questions.

It is for a first look and for demonstrations on any machine. It depends on the Python version, whose sources it reads,
and it is no evaluation of a drafter that was trained on the standard library.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from hspark.lab.workloads import Sample, edit_messages

_MODULES = """
base64 calendar cmd colorsys configparser copy csv difflib fileinput filecmp fractions getopt glob heapq html.parser
http.cookies ipaddress json.encoder linecache mailbox mimetypes netrc optparse plistlib posixpath pprint quopri random
reprlib sched shelve shlex shutil statistics string tempfile textwrap timeit trace urllib.parse wave zipfile
"""
_MIN_LINES, _MAX_LINES, _MAX_CHARACTERS = 5, 40, 1600

QUESTIONS = (
    "Explain to a new programmer what a hash table is and when to use one.",
    "What are the advantages and disadvantages of working from home?",
    "Describe how bread is made, from the grain to the loaf.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Why does the Moon always show the same side to the Earth?",
    "Give me a plan for learning to play the guitar in three months.",
    "Summarise how vaccines train the immune system.",
    "Compare trains and aeroplanes for a journey of 800 kilometres.",
    "Write a polite e-mail asking a landlord to repair a leaking window.",
    "What should I consider before adopting a dog from a shelter?",
    "Explain the difference between weather and climate with two examples.",
    "Suggest five names for a small bookshop by the sea, and say why each fits.",
)


@dataclass(frozen=True)
class Function:
    """One function of the standard library: its qualified name, its dedented source and its syntax tree."""

    name: str
    source: str
    tree: ast.FunctionDef

    @property
    def parameters(self) -> list[str]:
        arguments = self.tree.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return [name for name in names if name not in ("self", "cls")]


# An edit looks at a function and returns an instruction, or None where it does not apply.
Edit = Callable[[Function, random.Random], str | None]


def rename_variable(function: Function, rng: random.Random) -> str | None:
    nodes = [node.id for node in ast.walk(function.tree) if isinstance(node, ast.Name)]
    stored = {n.id for n in ast.walk(function.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = sorted(name for name in stored | set(function.parameters) if nodes.count(name) >= 2 and name != "_")
    if not names:
        return None
    name = rng.choice(names)
    new = rng.choice([f"{name}_value", f"new_{name}", f"current_{name}", f"the_{name}"])
    if new in nodes:
        return None
    return f"Rename the variable `{name}` to `{new}` everywhere in the function."


def rename_function(function: Function, rng: random.Random) -> str | None:
    name = function.tree.name
    if name.startswith("__"):
        return None
    new = rng.choice(["{}_impl", "do_{}", "{}_v2", "run_{}"]).format(name.strip("_"))
    return f"Rename the function `{name}` to `{new}`."


def add_docstring(function: Function, rng: random.Random) -> str | None:
    if ast.get_docstring(function.tree) is None:
        return f"Add a one-line docstring to `{function.tree.name}` that says what it does."
    return rng.choice(["Shorten the docstring to one line.", "Remove the docstring."])


def add_type_hints(function: Function, rng: random.Random) -> str | None:
    arguments = function.tree.args
    hinted = any(a.annotation for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    if hinted or function.tree.returns or not function.parameters:
        return None
    return "Add type hints to the parameters and to the return value."


def add_logging(function: Function, rng: random.Random) -> str | None:
    shown = rng.choice(["its name", "its arguments"]) if function.parameters else "its name"
    return f"At the start of the function, log {shown} with `logging.debug`."


def change_constant(function: Function, rng: random.Random) -> str | None:
    places = [
        (node.lineno, node.value)
        for node in ast.walk(function.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool)
    ]
    lines = function.source.splitlines()
    places = [(line, value) for line, value in places if lines[line - 1].count(str(value)) == 1]
    if not places:
        return None
    line, value = rng.choice(sorted(places))
    return f"In the line `{lines[line - 1].strip()}`, change the constant {value} to {value + rng.randint(1, 9)}."


def add_guard(function: Function, rng: random.Random) -> str | None:
    if not function.parameters:
        return None
    name = rng.choice(function.parameters)
    return f"Raise a ValueError at the start of the function if `{name}` is None."


def add_comments(function: Function, rng: random.Random) -> str | None:
    if not any(isinstance(node, ast.If | ast.For | ast.While) for node in ast.walk(function.tree)):
        return None
    return "Add a short comment above every loop and every condition."


EDITS: tuple[Edit, ...] = (
    rename_variable,
    rename_function,
    add_docstring,
    add_type_hints,
    add_logging,
    change_constant,
    add_guard,
    add_comments,
)


def builtin_workload(n: int = 24, seed: int = 0, kind: str = "mixed") -> list[Sample]:
    """`n` requests, the same for the same seed and Python version.

    kind: "edit" (edits of functions of 5 to 40 lines of the standard library), "chat" (general questions, at most 12
    of them), or "mixed" (every fourth request is a question, until the 12 are used up).
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n={n!r} is out of range; use an integer of at least 1")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r} is not an integer")
    if kind not in ("mixed", "edit", "chat"):
        raise ValueError(f"kind={kind!r} is unknown; use 'mixed', 'edit' or 'chat'")
    if kind == "chat" and n > len(QUESTIONS):
        raise ValueError(f"n={n} is too large for kind='chat', which has {len(QUESTIONS)} questions")
    rng = random.Random(seed)
    questions = [] if kind == "edit" else rng.sample(QUESTIONS, len(QUESTIONS))
    edits = _edits(rng)
    samples = []
    for index in range(n):
        if questions and (kind == "chat" or index % 4 == 3):
            samples.append(Sample(f"builtin/{index}-chat", [{"role": "user", "content": questions.pop(0)}]))
        else:
            function, edit, instruction = next(edits)
            task_id = f"builtin/{index}-{edit.__name__}-{function.name}"
            samples.append(Sample(task_id, edit_messages(instruction, function.source), function.source))
    return samples


def _edits(rng: random.Random) -> Iterator[tuple[Function, Edit, str]]:
    """Functions in random order, each with the first edit that applies of a random order; all again when used up."""
    pool = standard_functions()
    while True:
        for function in rng.sample(pool, len(pool)):
            for edit in rng.sample(EDITS, len(EDITS)):
                if (instruction := edit(function, rng)) is not None:
                    yield function, edit, instruction
                    break


@lru_cache(maxsize=1)
def standard_functions() -> tuple[Function, ...]:
    """The functions and methods of the listed modules that have a suitable length, ordered by name."""
    found = {function.name: function for module in _MODULES.split() for function in _functions(module)}
    if not found:
        raise ValueError("the built-in workload reads the standard library's sources, which this Python does not have")
    return tuple(found[name] for name in sorted(found))


def _functions(module: str) -> Iterator[Function]:
    """The suitable functions and methods that a module's source defines; none if the module or its source is missing.

    The module is read, not imported: some have side effects, some need a platform.
    """
    spec = importlib.util.find_spec(module)
    source = getattr(spec.loader, "get_source", lambda name: None)(module) if spec else None
    lines = (source or "").splitlines(keepends=True)
    for node in ast.parse(source or "").body:
        owner = f"{module}.{node.name}" if isinstance(node, ast.ClassDef) else module
        for item in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, ast.FunctionDef) and not item.decorator_list:
                text = textwrap.dedent("".join(lines[item.lineno - 1 : item.end_lineno])).rstrip() + "\n"
                if (tree := _parse(text)) is not None:
                    yield Function(f"{owner}.{item.name}", text, tree)


def _parse(text: str) -> ast.FunctionDef | None:
    """The function's own syntax tree, or None if the text is unsuitable."""
    if not _MIN_LINES <= text.count("\n") <= _MAX_LINES or len(text) > _MAX_CHARACTERS or "```" in text:
        return None
    try:
        tree = ast.parse(text).body[0]
    except SyntaxError:  # an indented string literal kept its lines from being dedented
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None
