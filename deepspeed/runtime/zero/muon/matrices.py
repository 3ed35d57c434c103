# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which matrices a parameter is made of. Plain integers."""

from dataclasses import dataclass
from typing import Any, Optional, Sequence


@dataclass(frozen=True)
class Matrix:
    """A 2-D unit orthogonalized on its own: `numel` elements of a parameter, row-major [rows, cols].

    They stand one after another from `offset_in_parameter`, or, where the parts of a fused projection are interleaved,
    as `strips` equal strips that start `stride` elements apart. `fan_out` and `fan_in` are those of the product it
    computes, which for weights stored [in, out] (transformers' Conv1D) are not `rows` and `cols`; only the update's
    scale reads them. With `column_blocks` above 1 the elements are in the order of that many blocks
    [rows, cols / column_blocks], one after another, as tensor-parallel ranks hold a matrix that is cut along its
    columns.
    """
    name: str
    rows: int
    cols: int
    offset_in_parameter: int
    fan_out: int
    fan_in: int
    column_blocks: int = 1
    strips: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        return self.rows * self.cols


def matrices_of(name: str,
                shape: Sequence[int],
                *,
                expert_stack: bool = False,
                parts: Optional[Sequence[int]] = None,
                transposed: bool = False) -> tuple[Matrix, ...]:
    """The matrices of a parameter of `shape`, disjoint and together all of it.

    2-D: the parameter itself. More dimensions: [out, rest], as a convolution computes, or with `expert_stack` (3-D)
    one matrix per expert. `transposed` says that the rows are inputs and the columns outputs, as transformers' Conv1D
    and some expert stacks store their weights. `parts` are numbers of outputs, of the heads of a projection or of what
    is fused in it: each becomes a matrix of its own. Where their sum divides the outputs, they follow one another
    again and again (query, key and value of head after head), and a matrix is all that has the same place. A
    parameter without elements has no matrices.

    Raises ValueError for fewer than 2 dimensions, an expert stack that is not 3-D, and parts that do not fit.
    """
    shape = tuple(shape)
    _require(len(shape) >= 2, f"{name} has shape {shape}: Muon needs a matrix; use Adam for it")
    _require(not expert_stack or len(shape) == 3, f"{name} is marked as an expert stack but has shape {shape}")
    stack, rows, rest = (shape[0], shape[1], shape[2:]) if expert_stack else (1, shape[0], shape[1:])
    cols = 1
    for size in rest:
        cols *= size
    if stack * rows * cols == 0:
        return ()
    outputs, inputs = (cols, rows) if transposed else (rows, cols)
    parts = tuple(parts) if parts else (outputs, )
    _require(
        min(parts) > 0 and outputs % sum(parts) == 0,
        f"{name} has {outputs} outputs, which do not split into parts of "
        f"{list(parts)}")
    repeats = outputs // sum(parts)
    # Outputs that are rows stand in strips of whole rows, outputs that are columns in strips of one row each.
    strips, width = (rows * repeats, 1) if transposed else (repeats, cols)
    labelled = stack > 1 or len(parts) > 1
    matrices: list[Matrix] = []
    for expert in range(stack):
        offset = expert * rows * cols
        for part in parts:
            fan_out = part * repeats
            contiguous = len(parts) == 1 or strips == 1
            matrices.append(
                Matrix(name=f"{name}[{len(matrices)}]" if labelled else name,
                       rows=rows if transposed else fan_out,
                       cols=fan_out if transposed else cols,
                       offset_in_parameter=offset,
                       fan_out=fan_out,
                       fan_in=inputs,
                       strips=1 if contiguous else strips,
                       stride=0 if contiguous else sum(parts) * width))
            offset += part * width
    return tuple(matrices)


def matrices_of_parameter(name: str, param: Any, shape: tuple[int, ...]) -> tuple[Matrix, ...]:
    """The matrices of a parameter by the marks it carries: `is_expert_group`, `muon_num_heads`, `muon_parts`,
    `muon_transposed`. `shape` is the layer's, which a partitioned parameter does not have. Raises ValueError where
    the marks do not fit the shape."""
    num_heads, parts = getattr(param, "muon_num_heads", None), getattr(param, "muon_parts", None)
    if num_heads and parts and len(parts) > 1:
        raise ValueError(f"Muon: {name} is to be taken apart into {num_heads} heads by per_head_muon and into "
                         f"{len(parts)} parts by fused_params or param.muon_parts; choose one of them")
    return matrices_of(name,
                       shape,
                       expert_stack=getattr(param, "is_expert_group", False),
                       parts=[shape[0] // num_heads] * num_heads if num_heads else parts,
                       transposed=getattr(param, "muon_transposed", False))


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(f"Muon layout: {found}")
