"""A mutant is one small fault, is found again after lines moved, and is drawn by its own lot."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

SPEC = importlib.util.spec_from_file_location(
    "mutants_mutations", Path(__file__).with_name("mutations.py")
)
assert SPEC is not None
assert SPEC.loader is not None
mutations = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = mutations
SPEC.loader.exec_module(mutations)

SOURCE = '''"""Words."""
LIMIT = 3


def over(count: int = 2, *, strict: bool) -> bool:
    """More words."""
    if count < LIMIT and not strict:
        log.info("a constant %d", 1)
        raise ValueError(f"too few: {count + 1}")
    seen[count] = "é" in names
    return count + 1 > 7


class Box:
    size = 1

    def grow(self) -> None:
        self.size += 2
        self.size += 2
'''


def named(source: str) -> dict[str, tuple[str, str]]:
    found = mutations.mutants_of(source, "box.py")
    return {mutant.name: (mutant.before, mutant.after) for mutant in found}


def test_each_statement_of_a_function_has_its_faults_and_nothing_else_has() -> None:
    assert list(named(SOURCE).values()) == [
        ("count < LIMIT and (not strict)", "(not (count < LIMIT and (not strict)))"),
        ("count < LIMIT and (not strict)", "(count < LIMIT or not strict)"),
        ("count < LIMIT", "(count >= LIMIT)"),
        ("count < LIMIT", "(count <= LIMIT)"),
        ("not strict", "(strict)"),
        ("raise ValueError(f'too few: {count + 1}')", "pass"),
        ("seen[count] = 'é' in names", "pass"),
        ("'é' in names", "('é' not in names)"),
        ("return count + 1 > 7", "return None"),
        ("count + 1 > 7", "(count + 1 <= 7)"),
        ("count + 1 > 7", "(count + 1 >= 7)"),
        ("count + 1", "(count - 1)"),
        ("1", "(2)"),
        ("7", "(8)"),
        ("self.size += 2", "pass"),
        ("2", "(3)"),
        ("self.size += 2", "pass"),
        ("2", "(3)"),
    ]


def test_a_mutated_source_differs_in_its_one_place_and_can_be_read() -> None:
    for mutant in mutations.mutants_of(SOURCE, "box.py"):
        mutated = mutant.applied(SOURCE)
        ast.parse(mutated)
        text, changed = SOURCE.encode(), mutated.encode()
        assert changed[: mutant.start] == text[: mutant.start]
        assert changed[mutant.start :].startswith(mutant.after.encode())
        assert changed[mutant.start + len(mutant.after.encode()) :] == text[mutant.end :]


def test_names_are_all_different_and_stay_when_lines_move_or_other_statements_change() -> None:
    before = named(SOURCE)
    assert len(before) == len(mutations.mutants_of(SOURCE, "box.py"))
    moved = SOURCE.replace("LIMIT = 3\n", "LIMIT = 3\nOTHER = 4\n\n")
    assert named(moved) == before
    other = SOURCE.replace("    seen[count] =", "    seen[0] =")
    assert {name for name in before if "over" in name} - set(named(other)) == {
        name for name in before if before[name][0] in ("seen[count] = 'é' in names", "'é' in names")
    }


def test_a_draw_is_by_seed_and_keeps_what_did_not_change() -> None:
    mutants = mutations.mutants_of(SOURCE, "box.py")
    drawn = mutations.drawn(mutants, 0, 8)
    assert mutations.drawn(list(reversed(mutants)), 0, 8) == drawn
    assert mutations.drawn(mutants, 1, 8) != drawn
    fewer = [mutant for mutant in mutants if mutant != drawn[0]]
    assert mutations.drawn(fewer, 0, 7) == drawn[1:]
