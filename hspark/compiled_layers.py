"""Lean layers as compiled graphs of a few layers each, for decode steps on a CPU.

Where a layer's linear layers read their weights as fast as memory allows, a third of a step is small operators and the
Python between them. Inductor melts them into four kernels a layer. Three things make that usable where no shape is
padded: layers that are alike share one graph, which is compiled once; sizes in it are symbolic; and packed weights,
which no compiler can look into, stay behind an operator (`hspark.packing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hspark.kv_buffers import KVBuffers, Plan
from hspark.lean_layers import LeanLayer, Turn

if TYPE_CHECKING:
    from hspark.target import CausalTarget

# Layers in one graph: the first of these that divides their number. More of them save time between graphs and take
# longer to compile.
_GROUPS = (6, 5, 4, 7, 3, 2, 1)


class CompiledLayers:
    """All layers of a lean model as calls of one graph per group, over the target's buffers.

    There are two graphs: steps of one query a row, and of more. Roundings are those of the operators, so results
    differ from the plain layers' only where a sum is taken in another order.
    """

    def __init__(self, layers: Any, buffers: KVBuffers) -> None:
        size = next(size for size in _GROUPS if len(layers) % size == 0)
        self.groups = [(list(layers[i : i + size]), buffers.part(i, size)) for i in range(0, len(layers), size)]
        many_variants()
        options: dict[str, Any] = {"emulate_precision_casts": True}
        self._run = torch.compile(_run_group, fullgraph=True, options=options)

    def __call__(self, hidden: Tensor, turn: Turn, plan: Plan) -> list[Tensor]:
        """Outputs [1, T, H] of all layers, from the embeddings [1, T, H] and a plan over all rows of the buffers."""
        # The context would be a constant of the graph, but is a size of the masks as well. The grid is a slice of a
        # wider one, whose stride would be a constant, too.
        plan = plan._replace(context=0, grid=plan.grid.flatten().view(plan.grid.shape))
        packed = ((hidden, 1), (turn.cos, 0), (turn.sin, 0), (plan.write, 0), (plan.packed, 0), (plan.grid, 1))
        for tensor, dim in (*packed, *((mask, dim) for mask in plan.masks for dim in (2, 3))):
            if tensor.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        outputs = [hidden]
        for layers, buffers in self.groups:
            outputs += self._run(layers, outputs[-1], turn, buffers, plan)
        return outputs[1:]


def _run_group(layers: list[LeanLayer], hidden: Tensor, turn: Turn, buffers: KVBuffers, plan: Plan) -> list[Tensor]:
    # Through the constructor: torch 2.11 cannot trace `_replace` of a named tuple that comes in.
    whole = Plan(*plan[:6], plan.masks[0].shape[-1], plan.dense)
    outputs = []
    for index, layer in enumerate(layers):
        hidden = layer.run(hidden, turn, buffers, whole, index)
        outputs.append(hidden)
    return outputs


def many_variants() -> None:
    """Lets one function have more compiled variants than the default: of sizes, or of several engines."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)


@torch.inference_mode()
def compile_layers(target: CausalTarget) -> None:
    """Compiles the target's layers for its steps and makes both graphs: some seconds, fewer if torch's cache has them.

    Runs before any request: it writes into the buffers. ValueError for a target without lean layers, or where they do
    not compile, as without a C++ compiler.
    """
    if target.lean is None:
        raise ValueError(
            f"compile=True: on a CPU only layers like the Llama family's are compiled, which "
            f"{type(target.model).__name__} does not have; use 'auto', False or 'step'"
        )
    target.compiled = CompiledLayers(target.lean.layers, target.buffers)
    rows, device = target.rows, target.device
    for queries in (1, 3):
        # Sizes that are equal here would be taken for one and the same, so all are different where they can be.
        count = queries if rows == 1 else 2 if queries == 1 else 5
        slots = torch.arange(count, device=device)
        row, offset = slots // queries % rows, slots % queries
        index = torch.zeros(rows, queries, dtype=torch.int64, device=device)
        anchor = torch.zeros(rows, dtype=torch.int64, device=device)
        plan = target.plan(row, offset, slots < 0, index, anchor, min(64, target.max_length))
        try:
            target.forward(slots, offset, plan)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"compile=True: the layers do not compile here ({reason}); use 'auto' or False") from error
    for number in range(rows):
        target.buffers.clear(number)
