"""Break the lines of an answer between words while it arrives piece by piece.

In: pieces of text, and the number of columns of the screen. Out: what to write, in which a word
that reaches the edge is taken back and begins the next line. Nothing here knows what is shown.
"""

import unicodedata

_TAB = 8
_TAKE_BACK = "\x1b[{}D\x1b[K"  # move the cursor to the left, and erase the rest of the line


class WordWrap:
    """The state of the line in which the cursor is."""

    def __init__(self) -> None:
        self._column = 0  # cells before the cursor
        self._word = ""  # the characters since the last space
        self._start = 0  # the column in which the word begins; -1: it began in a line before

    def feed(self, text: str, columns: int) -> str:
        """Return what to write for a piece of text, whose control characters are tabs and newlines.

        A word that is longer than a line is left to the terminal.
        """
        return "".join(self._written(char, max(columns, 2)) for char in text)

    def _written(self, char: str, columns: int) -> str:
        cells = _TAB - self._column % _TAB if char == "\t" else _cells(char)
        # The last column stays empty: terminals differ in where the cursor is once it is full.
        is_full = self._column + cells >= columns
        if char == "\n" or (char in " \t" and is_full):
            self._begin_word(0)
            return "\n"
        if char in " \t":
            self._begin_word(self._column + cells)
            return char
        if cells == 2:  # such a character is a word
            self._begin_word(self._column)
        back = ""
        if is_full and self._start > 0:
            begun = sum(map(_cells, self._word))
            back = (_TAKE_BACK.format(begun) if begun else "") + f"\n{self._word}"
            self._start = 0
            self._column = begun
        elif is_full:
            self._start = -1
        self._word += char
        self._column = (self._column + cells) % columns
        return back + char

    def _begin_word(self, column: int) -> None:
        self._word = ""
        self._start = self._column = column


def _cells(char: str) -> int:
    """Return how many columns a character takes: two for wide ones, such as those of Chinese."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
