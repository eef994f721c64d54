"""Other projects' public figures, by hardware: the only place they are written, each with its source.

Nothing here was measured by this project. The README's table sets beside each what this project measured against the
same code, at the size of attention heads, on the hardware of its committed results.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A figure somebody published.

    Attributes
    ----------
    hardware : as published.
    who, job, figure : the project, what was timed, and what it says.
    source : where it stands.
    remark : what keeps it from being compared, or what it leaves undone.
    beside : (case, contestant) of the suite that runs the same code at a head's size, if there is one.
    """

    hardware: str
    who: str
    job: str
    figure: str
    source: str
    remark: str = ""
    beside: tuple[str, str] | None = None


PUBLISHED = (
    Published(
        "H100, B300",
        "gram-newton-schulz with quack",
        "Newton-Schulz of whole matrices",
        "up to 2x over standard Newton-Schulz, 40-50 % less orthogonalization time",
        "github.com/Dao-AILab/gram-newton-schulz, README",
        "its kernels need a short side above 256, so not heads; an optimizer's accuracy",
        beside=("orthogonalize polar opt-1.3b q float32", "gram-newton-schulz"),
    ),
    Published(
        "A100",
        "gram-newton-schulz in DeepSpeed",
        "(2048, 11059); (3584, 19353)",
        "2.25x; 2.07x over standard Newton-Schulz",
        "DeepSpeed's announcement of it",
        "no heads; an optimizer's accuracy",
        beside=("orthogonalize polar opt-1.3b q float32", "gram-newton-schulz"),
    ),
    Published(
        "H100, B200",
        "quack gemm_symmetric",
        "X Xᵀ",
        "1.65-2.02x over bmm",
        "pytorch/torchtitan#4781",
        "one product, of Hopper and Blackwell only",
    ),
    Published(
        "H800",
        "flash-muon",
        "X Xᵀ, 4096",
        "0.184 ms, torch 0.296 ms",
        "github.com/nil0x9/flash-muon, README",
        "2-D; slower than torch at 1024",
    ),
    Published(
        "L40S",
        "Turbo-Muon",
        "128 matrices of 4096²",
        "825 ms; dion 1320, torch 2370",
        "arXiv 2512.04632",
        "sigma within 0.8 to 1.085",
        beside=("orthogonalize polar opt-1.3b q float32", "torch.optim.Muon's iteration"),
    ),
    Published(
        "GPU not named",
        "torch.linalg.qr",
        "one 4096²",
        "31.6 ms",
        "flagos-ai/FlagGems#5586",
        "no bfloat16",
        beside=("orthogonalize qr opt-1.3b q float32", "linalg.qr, one batch"),
    ),
    Published(
        "RTX 3090",
        "torch.linalg.qr",
        "8192 small matrices",
        "210 ms, 1.67 ms on a CPU",
        "pytorch/pytorch#143281",
        "Q is formed one matrix at a time",
        beside=("orthogonalize qr opt-1.3b q float32", "linalg.qr, one batch"),
    ),
    Published(
        "B200",
        "GPU MODE linear algebra contest",
        "QR of 640 matrices of 512²",
        "4.7 ms, torch 1075 ms",
        "gpumode.com, leaderboard",
        "contest code, no library; orthogonal to 100 n eps",
    ),
    Published(
        "H100",
        "MRCQR",
        "tall QR, float64, kappa up to 1e16",
        "1.8-13.5x over cuSOLVER's geqrf",
        "arXiv 2606.18411",
        "no public package found",
    ),
    Published(
        "H20",
        "torch.linalg.cond",
        "one 128²; one 64²",
        "5.43 ms; 3.49 ms",
        "flagos-ai/FlagGems#5176",
        "a full SVD, waits for the device",
        beside=("condition_number gpt2 qkv float32", "linalg.cond"),
    ),
    Published(
        "V100",
        "torch.linalg.svd",
        "300 matrices of 900x100",
        "gesvdj 1609 ms, gesvda 84 ms",
        "pytorch/pytorch#41306",
        "the driver decides",
        beside=("orthogonalize polar opt-1.3b q float32", "linalg.svd, U Vᵀ"),
    ),
)
