"""One line of a batch file: from bytes to a checked request, and from its answer to a record.

A line is in OpenAI's batch format, a plain JSON object, a row of a CSV file, or bare text; a record
is in OpenAI's format. This module must know neither files nor the engine.
"""

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any, Self

from llama.cli.batch.csv_rows import fields_of, is_csv
from llama.common.checks import brief
from llama.common.validation import json_type
from llama.server.openai.models import (
    CHAT_URL,
    EMBEDDINGS_URL,
    RERANK_URLS,
    SCORE_URLS,
    TEXT_URL,
)
from llama.server.responses.models import RESPONSES_URL

MAX_LINE = 32 << 20  # bytes, as many as the body of a request with images has at most
URLS = (CHAT_URL, TEXT_URL, RESPONSES_URL, EMBEDDINGS_URL, *SCORE_URLS, *RERANK_URLS)
_ENVELOPE = {"custom_id", "method", "url", "body"}
_COLUMNS = ("prompt", "custom_id")  # columns of a CSV file that are read; the first is required
_ARRAY = re.compile(rb"\[\s*([{\"]|$)")  # the first line of a file that is a JSON array
_MAX_MESSAGE = 1000  # characters of an error message, which may quote the line


def check_encoding(name: str, data: bytes) -> None:
    """Check that the beginning of a file may be UTF-8.

    Raises:
        ValueError: The data has a null byte or the byte order mark of UTF-16, or is Parquet.
    """
    if data.startswith(b"PAR1"):
        raise ValueError(
            f"{name} is a Parquet file, which is not read here: convert it, for example with "
            f"pandas.read_parquet({name!r})[['prompt']].to_json('prompts.jsonl', "
            "orient='records', lines=True)"
        )
    if b"\0" in data or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        command = f"iconv -f UTF-16 -t UTF-8 {name} > NEW_FILE"
        raise ValueError(f"{name} is not UTF-8: if it is UTF-16, convert it with {command}")


@dataclass(frozen=True)
class LineFormat:
    """How the lines of a file are read; without JSON and columns, each line is a prompt.

    Attributes:
        is_json: Whether a line is JSON.
        columns: The names of the columns of a CSV file, whose first line is not a request.
    """

    is_json: bool = False
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, first_line: bytes) -> Self:
        """Return the format of a file, which its name and its first line show.

        Raises:
            ValueError: It is a JSON array, or a CSV file that cannot be used.
        """
        if not is_csv(path):
            start = first_line.lstrip()
            if _ARRAY.match(start):
                raise ValueError(
                    f"{path} is a JSON array, and each line must be an object (JSON lines): "
                    f"convert it, for example with jq -c '.[]' {path} > NEW_FILE"
                )
            return cls(is_json=start.startswith(b"{"))
        _check_separator(path, first_line)
        try:
            columns = [name.strip() for name in fields_of(_decoded(first_line))]
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None
        if columns.count(_COLUMNS[0]) != 1:
            raise ValueError(
                f"{path} must have one column named prompt; its columns are "
                f"{brief(', '.join(columns))}: rename one in the first line, or write JSON lines"
            )
        return cls(columns=tuple(columns))

    @property
    def unread_columns(self) -> list[str]:
        """The names of the columns that have no effect."""
        return [name for name in self.columns if name not in _COLUMNS]

    def row(self, text: str) -> dict[str, Any]:
        """Return the request in a row of a CSV file.

        Raises:
            ValueError: The row is broken, or does not have the columns of the file.
        """
        fields = fields_of(text)
        if len(fields) != len(self.columns):
            raise ValueError(
                f"the row has {len(fields)} fields, but the file has {len(self.columns)} columns"
            )
        return {
            name: value
            for name, value in zip(self.columns, fields, strict=True)
            if name == "prompt" or (name in _COLUMNS and value)
        }


def _check_separator(path: str, header: bytes) -> None:
    """Raise ValueError if the columns of a CSV file are separated by another character."""
    for separator in (b";", b"\t", b"|"):
        names = [name.strip(b'" ') for name in header.split(separator)]
        if len(names) > 1 and b"prompt" in names:
            shown = separator.decode()
            raise ValueError(
                f"{path} separates its columns by {shown!r}, and only commas are read here: save "
                f"it with commas, or convert it, for example with pandas.read_csv({path!r}, "
                f"sep={shown!r})[['prompt']].to_json('prompts.jsonl', orient='records', "
                "lines=True)"
            )


def parse_line(data: bytes, line_format: LineFormat) -> dict[str, Any]:
    """Return the fields of a line.

    Args:
        data: The line, without its line end.
        line_format: The format of the file.

    Raises:
        ValueError: The line is too long, is not UTF-8, or does not have the format.
    """
    text = _decoded(data)
    if line_format.columns:
        return line_format.row(text)
    if not line_format.is_json:
        return {"prompt": text}
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"the line is not JSON: {e.msg} at character {e.pos + 1}") from None
    except RecursionError:
        raise ValueError("the line's JSON is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("the line must be a JSON object, as the first line of the file is")
    return fields


def _decoded(data: bytes) -> str:
    """Return the text of a line.

    Raises:
        ValueError: The line is too long, or is not UTF-8.
    """
    if len(data) > MAX_LINE:
        raise ValueError(f"the line has more than {MAX_LINE} bytes: shorten it")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"the line is not UTF-8 at byte {e.start + 1}: {e.reason}") from None


def custom_id_of(fields: dict[str, Any], default: str) -> str:
    """Return the custom_id of a line.

    It need not be unique, because the id of a record holds the line number.

    Raises:
        TypeError: The custom_id is not a string.
    """
    custom_id = fields.get("custom_id")
    if custom_id is None:
        return default
    if not isinstance(custom_id, str):
        raise TypeError(f"custom_id must be a string, got {json_type(custom_id)}")
    return custom_id


def target(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL path and the body of a line's request.

    Most fields of the body are not checked yet.

    Raises:
        TypeError, ValueError: The line has no request, or one that a batch cannot answer.
    """
    if fields.keys() & {"url", "body", "method"}:
        url, body = _enveloped(fields)
    else:
        has_messages = "messages" in fields
        if has_messages == ("prompt" in fields):
            raise ValueError("the line must have a prompt, messages, or a url and a body")
        url = CHAT_URL if has_messages else TEXT_URL
        body = {name: value for name, value in fields.items() if name != "custom_id"}
    if not isinstance(body, dict):
        raise TypeError(f"body must be an object, got {json_type(body)}")
    if body.get("stream"):
        raise ValueError("stream must be false: a line gets one record")
    return url, body


def _enveloped(fields: dict[str, Any]) -> tuple[str, Any]:
    """Return the URL path and the body of a line in OpenAI's batch format."""
    unknown = sorted(fields.keys() - _ENVELOPE)
    if unknown:
        raise ValueError(f"{brief(unknown[0])} cannot be used in the line, next to its body")
    method = fields.get("method", "POST")
    if method != "POST":
        raise ValueError(f"method={method!r} must be POST")
    url = fields.get("url")
    if url not in URLS:
        raise ValueError(f"url={brief(url)} must be one of {', '.join(URLS)}")
    return url, fields.get("body")


def error_record(custom_id: str, number: int, code: str, message: str) -> dict[str, Any]:
    """Return the record of a line without an answer.

    Args:
        custom_id: The custom_id of the line.
        number: The line number.
        code: An error code of OpenAI's API.
        message: Why there is no answer.
    """
    error = {"code": code, "message": message[:_MAX_MESSAGE], "line": number}
    return {"custom_id": custom_id, "response": None, "error": error}


def response_record(custom_id: str, request_id: str, body: Any) -> dict[str, Any]:
    """Return the record of a line that was answered with the response `body`."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"custom_id": custom_id, "response": response, "error": None}
