"""Building blocks of the kernels: tiled products of matrices in global memory.

One program handles the matrices of one chunk. It never holds a whole matrix in registers: a product loops over blocks
of its inner dimension, and the caches serve repeated reads. So the same code covers every width on every target without
spilling. A barrier separates a product from a later one that reads its result.

Everything is float32. Matrices are row-major [rows, columns] with constant strides; exchanging the strides transposes
an operand.
"""

import triton
import triton.language as tl


def kernel(fn):
    """`triton.jit` that compiles once per set of constants, for any number of chunks and heads."""
    return triton.jit(fn, do_not_specialize=["first", "N", "P", "H", "GROUP", "normalised"])


@triton.jit
def rolled(bound):
    """The bound as a value unknown to the compiler, which would otherwise unroll the loop and run out of registers."""
    return bound * tl.num_programs(2)  # 1, because no grid here has a third dimension


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
    """The tile of `A B` at the given rows and columns."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, rolled(INNER), BLOCK):
        inner = start + tl.arange(0, BLOCK)
        left = load_tile(a, rows, inner, A_ROW, A_COLUMN)
        right = load_tile(b, inner, columns, B_ROW, B_COLUMN)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def squared_norms(x, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Squared norms [C] of the rows of `x` [C, WIDTH]."""
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
    """The second derivative of `silu`."""
    s = tl.sigmoid(z)
    return s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))


@triton.jit
def cap(x_squared, error_squared, max_surprise):
    """The factor that limits the norm of each token's gradient to `max_surprise`; infinity means no limit."""
    squared = tl.maximum(x_squared * error_squared, 1e-37)
    return tl.minimum(max_surprise * tl.rsqrt(squared), 1.0)


@triton.jit
def step_share(x_squared, share, normalised):
    """What a layer takes of its step: `share`, divided by the squared norm of its input if that exceeds 1."""
    return share / tl.where(normalised, tl.maximum(x_squared, 1.0), 1.0)


@triton.jit
def scale_of(x_squared, error_squared, share, normalised, max_surprise):
    """The factor on each token's gradient (`Rule.scale`): the layer's share of the step, then the cap on the norm."""
    step = step_share(x_squared, share, normalised)
    return step * cap(x_squared * step * step, error_squared, max_surprise)
