"""What a JSON value is, in the words of errors: a value or names in, text or an error out."""


def refuse_fields(unknown: set[str], place: str) -> None:
    """ValueError that names the fields, if there are any."""
    if unknown:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"{names} cannot be used in {place}: leave it out")


def json_type(value: object) -> str:
    """The type of a value from JSON, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
