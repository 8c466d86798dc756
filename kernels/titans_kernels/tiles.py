"""What the kernels are built from: products of matrices that lie in global memory, tile by tile.

A program works through the matrices of one chunk. None of them is held in registers as a whole: a product walks its
inner dimension in blocks, and the caches serve what is read again. So one code serves every width, on every target,
without spilling. Where one product reads what another wrote, a barrier stands between them.

Everything is float32. Matrices are row-major [rows, columns] with constant strides; a transposed operand is one with
its strides exchanged.
"""

import triton
import triton.language as tl


def kernel(fn):
    """A kernel that is compiled once for its constants, whatever the numbers of chunks and heads."""
    return triton.jit(fn, do_not_specialize=["first", "N", "P", "H", "GROUP"])


@triton.jit
def rolled(bound):
    """A loop's bound that the compiler cannot see: it would unroll the loop, and run out of registers."""
    return bound * tl.num_programs(2)  # no grid here has a third dimension: this is 1


@triton.jit
def load_tile(pointer, rows, columns, ROW: tl.constexpr, COLUMN: tl.constexpr):
    return tl.load(pointer + rows[:, None] * ROW + columns[None, :] * COLUMN)


@triton.jit
def store_tile(pointer, rows, columns, ROW: tl.constexpr, tile):
    tl.store(pointer + rows[:, None] * ROW + columns[None, :], tile)


@triton.jit
def product(
    a, A_ROW: tl.constexpr, A_COLUMN: tl.constexpr, b, B_ROW: tl.constexpr, B_COLUMN: tl.constexpr,
    rows, columns, INNER: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`A B` at the given rows and columns."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, rolled(INNER), BLOCK):
        inner = start + tl.arange(0, BLOCK)
        left = load_tile(a, rows, inner, A_ROW, A_COLUMN)
        right = load_tile(b, inner, columns, B_ROW, B_COLUMN)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def squared_norms(x, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[C] squared norm of every row of `x` [C, WIDTH]."""
    total = tl.zeros((tokens.shape[0],), tl.float32)
    for start in range(0, rolled(WIDTH), BLOCK):
        tile = load_tile(x, tokens, start + tl.arange(0, BLOCK), WIDTH, 1)
        total += tl.sum(tile * tile, axis=1)
    return total


@triton.jit
def silu(z):
    return z * tl.sigmoid(z)


@triton.jit
def silu_slope(z):
    s = tl.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def silu_curve(z):
    """The second derivative."""
    s = tl.sigmoid(z)
    return s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))


@triton.jit
def cap(x_squared, error_squared, max_surprise):
    """The scale that brings the norm of each token's gradient to `max_surprise` at most; infinity means no cap."""
    squared = tl.maximum(x_squared * error_squared, 1e-37)
    return tl.minimum(max_surprise * tl.rsqrt(squared), 1.0)
