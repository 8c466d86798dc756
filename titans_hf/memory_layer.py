"""The neural memory as a layer (Section 4.4): projections, convolution, gates, the update rule, norm and output gate.

Axis letters: B batch, T tokens, H memory heads, D head width, P persistent tokens, N tokens of a tail. Rows hold their
real tokens at the front; `lengths` [B] says how many, None means all.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_titans import TitansConfig
from .fast_paths import operators, plain, state_dtype, takes
from .memory_chunks import serves
from .memory_ops import NATIVE, neural_memory, recall
from .memory_rule import rule_of
from .memory_state import MemoryState
from .memory_step import native_fields, native_step, writer_of
from .memory_tokens import LONGEST, SMALLEST, conv_silu, convolved, gated_norm
from .rows import take
from .tails import Tail


class TitansRMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale, computed in float32 or better."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            native = operators(x, x.shape[1])
            if native is not None:
                return native.gated_norm(x, self.weight, self.eps)
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        precise = x.to(state_dtype(x.dtype))
        precise = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * precise.to(self.weight.dtype)


class GatedNorm(TitansRMSNorm):
    """The norm of every head, times the output gate.

    What the memory returns for a key that it does not know is small, and the norm must not make it as loud as a
    recalled value: `memory_norm_floor` is its epsilon, in units of such a value.
    """

    def forward(self, y: Tensor, gate: Tensor | None = None, fused: bool = False) -> Tensor:
        """[B, T, H, D] to [B, T, H D], times SiLU of the gate [B, T, H D] if there is one.

        `fused` takes the hand-written backward of `memory_tokens`.
        """
        if gate is None:
            return super().forward(y).flatten(-2)
        native = operators(y, y.shape[1]) if self.weight.dtype == gate.dtype == y.dtype else None
        if native is not None:
            return native.gated_norm(y, self.weight, self.eps, gate)
        if fused:
            precise = state_dtype(y.dtype)
            return gated_norm(y.to(precise), gate, self.weight.to(precise), self.eps)
        return super().forward(y).flatten(-2) * F.silu(gate)


class CausalConv(nn.Module):
    """The weights of a causal depthwise convolution over tokens, of queries, keys and values side by side.

    Queries start at their own token and, half as much, the one before. Keys start one token further back, values at
    their own token. Keys and queries have the same projection, or start with it, so the first thing written is already
    "this value came after that token", and a query finds it when that token returns: recall is learned many times
    sooner. Values start at half their size: at full size, 2 to 16 tokens of a hundred of ordinary text ran into the cap
    on surprise.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reach = width - 1

    def start(self) -> Tensor:
        """Weights to start from, [channels, reach + 1], with a little noise so that channels differ."""
        channels, width = self.weight.shape
        taps = torch.zeros(3, width + 2)  # queries, keys, values; two columns further back than the convolution looks
        taps[0, -2:] = torch.tensor([0.5, 1.0])
        taps[1] = taps[0].roll(-1) if width > 1 else taps[0]
        taps[2, -1] = 0.5
        noise = torch.rand(channels, width) - 0.5
        return taps[:, -width:].repeat_interleave(channels // 3, dim=0) + 0.4 * width**-0.5 * noise

    def forward(self, channels: int) -> Tensor:
        """Those of the first channels, [reach + 1, channels]. Offloading brings them in when the module is called."""
        weight = self.weight[:channels]
        return weight.T.to(state_dtype(weight.dtype))


class WriteGates(nn.Module):
    """The step size theta, the momentum decay eta and the forget gate alpha of every token, per head.

    Theta is a share of `memory_theta_max * (1 - eta)`. The momentum is then a weighted mean of past gradients: no token
    moves the memory by more than `memory_theta_max` times the largest of them. With `memory_write="delta"` a step of
    1/2 replaces the value of a key, and equal keys do not overshoot. With "chunk" all gradients of a chunk are taken at
    the same weights. If its keys are alike, as those of ordinary text are, they overshoot together once
    `2 theta / (1 - eta)` times the chunk's length exceeds 2. At a steady eta and up to `1 / chunk` a linear memory does
    not overshoot; a deep one is steeper by the square of what it has learned, hence a quarter of that by default. Where
    eta rises behind a large step, the step counts many times over, and `memory_max_surprise` bounds the memory.

    The weights start at zero, so at first every token is written alike. `memory_theta_start` and `memory_eta_start` are
    shares of the maximum. Alpha starts from the first of `memory_alpha_start` in the first head to the second in the
    last, in equal ratios: heads that keep a few words, and heads that keep a text. A single head starts as the last.
    """

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, 3 * config.memory_num_heads)
        self.theta_max, self.eta_max = config.memory_theta_max, config.memory_eta_max
        self.momentum, self.forget = config.memory_momentum, config.memory_forget
        self.limits = (self.theta_max, self.eta_max if self.momentum else 0.0, self.forget)
        self.starts = (config.memory_theta_start, config.memory_eta_start, *config.memory_alpha_start)

    def start_bias(self) -> Tensor:
        H = self.proj.out_features // 3
        theta, eta, *alphas = torch.tensor(self.starts, dtype=torch.float64)
        first, last = torch.stack(alphas).log10().tolist()
        alpha = torch.logspace(last, first, H, dtype=torch.float64).flip(0)
        return torch.cat((theta.expand(H), eta.expand(H), alpha)).logit()

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] to `(theta, eta, alpha)` stacked as [B, T, 3, H]."""
        logits = self.proj(x)
        native = operators(logits, x.shape[1])
        if native is not None:
            return native.gates(logits, *self.limits)
        theta, eta, alpha = logits.to(state_dtype(logits.dtype)).sigmoid().chunk(3, dim=-1)
        eta = self.eta_max * eta if self.momentum else torch.zeros_like(eta)
        theta = self.theta_max * theta * (1 - eta)
        alpha = alpha if self.forget else torch.zeros_like(alpha)
        return torch.stack((theta, eta, alpha), dim=2)


class MemoryStart(nn.Module):
    """The learned weights `M_0` every sequence starts from, per head.

    Hidden layers start as random features and the last layer at zero: at first the memory returns nothing but what was
    written, and recall is learned sooner. Keys have length 1, so the first layer starts with a standard deviation of
    1/2 at any width: less, and SiLU is almost linear and what a hidden unit passes on is small. Only MAC reads `M_0`
    itself, in its first segment, and a norm follows: its last layer starts at a tenth, because a norm of exact zeros
    has no direction.
    """

    def __init__(self, config: TitansConfig):
        super().__init__()
        hidden = [config.memory_expansion * config.head_dim] * (config.memory_depth - 1)
        widths = [config.head_dim, *hidden, config.head_dim]
        self.depth, self.stays = config.memory_depth, config.memory_forget_to == "start"
        # The module's own parameters, not a ParameterList's: offloading brings them in when the module is called.
        for layer, shape in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            self.register_parameter(f"W{layer}", nn.Parameter(torch.empty(config.memory_num_heads, *shape)))

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of each layer, [H, in, out]."""
        return [getattr(self, f"W{layer}") for layer in range(self.depth)]

    def start_sizes(self, variant: str) -> list[float]:
        """The standard deviation that each layer starts with."""
        fan_in = [W.shape[-2] ** -0.5 for W in self.weights]
        return [0.5, *fan_in[1:]][: self.depth - 1] + [0.1 * fan_in[-1] if variant == "mac" else 0.0]

    def forward(self) -> MemoryState:
        """The state of one row at the start: `M_0`, and no momentum."""
        weights = tuple(W[None].to(state_dtype(W.dtype), copy=True) for W in self.weights)  # a cache may keep them
        momentum = tuple(torch.zeros_like(W) for W in weights)
        return MemoryState(weights, momentum, start=weights if self.stays else None)


@dataclass
class MemoryCarry:
    """What a memory layer carries from one call to the next.

    Attributes:
        state: weights, momentum and the open chunk.
        tail: of 3 H D channels, the last projected queries, keys and values before the convolution.
    """

    state: MemoryState
    tail: Tail

    def opened(self, chunk_size: int) -> "MemoryCarry":
        """The same carry, its state with every open-chunk field present."""
        return MemoryCarry(self.state.opened(chunk_size), self.tail)


@dataclass
class Written:
    """The tokens of one call as the update rule sees them: all that is needed to write them again."""

    k: Tensor  # [B, T, H, D]
    v: Tensor  # [B, T, H, D]
    gates: Tensor  # [B, T, 3, H]


class NeuralMemory(nn.Module):
    """The long-term memory as a sequence layer. Its keys are its queries, one token back at first (`CausalConv`).

    >>> memory = NeuralMemory(TitansConfig(hidden_size=64, num_attention_heads=2))
    >>> carry = memory.begin(batch_size=3)
    >>> y, carry, _ = memory(x, carry)          # x, y: [3, any number of tokens, 64]
    """

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.memory_num_heads, config.head_dim
        self.chunk_size, self.rule = config.memory_chunk_size, rule_of(config)
        self.gates_by_chunk = config.memory_gates == "chunk"
        self.least_norms = (SMALLEST, SMALLEST, LONGEST if config.memory_value_limit else None)  # of q, k, v
        self.longest_value = LONGEST if config.memory_value_limit else float("inf")
        self.backend = config.memory_implementation
        width = self.num_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = None if config.memory_shared_keys else nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.conv = CausalConv(3 * width, config.memory_conv_width) if config.memory_conv else None
        self.write_gates = WriteGates(config)
        self.start = MemoryStart(config)
        self.norm = GatedNorm(self.head_dim, config.rms_norm_eps + config.memory_norm_floor / self.head_dim)
        self.output_gate = nn.Linear(config.hidden_size, width, bias=False)
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in, outside of its memory."""
        return self.norm.weight.dtype

    @property
    def conv_reach(self) -> int:
        """Tokens before the present one that the convolution looks at."""
        return 0 if self.conv is None else self.conv.reach

    def begin(self, batch_size: int = 1, spare: int = 0) -> MemoryCarry:
        """The carry of rows that have read nothing; its tail keeps `spare` more tokens than the convolution needs."""
        state = self.start()
        channels = 3 * self.num_heads * self.head_dim
        tail = state.weights[0].new_zeros(batch_size, self.conv_reach + spare, channels, dtype=self.dtype)
        return MemoryCarry(state.map(lambda x: x.expand(batch_size, *x.shape[1:])), Tail(tail))

    def prologue(self, persistent: Tensor, batch_size: int, spare: int = 0) -> tuple[Tensor, MemoryCarry]:
        """Read the persistent tokens [P, hidden] as one chunk of their own: its gradients are taken at `M_0`.

        Returns the outputs [B, P, hidden] and the carry that every row's first real token starts from.
        """
        carry = self.begin(1, spare)
        y, carry, _ = self(persistent[None], carry, chunk_size=persistent.shape[0])
        state = replace(carry.state, start=carry.state.weights) if self.start.stays else carry.state
        widen = lambda x: x.expand(batch_size, *x.shape[1:])  # noqa: E731
        return widen(y), MemoryCarry(state.map(widen), carry.tail.map(widen))

    def forward(
        self,
        x: Tensor,
        carry: MemoryCarry,
        lengths: Tensor | None = None,
        read_only: bool = False,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, MemoryCarry, Written]:
        """Write [B, T, hidden] into the memory and read it (Eqs. 12-15); with `read_only`, only read what it holds.

        Returns the outputs [B, T, hidden], the carry after the last token, and the tokens as they were written.
        """
        if lengths is None and not read_only and chunk_size is None:
            found = self._one_token(x, carry)
            if found is not None:
                return found
        q = self.q_proj(x)
        k = q if self.k_proj is None else self.k_proj(x)
        (q, k, v), tail = self._heads((q, k, self.v_proj(x)), carry.tail, lengths)
        state, backend = carry.state, self.backend
        if chunk_size is None:
            chunk_size = self.chunk_size
        elif backend == "triton":
            backend = "torch"  # kernels are compiled for the grid; a chunk of another size is read once
        gates = self.write_gates(x)  # [B, T, 3, H]
        if self.gates_by_chunk:
            gates = _gates_of_first_token(gates, state, chunk_size)
        if read_only:
            state = state.without_writer() if torch.is_grad_enabled() else state
            y = recall(state.current()[0], q)
        else:
            tokens, options = (q, k, v, *gates.unbind(2)), {"chunk_size": chunk_size, "lengths": lengths}
            found = self._native_step(tokens, state, **options)
            y, state = found or neural_memory(*tokens, state, rule=self.rule, backend=backend, **options)
        out = self.out_proj(self.norm(y, self.output_gate(x), self._fused(y)))
        return out, MemoryCarry(state, tail), Written(k, v, gates)

    def queries(self, x: Tensor, tail: Tail, lengths: Tensor | None = None) -> tuple[Tensor, Tail]:
        """Queries [B, T, H, D] for retrieval, and the tail, of H D channels, of their own stream."""
        (q,), tail = self._heads((self.q_proj(x),), tail, lengths)
        return q, tail

    def retrieve(self, weights: tuple[Tensor, ...], q: Tensor) -> Tensor:
        """The given memory's answers to the queries as tokens [B, T, hidden]: normed and projected, not gated."""
        return self.out_proj(self.norm(recall(weights, q)))

    def _one_token(self, x: Tensor, carry: MemoryCarry) -> tuple[Tensor, MemoryCarry, Written] | None:
        """`forward` in one C++ operator, or None where that does not serve."""
        native, gates, state = self._native(x), self.write_gates, carry.state
        if native is None or state.length is None or self.conv is None or self.gates_by_chunk or not serves(self.rule):
            return None
        own = (self.q_proj, self.v_proj, gates.proj, self.output_gate, self.out_proj)
        writer = writer_of(state) if plain(*own) and (self.k_proj is None or plain(self.k_proj)) else None
        if writer is None:
            return None
        writer, channels = writer.appendable(), 3 * self.num_heads * self.head_dim
        extended, tail = carry.tail.append(x.new_empty(x.shape[0], 1, channels))  # which the operator fills
        weights = (
            self.q_proj.weight,
            None if self.k_proj is None else self.k_proj.weight,
            self.v_proj.weight,
            gates.proj.weight,
            gates.proj.bias,
            self.output_gate.weight,
            self.out_proj.weight,
            self.conv(channels),
            self.norm.weight,
        )
        y, k, v, found, of_M, of_S = native.remember(
            x,
            *weights,
            extended[:, -self.conv_reach - 1 :],
            *writer.buffers(),
            self.num_heads,
            self.longest_value,
            *gates.limits,
            self.norm.eps,
            *native_fields(self.rule),
        )
        return y, MemoryCarry(writer.written(of_M, of_S).after(state), tail), Written(k, v, found)

    def retrieve_one(self, x: Tensor, tail: Tail, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tail] | None:
        """`queries` and `retrieve` of one token in one C++ operator, or None where that does not serve."""
        native = self._native(x) if self.conv is not None and plain(self.q_proj, self.out_proj) else None
        if native is None:
            return None
        channels = self.num_heads * self.head_dim
        extended, tail = tail.append(x.new_empty(x.shape[0], 1, channels))  # which the operator fills
        own = (self.q_proj.weight, self.out_proj.weight, self.conv(channels), self.norm.weight)
        extended = extended[:, -self.conv_reach - 1 :]
        return native.retrieve(x, *own, extended, weights, self.num_heads, self.norm.eps), tail

    def _native_step(self, tokens: tuple[Tensor, ...], state: MemoryState, chunk_size: int, lengths: Tensor | None):
        """`neural_memory` of one token by the C++ operator, or None where that does not serve."""
        open_chunk = state.length is not None and chunk_size == self.chunk_size
        native = self._native(tokens[0]) if open_chunk and lengths is None and serves(self.rule) else None
        return None if native is None else native_step(native, self.rule, state, *tokens[:3], tokens[3:])

    def _native(self, x: Tensor):
        """The C++ operators for tokens [B, T, ...], or None: see `fast_paths.operators`."""
        return operators(x, x.shape[1]) if self.backend in NATIVE else None

    def _fused(self, x: Tensor) -> bool:
        """Whether tokens [B, T, ...] take the fused passes with a hand-written backward."""
        return self.backend != "recurrent" and takes("tokens", x.shape[1])

    def _heads(self, projected: tuple[Tensor, ...], tail: Tail, lengths: Tensor | None) -> tuple[list[Tensor], Tail]:
        """Queries, and keys and values if given, each [B, T, H D], as heads [B, T, H, D]: convolved, through SiLU.

        Queries and keys are normalised to length 1, and longer values shortened to it. The tail, of all streams side by
        side, is for the next call.
        """
        streams, width = len(projected), self.num_heads * self.head_dim
        if self.conv is not None and self._fused(projected[0]):
            before = tail.last(self.conv_reach).split(width, dim=-1)
            taps = self.conv(streams * width).contiguous().split(width, dim=-1)
            found = [
                conv_silu(x, *past, self.num_heads, least)
                for least, x, *past in zip(self.least_norms, projected, before, taps)
            ]
            return found, tail.after(projected, lengths)
        joined = projected[0] if streams == 1 else torch.cat(projected, dim=-1)
        extended, tail = tail.append(joined, lengths)
        if self.conv is not None:
            taps = self.conv(streams * width)
            native = self._native(joined)
            if native is not None:
                found = native.heads(extended[:, -len(taps) :], taps, streams, self.num_heads, self.longest_value)
                return list(found.split(self.num_heads, dim=2)), tail
            taps = taps.contiguous()
            joined = convolved(
                extended[:, extended.shape[1] - joined.shape[1] - self.conv_reach :].to(taps.dtype), taps
            )
        mixed = F.silu(joined.to(state_dtype(joined.dtype))).unflatten(-1, (streams * self.num_heads, -1))
        directions, values = mixed[:, :, : 2 * self.num_heads], mixed[:, :, 2 * self.num_heads :]
        heads = [*F.normalize(directions, dim=-1, eps=SMALLEST).split(self.num_heads, dim=2), values]
        if streams == 3 and self.least_norms[2] is not None:
            heads[2] = F.normalize(values, dim=-1, eps=self.least_norms[2])
        return heads[:streams], tail


def _gates_of_first_token(gates: Tensor, state: MemoryState, chunk_size: int) -> Tensor:
    """Every token takes the gates of the token that opened its chunk (Section 3.2), never those of a later one."""
    token = torch.arange(gates.shape[1], device=gates.device)
    if state.length is None:
        return gates[:, token - token % chunk_size]
    opener = token - (state.length[:, None] + token) % chunk_size  # [B, T], negative: opened by an earlier call
    carried = torch.stack(state.gates, dim=1)[..., 0]  # [B, 3, H]
    return torch.where((opener < 0)[..., None, None], carried[:, None], take(gates, opener.clamp(min=0)))
