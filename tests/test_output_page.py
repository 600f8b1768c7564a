"""docs/guide/output.md shows the current output of the commands."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from making import outputs

BLOCKS = ("help", "failure", "events", "recovery", "status")
PAGE = outputs.PAGE.read_text()


def line_shapes(text: str) -> list[str]:
    """Return the first words of each line, without numbers, which depend on the machine."""
    lines = [re.sub(r"\S*\d\S*", "#", line) for line in text.splitlines()]
    return [" ".join(line.split()[:3]) for line in lines]


def test_the_help_text_is_that_of_elasticrun(tmp_path: Path) -> None:
    shown = outputs._run(tmp_path, "elasticrun", "--help")
    assert outputs.block_of(PAGE, "help") == shown, "run `python docs/making/outputs.py`"


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_is_filled(name: str) -> None:
    assert len(outputs.block_of(PAGE, name).splitlines()) > 3


def test_a_page_without_the_block_is_rejected() -> None:
    with pytest.raises(LookupError, match="no block for help"):
        outputs.with_blocks("# A page\n", {"help": "text\n"})


def test_the_picture_of_the_report_is_small_and_has_its_size() -> None:
    data = outputs.PICTURE.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == outputs.PICTURE_SIZE
    assert len(data) < 200_000


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(500)
def test_the_commands_print_the_lines_of_the_page(tmp_path: Path) -> None:
    texts = outputs.play(tmp_path)
    for name in ("failure", "events", "status"):
        assert line_shapes(texts[name]) == line_shapes(outputs.block_of(PAGE, name)), texts[name]
    for text in (texts["recovery"], outputs.block_of(PAGE, "recovery")):
        assert re.search(r"^  generation 2 after a failure, .* SIGKILL", text, re.MULTILINE), text
        assert "time lost on this node: " in text
        assert text.endswith("elasticrun: SUCCEEDED: 1 node done\n")
