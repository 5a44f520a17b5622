"""When the layers of a model run as a stack of weights, and when their modules run one by one.

In: the layers, as modules. Out: a stack of their weights, or None. On a CPU with kernels it is a
`LayerStack`, one native call, if the kernels take the weights. On a CUDA device, and wherever the
model may run Triton's kernels, it is an `OpStack`, a sequence of ops. Where somebody wants to see
or change what happens inside the layers (a hook, another forward, another module) there is none.
The modules are the definition; a stack gives the same bytes.
"""

from collections.abc import Callable, Mapping
from operator import eq, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from llama.ops.cpu import native
from llama.ops.layers import LayerStack, LayerWeights, Packed
from llama.ops.op_stack import OpStack
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet

Forwards = Mapping[type[nn.Module], Callable]  # the kinds of modules in a layer, as defined


class FusedLayers:
    """Finds the stack of the layers' weights, and makes it again when they have changed.

    definitions: the forward of each kind of module that a layer is made of.
    """

    def __init__(self, layers: nn.ModuleList, definitions: Forwards) -> None:
        self._layers = layers
        self._definitions = definitions
        self._kernels = TORCH_ONLY
        self._stack: LayerStack | OpStack | None = None
        self._made_as: type | None = None  # what the stack, or None, was made as
        self._hooks: list[Mapping] = []  # all empty
        self._places: list[dict] = []  # where things lie, by which name, and what lies there
        self._names: list[str] = []
        self._things: list[object] = []
        self._weights: list[Tensor] = []  # and where the numbers of each are
        self._addresses: list[int] = []
        self._modules: list[nn.Module] = []
        self._kinds: list[type] = []

    def use_kernels(self, kernels: KernelSet) -> None:
        """What the ops of a stack may run, from now on."""
        self._kernels, self._made_as = kernels, None

    def find(self) -> LayerStack | OpStack | None:
        """Asked at each step: what has not changed is not looked at twice."""
        device = next(self._layers.parameters()).device
        kind: type[LayerStack | OpStack]
        if device.type == "cuda" or self._kernels.names:
            kind = OpStack
        elif native.kernels() is not None:
            kind = LayerStack
        else:
            return None
        if self._made_as is not kind or not self._is_current():
            self._stack = self._make(kind)
        return self._stack if self._is_as_defined() else None

    def _is_as_defined(self) -> bool:
        """Nobody watches the modules or has put another forward in their place."""
        if _has_any_global_hook() or any(self._hooks):
            return False
        return all(kind.forward is forward for kind, forward in self._definitions.items())

    def _is_current(self) -> bool:
        """Some 2,000 comparisons for 32 layers, none of them in Python's own loop."""
        there = map(dict.get, self._places, self._names)
        return (
            all(map(is_, there, self._things))
            and all(map(eq, map(Tensor.data_ptr, self._weights), self._addresses))
            and all(map(is_, map(type, self._modules), self._kinds))
        )

    def _make(self, kind: type[LayerStack | OpStack]) -> LayerStack | OpStack | None:
        modules = list(self._layers.modules())
        self._made_as = None
        if any(type(x) not in self._definitions or "forward" in vars(x) for x in modules[1:]):
            return None
        self._watch(modules)
        self._made_as = kind
        try:
            return _stack_of(list(self._layers), kind, self._kernels)
        except ValueError:
            return None

    def _watch(self, modules: list[nn.Module]) -> None:
        self._hooks = [h for x in modules for h in (x._forward_hooks, x._forward_pre_hooks)]
        self._modules, self._kinds = modules, [type(x) for x in modules]
        self._weights = [x for module in modules for x in module.parameters(recurse=False)]
        self._addresses = [x.data_ptr() for x in self._weights]
        watched: list[tuple[dict, str, object]] = []
        for module in modules:
            own = vars(module)
            for part in (module._modules, module._parameters):
                watched += [(part, name, x) for name, x in part.items()]
            names = ["forward", *(name for name in ("scales", "eps") if name in own)]
            watched += [(own, name, own.get(name)) for name in names]
        self._places = [place for place, _, _ in watched]
        self._names = [name for _, name, _ in watched]
        self._things = [thing for _, _, thing in watched]


def _stack_of(
    layers: list[Any], kind: type[LayerStack | OpStack], kernels: KernelSet
) -> LayerStack | OpStack:
    """ValueError where the kernels do not take the weights."""
    weights = []
    for layer in layers:
        attention, ffn = layer.attention, layer.feed_forward
        wqkv, wo, w13, w2 = (
            Packed(x.weight.data, x.scales) for x in (attention.wqkv, attention.wo, ffn.w13, ffn.w2)
        )
        norms = layer.attention_norm.weight.data, layer.ffn_norm.weight.data
        if {layer.attention_norm.eps, layer.ffn_norm.eps} != {layers[0].attention_norm.eps}:
            raise ValueError("the norms of a stack have one eps")
        weights.append(LayerWeights(norms[0], wqkv, wo, norms[1], w13, w2))
    attention, eps = layers[0].attention, layers[0].attention_norm.eps
    n_kv_heads, head_dim = attention.n_kv_heads, attention.head_dim
    if kind is OpStack:
        return OpStack(weights, n_kv_heads=n_kv_heads, head_dim=head_dim, eps=eps, kernels=kernels)
    return LayerStack(
        weights,
        n_heads=attention.n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=layers[0].feed_forward.rows["w1"],
        eps=eps,
    )
