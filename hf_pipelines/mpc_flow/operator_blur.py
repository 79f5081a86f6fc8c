"""Convolution operators with circular borders, exact by FFT."""

import torch
from diffusers import SchedulerMixin  # noqa: F401  (the loader of diffusers looks for the base in this module)
from diffusers.configuration_utils import register_to_config

from hf_pipelines.mpc_flow.operator_base import LinearOperator


class _CircularBlur(LinearOperator):
    """Convolution with a fixed kernel and circular borders, by FFT."""

    def __init__(self):
        super().__init__()
        self._transfers: dict[tuple, torch.Tensor] = {}

    def kernel(self) -> torch.Tensor:
        """The kernel (k, k), float64, of sum 1."""
        raise NotImplementedError

    def _transfer(self, like: torch.Tensor) -> torch.Tensor:
        """Fourier transform of the kernel on the grid of `like`, (H, W/2 + 1); computed once per grid."""
        height, width = like.shape[-2:]
        key = (height, width, like.dtype, like.device)
        if key not in self._transfers:
            kernel = self.kernel()
            rows = (torch.arange(kernel.shape[0]) - kernel.shape[0] // 2) % height
            columns = (torch.arange(kernel.shape[1]) - kernel.shape[1] // 2) % width
            padded = torch.zeros(height, width, dtype=torch.float64)
            padded.index_put_((rows[:, None], columns[None]), kernel, accumulate=True)
            self._transfers[key] = torch.fft.rfft2(padded.to(like.dtype).to(like.device))
        return self._transfers[key]

    def _filter(self, x: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(x) * response, s=x.shape[-2:])

    def A(self, x):
        """Blur."""
        return self._filter(x, self._transfer(x))

    def At(self, y):
        """Blur with the mirrored kernel."""
        return self._filter(y, self._transfer(y).conj())

    def prox(self, z, y, c):
        """Closed form, frequency by frequency."""
        transfer = self._transfer(z)
        spectrum = torch.fft.rfft2(z) + c * transfer.conj() * torch.fft.rfft2(y)
        return torch.fft.irfft2(spectrum / (1 + c * transfer.abs().square()), s=z.shape[-2:])

    def pinv(self, y):
        """The blurred image itself: inverting the kernel would only amplify the noise."""
        return y


class GaussianBlur(_CircularBlur):
    """Gaussian blur with circular borders.

    Args:
        kernel_size (`int`): Side of the kernel in pixels, odd.
        sigma (`float`): Standard deviation of the kernel in pixels.
    """

    @register_to_config
    def __init__(self, kernel_size: int = 61, sigma: float = 1.0):
        super().__init__()
        _check_kernel(kernel_size)
        if not sigma > 0:
            raise ValueError(f"`sigma` must be positive, got {sigma!r}.")

    def kernel(self):
        """Sampled Gaussian."""
        radius = self.config.kernel_size // 2
        line = torch.arange(-radius, radius + 1, dtype=torch.float64)
        profile = torch.exp(-0.5 * (line / self.config.sigma) ** 2)
        kernel = torch.outer(profile, profile)
        return kernel / kernel.sum()


class MotionBlur(_CircularBlur):
    """Blur along a smooth random path, as of a shaking camera.

    The path is a random walk whose direction changes smoothly, drawn from the operator's own seed and rendered with
    bilinear weights.

    Args:
        kernel_size (`int`): Side of the kernel in pixels, odd.
        intensity (`float`): 0 is a straight line, 1 a strongly bent path.
        seed (`int`): Seed of the path.
    """

    @register_to_config
    def __init__(self, kernel_size: int = 61, intensity: float = 0.5, seed: int = 0):
        super().__init__()
        _check_kernel(kernel_size)
        if not 0 <= intensity <= 1:
            raise ValueError(f"`intensity` must lie in [0, 1], got {intensity!r}.")

    def kernel(self):
        """The rendered path."""
        size, samples = self.config.kernel_size, 16 * self.config.kernel_size
        generator = torch.Generator().manual_seed(self.config.seed)
        start = 2 * torch.pi * torch.rand(1, generator=generator, dtype=torch.float64)
        turns = torch.randn(samples, generator=generator, dtype=torch.float64).cumsum(0) * (torch.pi / samples**0.5)
        angle = start + self.config.intensity * turns
        path = torch.stack([angle.sin(), angle.cos()]).cumsum(1)  # (2, samples), row and column
        path = path - (path.amax(1, keepdim=True) + path.amin(1, keepdim=True)) / 2
        path = (
            path * ((size - 3) / 2 / path.abs().max().clamp_min(1e-9)) + size // 2
            if size > 3
            else path * 0 + size // 2
        )
        kernel = torch.zeros(size, size, dtype=torch.float64)
        corner, weight = path.floor().long(), path - path.floor()
        for row in (0, 1):
            for column in (0, 1):
                share = (weight[0] if row else 1 - weight[0]) * (weight[1] if column else 1 - weight[1])
                place = ((corner[0] + row).clamp(0, size - 1), (corner[1] + column).clamp(0, size - 1))
                kernel.index_put_(place, share, accumulate=True)
        return kernel / kernel.sum()


def _check_kernel(kernel_size: int) -> None:
    if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"`kernel_size` must be a positive odd integer, got {kernel_size!r}.")
