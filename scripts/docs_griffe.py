"""An extension of griffe, which reads docstrings for the documentation site.

In: the parsed package. Out: the same, in which the arguments of `Llama.build` have their defaults.
"""

from typing import Any

import griffe


class FlagDefaults(griffe.Extension):
    """Replace the call that describes a flag by the default that it is given."""

    def on_class_members(self, *, cls: Any, **_: Any) -> None:
        """Change the fields of BuildArgs, of which griffe then makes the parameters."""
        if cls.path != "llama.build_args.BuildArgs":
            return
        for field in cls.attributes.values():
            if isinstance(field.value, griffe.ExprCall) and str(field.value.function) == "_flag":
                field.value = str(field.value.arguments[0])
