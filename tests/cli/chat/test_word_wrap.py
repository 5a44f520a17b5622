"""The words of an answer at the edge of the screen, by a terminal that this file imitates."""

import random
import re
import textwrap

import pytest

from llama.cli.chat.word_wrap import WordWrap

TEXT = """\
Once upon a time there was a very little fox, who lived by himself in a house on a hill.

    def indented(code): return code    # it has spaces that count
Donaudampfschifffahrtsgesellschaftskapitaensmuetze is longer than one line."""


def screen(written: str, columns: int) -> list[str]:
    """Return the lines that a terminal shows, which breaks a line at its last column itself."""
    lines = [""]
    for back, erase, char in re.findall(r"\x1b\[(\d+)D|(\x1b\[K)|([^\x1b])", written):
        if back:
            lines[-1] = lines[-1][: -int(back)]
        elif char == "\n" or (char and len(lines[-1]) == columns):
            lines.append("" if char == "\n" else char)
        elif not erase:
            lines[-1] += char
    return lines


def in_pieces(text: str, columns: int, seed: int) -> str:
    """Return what is written for a text that arrives in pieces of one to nine characters."""
    rng = random.Random(seed)
    wrap = WordWrap()
    written = ""
    while text:
        size = rng.randint(1, 9)
        written += wrap.feed(text[:size], columns)
        text = text[size:]
    return written


@pytest.mark.parametrize("columns", [20, 33, 47, 80, 200])
def test_no_word_is_broken_that_fits_a_line(columns):
    shown = screen(in_pieces(TEXT, columns, columns), columns)
    assert all(len(line) <= columns for line in shown)
    fitting = {word for word in TEXT.split() if len(word) < columns}
    assert fitting <= {word for line in shown for word in line.split()}
    assert "".join("".join(shown).split()) == "".join(TEXT.split())


@pytest.mark.parametrize("columns", [20, 41])
def test_lines_are_those_of_textwrap(columns):
    text = TEXT.splitlines()[0]
    shown = [line.rstrip() for line in screen(in_pieces(text, columns, 1), columns)]
    assert shown == textwrap.wrap(text, columns - 1)


def test_each_wide_character_is_a_word():
    """The pieces of Chinese have no spaces; none is taken back for the next one."""
    written = in_pieces("从前有一只小狐狸住在山上", 10, 1)
    assert written.split("\n") == ["从前有一", "只小狐狸", "住在山上"]
