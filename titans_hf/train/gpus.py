"""What GPUs can do, from their makers' data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A GPU. Where a sheet states sparse figures, half of them are taken.

    Attributes:
        bf16: dense bfloat16 FLOP/s, with sums in float32.
        room: memory in GB.
        tf32, bandwidth, l2, processors: TF32 FLOP/s, bytes/s of memory and of the L2 cache, streaming multiprocessors;
            known of the GPUs that the roofline is drawn for.
    """

    name: str
    bf16: float
    room: int
    tf32: float | None = None
    bandwidth: float | None = None
    l2: float | None = None
    processors: int | None = None


A100_L2 = 5120  # bytes per clock, by the A100 whitepaper; taken for the H100 as well
GPUS = {
    "a100": GPU("A100 80GB", 312e12, 80, 156e12, 2.039e12, A100_L2 * 1.41e9, 108),
    "h100": GPU("H100 SXM", 989e12, 80, 494.7e12, 3.35e12, A100_L2 * 1.755e9, 132),
    "h200": GPU("H200 SXM", 989e12, 141),
    "b200": GPU("HGX B200", 2250e12, 180),
    "l40s": GPU("L40S", 362e12, 48),
    "rtx4090": GPU("GeForce RTX 4090", 165e12, 24),
    "mi300x": GPU("MI300X", 1307e12, 192),
}
