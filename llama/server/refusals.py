"""The errors of requests that are prepared or run, in the words of an API.

In: exceptions of the engine. Out: an `ApiError` that names the field of the body.
"""

import contextlib
from collections.abc import Iterator

from llama.api import ContextLengthError, RefusedError
from llama.common.checks import FieldError
from llama.server.admission import queue_is_full
from llama.server.errors import ApiError, ErrorFields, first_name, shutting_down
from llama.server.workers import preparing_refusal


@contextlib.contextmanager
def refusals(fields: ErrorFields) -> Iterator[None]:
    """Turn the errors of a request that is being prepared into those of an API.

    Args:
        fields: the body's own names, which an error uses.

    Raises:
        ApiError: 400 names the field of the body that is at fault; 503 says that the server is
            shutting down.
    """
    try:
        yield
    except ContextLengthError as error:
        raise _context_error(error, fields) from None
    except (TypeError, ValueError) as error:
        raise fields.refusal(error) from None
    except RuntimeError:
        raise shutting_down() from None


def refusal_of(error: Exception, fields: ErrorFields) -> ApiError | None:
    """Return the error of an API for an exception of a running request; None if a step failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldError):  # such as an adapter that was unloaded since
        return fields.refusal(error)
    if isinstance(error, RefusedError) and error.reason in ("queue", "gave way"):
        return queue_is_full()
    if isinstance(error, RefusedError) and error.reason != "failed":
        return preparing_refusal(error.reason, first_name(fields.answer_format))
    return None


def has_not_run(error: Exception) -> bool:
    """Return whether the process of the engine refused a request with this error."""
    if isinstance(error, RefusedError):
        return error.reason in ("queue", "busy", "slow")
    return isinstance(error, FieldError)


def _context_error(error: ContextLengthError, fields: ErrorFields) -> ApiError:
    """Return the error of an API for a request that exceeds the context."""
    # Agents look for these words, or for the code, and shorten the dialog then.
    limit = f"This model's maximum context length is {error.max_count} tokens."
    if error.field == "max_tokens":
        name = fields.names.get("max_tokens", "max_tokens")
        message = f"{limit} {error.message}"
        return ApiError(400, message, param=name, code="context_length_exceeded")
    if fields.too_long is None:
        name = f"{fields.prompt}[{error.index}]" if error.index else fields.prompt
        message = (
            f"{limit} However, {name} has {error.count} tokens: the prompt is too long, so "
            f"reduce the length of the {name}"
        )
        return ApiError(400, message, param=fields.prompt, code="context_length_exceeded")
    return ApiError(400, fields.too_long.format(count=error.count, max_count=error.max_count))
