"""Image metrics of the flow methods: fidelity to a reference, diversity and quality of a set.

Images are float tensors (B, C, H, W) in [−1, 1], features (n, q). Nothing here imports torchvision.
"""

from typing import Any

import numpy as np
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity


def _numpy(images: torch.Tensor) -> np.ndarray:
    return images.detach().to("cpu", torch.float64).numpy()


def _check_pair(images: torch.Tensor, reference: torch.Tensor) -> None:
    if images.shape != reference.shape or images.ndim != 4:
        raise ValueError(
            f"`images` and `reference` must share a shape (B, C, H, W), got {tuple(images.shape)} and "
            f"{tuple(reference.shape)}."
        )


def psnr(images: torch.Tensor, reference: torch.Tensor, data_range: float = 2.0) -> torch.Tensor:
    """Peak signal-to-noise ratio of each image on its own; average the result, never the error of a whole batch.

    Args:
        images (`torch.Tensor` of shape `(batch, channels, height, width)`): Images.
        reference (`torch.Tensor`): The true images.
        data_range (`float`, defaults to 2.0): Peak, 2 for [−1, 1].

    Returns:
        `torch.Tensor` of shape `(batch,)`: dB; infinite for equal images.
    """
    _check_pair(images, reference)
    pairs = zip(_numpy(reference), _numpy(images), strict=True)
    with np.errstate(divide="ignore"):
        return torch.tensor([peak_signal_noise_ratio(r, i, data_range=data_range) for r, i in pairs])


def ssim(images: torch.Tensor, reference: torch.Tensor, data_range: float = 2.0) -> torch.Tensor:
    """Structural similarity of each image: Gaussian window of σ = 1.5 (11 px), K₁ = 0.01, K₂ = 0.03.

    The mean runs over the whole map, borders reflected: the usual crop of half a window would leave only the centre
    of a 16×16 image. Images with a side below 11 get a uniform window of 7 px (or the largest odd one that fits).

    Args:
        images (`torch.Tensor` of shape `(batch, channels, height, width)`): Images.
        reference (`torch.Tensor`): The true images.
        data_range (`float`, defaults to 2.0): Peak, 2 for [−1, 1].

    Returns:
        `torch.Tensor` of shape `(batch,)`: at most 1.

    Raises:
        ValueError: The shapes disagree, or a side is below 3 pixels.
    """
    _check_pair(images, reference)
    side = min(images.shape[-2:])
    if side < 3:
        raise ValueError(f"SSIM needs sides of at least 3 px, got {tuple(images.shape[-2:])}.")
    window: dict[str, Any] = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    if side < 11:
        window = {"win_size": min(7, side - (side + 1) % 2)}
    pairs = zip(_numpy(reference), _numpy(images), strict=True)
    options = {"data_range": data_range, "channel_axis": 0, "full": True, **window}
    return torch.tensor([structural_similarity(r, i, **options)[1].mean() for r, i in pairs])


def masked_psnr(images: torch.Tensor, reference: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
    """PSNR of the pixels where `region` (broadcastable to the images) is 1, per image (B,), peak 2.

    Raises:
        ValueError: The shapes disagree, or the region of an image is empty.
    """
    _check_pair(images, reference)
    region = region.expand_as(images).flatten(1).double()
    if bool((region.sum(1) == 0).any()):
        raise ValueError("`region` must hold at least one pixel of each image.")
    error = ((images.double() - reference.double()).flatten(1).square() * region).sum(1) / region.sum(1)
    return 10 * torch.log10(4.0 / error)


def vendi_score(features: torch.Tensor) -> float:
    """Effective number of distinct samples (arXiv 2210.02410): exp of the entropy of the eigenvalues of K/n.

    Args:
        features (`torch.Tensor` of shape `(n, q)`): Rows are normalised; K is their Gram matrix.

    Returns:
        `float`: between 1 (all alike) and n (all orthogonal).

    Raises:
        ValueError: There is no row.
    """
    if len(features) == 0:
        raise ValueError("`features` must have at least 1 row, got 0.")
    unit = torch.nn.functional.normalize(features.double().flatten(1), dim=1)
    eigenvalues = torch.linalg.eigvalsh(unit @ unit.T / len(unit)).clamp_min(0)
    positive = eigenvalues[eigenvalues > 1e-12]
    return float(torch.exp(-(positive * positive.log()).sum()))


def mean_pairwise_cosine(features: torch.Tensor) -> float:
    """Mean cosine similarity over all pairs of different rows of `features` (n, q); lower is more diverse."""
    if len(features) < 2:
        raise ValueError(f"`features` must have at least 2 rows, got {len(features)}.")
    unit = torch.nn.functional.normalize(features.double().flatten(1), dim=1)
    gram = unit @ unit.T
    return float((gram.sum() - gram.trace()) / (len(unit) * (len(unit) - 1)))


def ms_ssim_diversity(images: torch.Tensor) -> float:
    """1 − MS-SSIM averaged over all pairs of images (n, C, H, W) in [−1, 1]; sides must exceed 160 px."""
    from pytorch_msssim import ms_ssim

    if len(images) < 2:
        raise ValueError(f"`images` must hold at least 2 images, got {len(images)}.")
    if min(images.shape[-2:]) <= 160:
        raise ValueError(f"MS-SSIM needs sides above 160 px, got {tuple(images.shape[-2:])}.")
    first, second = torch.triu_indices(len(images), len(images), offset=1)
    unit = (images.float() + 1) / 2
    values = [ms_ssim(unit[i : i + 1], unit[j : j + 1], data_range=1.0) for i, j in zip(first, second, strict=True)]
    return 1 - float(torch.stack(values).mean())


def frechet_distance(features: torch.Tensor, reference: torch.Tensor) -> float:
    """Fréchet distance between Gaussians fitted to two sets of features (n, q) and (m, q).

    Raises:
        ValueError: The sets differ in width, or one has fewer than 2 rows.
    """
    if features.ndim != 2 or reference.ndim != 2 or features.shape[1] != reference.shape[1]:
        raise ValueError(
            f"`features` and `reference` must have shapes (n, q) and (m, q), got {tuple(features.shape)} and "
            f"{tuple(reference.shape)}."
        )
    if min(len(features), len(reference)) < 2:
        raise ValueError(f"both sets need at least 2 rows, got {len(features)} and {len(reference)}.")
    a, b = _numpy(features), _numpy(reference)
    shift = a.mean(0) - b.mean(0)
    # covariances A = RᵀR from the QR factor of the centred, scaled rows; then tr √(AB) is the sum of the singular
    # values of R_a R_bᵀ: no root of a rounding error, also where fewer rows than features leave A singular
    factor_a, factor_b = (np.linalg.qr((x - x.mean(0)) / np.sqrt(len(x) - 1), mode="r") for x in (a, b))
    overlap = np.linalg.svd(factor_a @ factor_b.T, compute_uv=False).sum()
    return float(shift @ shift + np.square(factor_a).sum() + np.square(factor_b).sum() - 2 * overlap)


def kernel_mmd(features: torch.Tensor, reference: torch.Tensor, sigma: float = 10.0) -> float:
    """Squared maximum mean discrepancy with an RBF kernel exp(−‖a − b‖²/(2σ²)); CMMD on CLIP embeddings."""

    def kernel(a, b):
        return torch.exp(-torch.cdist(a, b).square() / (2 * sigma**2)).mean()

    a, b = features.double(), reference.double()
    return float(kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))


def precision_recall_density_coverage(
    features: torch.Tensor, reference: torch.Tensor, num_neighbours: int = 5
) -> dict[str, float]:
    """k-NN manifold metrics (arXiv 1904.06991, 2002.09797).

    Args:
        features (`torch.Tensor` of shape `(n, q)`): Generated samples.
        reference (`torch.Tensor` of shape `(m, q)`): Real samples.
        num_neighbours (`int`, defaults to 5): k.

    Returns:
        `dict[str, float]`: `precision`, `recall`, `density`, `coverage`.

    Raises:
        ValueError: A set has no more than k samples.
    """
    if min(len(features), len(reference)) <= num_neighbours:
        raise ValueError(f"both sets need more than {num_neighbours} samples, got {len(features)}, {len(reference)}.")
    fake, real = features.double(), reference.double()

    def radii(points):  # distance to the k-th neighbour; the point itself comes first
        return torch.cdist(points, points).kthvalue(num_neighbours + 1, dim=1).values

    distance = torch.cdist(fake, real)  # (n, m)
    inside_real = distance <= radii(real)[None]
    inside_fake = distance <= radii(fake)[:, None]
    return {
        "precision": float(inside_real.any(1).double().mean()),
        "recall": float(inside_fake.any(0).double().mean()),
        "density": float(inside_real.double().sum(1).mean() / num_neighbours),
        "coverage": float((distance.min(0).values <= radii(real)).double().mean()),
    }


def cluster_coverage(features: torch.Tensor, kmeans: Any) -> dict[str, float]:
    """How many clusters of real data a set reaches, and how evenly.

    Args:
        features (`torch.Tensor` of shape `(n, q)`): The set.
        kmeans ([`~sklearn.cluster.KMeans`]): Fitted on real features only.

    Returns:
        `dict[str, float]`: `clusters` (number reached) and `entropy` (of the assignment, over log k).

    Raises:
        ValueError: The set is empty, or there is only one cluster.
    """
    if len(features) == 0 or kmeans.n_clusters < 2:
        raise ValueError(f"need samples and at least 2 clusters, got {len(features)} and {kmeans.n_clusters}.")
    counts = np.bincount(kmeans.predict(_numpy(features).astype(kmeans.cluster_centers_.dtype)))
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * np.log(share)).sum() / np.log(kmeans.n_clusters)
    return {"clusters": float((counts > 0).sum()), "entropy": float(entropy)}


def nearest_neighbour_distance(images: torch.Tensor, training_images: torch.Tensor) -> torch.Tensor:
    """Root mean squared pixel distance of each image to the nearest training image, (B,); 0 is a memorised image."""
    rows, training_rows = images.flatten(1).double(), training_images.flatten(1).double()
    distance = torch.cdist(rows, training_rows, compute_mode="donot_use_mm_for_euclid_dist")  # exact zeros
    return distance.min(1).values / rows.shape[1] ** 0.5


def clip_score(images: torch.Tensor, prompts: list[str], model: Any, processor: Any) -> torch.Tensor:
    """CLIPScore max(100 cos(image, text), 0) per image with a transformers CLIP that the caller supplies.

    Args:
        images (`torch.Tensor` of shape `(batch, 3, height, width)`): Images in [−1, 1].
        prompts (`list[str]`): One prompt per image.
        model ([`~transformers.CLIPModel`]): The model.
        processor ([`~transformers.CLIPProcessor`]): Its processor.

    Returns:
        `torch.Tensor` of shape `(batch,)`.
    """
    if len(prompts) != len(images):
        raise ValueError(f"`prompts` must hold one prompt per image ({len(images)}), got {len(prompts)}.")
    levels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    pictures = list(levels.permute(0, 2, 3, 1).cpu().numpy())
    inputs = processor(text=prompts, images=pictures, return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        output = model(**inputs)
    cosine = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds)
    return (100 * cosine).clamp_min(0).cpu()


def lpips_distance(images: torch.Tensor, reference: torch.Tensor, net: str = "alex") -> torch.Tensor:
    """LPIPS per image, (B,); lower is more alike. Needs `pip install "closedloop[metrics]"` and its weights.

    Raises:
        ImportError: `lpips`, or the torchvision it needs, is missing.
    """
    _check_pair(images, reference)
    try:
        import lpips
    except (ImportError, RuntimeError) as error:  # torchvision raises RuntimeError beside a foreign torch
        raise ImportError(
            'LPIPS needs `pip install "closedloop[metrics]"` and a torchvision that matches your torch; '
            f"the import said: {error}"
        ) from error
    network = lpips.LPIPS(net=net, verbose=False).to(images.device)
    channels = [x.float().expand(-1, 3, -1, -1) for x in (images, reference)]
    with torch.no_grad():
        return network(*channels).flatten().cpu()


def brisque_score(images: torch.Tensor) -> torch.Tensor:
    """BRISQUE per image, (B,): quality without a reference, lower is better (Mittal et al., TIP 2012).

    Needs `pip install "closedloop[metrics]"`. Made for photographs; sides below 32 px are too small for its
    statistics.

    Args:
        images (`torch.Tensor` of shape `(batch, 3, height, width)`): Images in [−1, 1].

    Returns:
        `torch.Tensor` of shape `(batch,)`.

    Raises:
        ImportError: The package `brisque`, or the OpenCV it needs, is missing.
        ValueError: The images are no RGB pictures of at least 32 px.
    """
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[-2:]) < 32:
        raise ValueError(f"`images` must be RGB with sides of at least 32 px, got shape {tuple(images.shape)}.")
    try:
        from brisque import BRISQUE
    except ImportError as error:
        raise ImportError(f'BRISQUE needs `pip install "closedloop[metrics]"`; the import said: {error}') from error

    class Brisque(BRISQUE):
        """The package's model; its fit returns arrays of one element, which numpy 2.4 no longer takes for numbers."""

        def asymmetric_generalized_gaussian_fit(self, x):
            return tuple(float(np.squeeze(value)) for value in super().asymmetric_generalized_gaussian_fit(x))

    model = Brisque(url=False)
    pictures = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return torch.tensor([float(model.score(picture)) for picture in pictures])
