"""The rows of a CSV file (RFC 4180): where one ends, and the fields of one.

In: bytes and text. Out: whether a row continues on the next line, and a list of texts. The module
`csv` is not used because its largest field is a setting of the whole process, and because an error
in a row must leave the rows after it intact. This module must not know what a column means.
"""

import re

_OPENING = re.compile(rb'(?:^|,)"')
_CLOSING = re.compile(rb'(?:[^"]++|"")*+"')
_FIELD = re.compile(r'"((?:[^"]++|"")*+)"|([^,]*)')


def is_csv(path: str) -> bool:
    """Return whether a file is CSV, which its name says."""
    return path.lower().endswith(".csv")


def ends_in_quotes(line: bytes, is_quoted: bool = False) -> bool:
    """Return whether a line ends within quotes, so that its row continues on the next line.

    Args:
        line: The line.
        is_quoted: Whether the line begins within quotes.
    """
    position = 0
    while True:
        find = _CLOSING.match if is_quoted else _OPENING.search
        match = find(line, position)
        if match is None:
            return is_quoted
        position = match.end()
        is_quoted = not is_quoted


def fields_of(row: str) -> list[str]:
    """Return the fields of a row, which has no line end.

    Raises:
        ValueError: A quote is not closed, or text follows a closing quote.
    """
    fields: list[str] = []
    position = 0
    while True:
        match = _FIELD.match(row, position)
        assert match is not None  # The second alternative matches any text.
        quoted, plain = match.groups()
        end = match.end()
        is_broken = row[end : end + 1] not in ("", ",")
        if is_broken or (plain or "").startswith('"'):
            count = len(fields) + 1
            raise ValueError(f"the row is not CSV: field {count} has a quote that does not match")
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
        if end == len(row):
            return fields
        position = end + 1
