"""The params.json of a model, for files that are written.

In: a `ModelArgs`. Out: the content of the file.
"""

from dataclasses import fields
from typing import Any

from llama.checkpoint.vision import params_of
from llama.model.args import HARMLESS_PARAMS, ModelArgs

# The keys of params.json that Meta's package knows.
_METAS_KEYS = set(
    "dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta "
    "use_scaled_rope".split()
)


def meta_params(args: ModelArgs) -> dict[str, Any]:
    """Return the params.json of a model, with our own keys only where Meta's are not enough.

    Meta's package refuses keys that it does not know; the sizes that Meta released need none.
    """
    inferred_keys = {"rope_scale_factor", "context_length", "tied_output", "is_causal"}
    params = {}
    for each in fields(args):
        value = getattr(args, each.name)
        if each.name in HARMLESS_PARAMS | inferred_keys | {"vision"} or value is None:
            continue
        if each.name in _METAS_KEYS or value != each.default:
            params[each.name] = value
    inferred = ModelArgs(**params)
    if inferred.rope_factor != args.rope_factor:
        params["rope_scale_factor"] = args.rope_factor
    if inferred.longest_context != args.longest_context:
        params["context_length"] = args.longest_context
    if args.vision is not None:
        params |= params_of(args.vision)
    return params
