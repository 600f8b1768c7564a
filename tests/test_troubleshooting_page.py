"""Messages that docs/troubleshooting.md quotes are those of the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from pages import read_page

ROOT = Path(__file__).parent.parent
TEXT, BLOCKS = read_page("troubleshooting.md")
MESSAGES = [
    line for language, code in BLOCKS if language == "text" for line in code.splitlines() if line
]
# Each placeholder of an f-string, of `%` and of `str.format` is written as "..." on the page.
PLACEHOLDER = re.compile(r"%[.\d]*[a-z]|\{[^{}]*\}|\{\{[^{}]*\}\}")


def without_values(node: ast.Constant | ast.JoinedStr) -> str:
    """Return the text of a string literal with "..." in place of each value."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in parts)
    return PLACEHOLDER.sub("...", text)


@functools.cache
def messages_of_the_code() -> str:
    literals: list[str] = []
    for path in (ROOT / "elasticlib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                literals.append(without_values(node))
    return "\n".join(literals)


def longest_prefix_in_code(text: str) -> int:
    """Return the length of the longest prefix that occurs in a literal of the code."""
    code = messages_of_the_code()
    length = next(n for n in range(len(text), -1, -1) if text[:n] in code)
    assert length > 2, text
    return length


@pytest.mark.parametrize("message", MESSAGES)
def test_quoted_message_is_printed_by_the_code(message: str) -> None:
    for part in message.split("..."):
        text, num_literals = part.strip(" '\""), 0
        while len(text) > 2:  # a message can be composed of several literals
            text = text[longest_prefix_in_code(text) :].lstrip()
            num_literals += 1
        assert num_literals <= 4, part


def test_page_has_a_cause_for_each_of_many_symptoms() -> None:
    symptoms = re.findall(r"^### (.*)$", TEXT, re.MULTILINE)
    assert len(symptoms) == len(set(symptoms)) >= 20
    assert TEXT.count("- **Cause**") >= len(symptoms) - 3  # three are explained by a table
