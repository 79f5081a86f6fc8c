"""Image metrics (flow_control_core §7) against closed forms."""

import importlib.util
import json
import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from sklearn.cluster import KMeans

from hf_pipelines.flow_control.metrics import (
    brisque_score,
    clip_score,
    cluster_coverage,
    frechet_distance,
    kernel_mmd,
    lpips_distance,
    masked_psnr,
    mean_pairwise_cosine,
    ms_ssim_diversity,
    nearest_neighbour_distance,
    precision_recall_density_coverage,
    psnr,
    ssim,
    vendi_score,
)

EXACT = 1e-9  # closed forms in float64


def images(count: int, side: int = 16, channels: int = 1, seed: int = 0) -> torch.Tensor:
    shape = (count, channels, side, side)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


# ---------------------------------------------------------------------------------------------------- PSNR and SSIM


@pytest.mark.parametrize("offset", [0.5, 0.1, -0.02])
def test_psnr_is_the_closed_form_when_the_error_is_constant(offset):
    reference = images(3)
    expected = 10 * math.log10(4 / offset**2)  # the peak of [−1, 1] is 2
    assert psnr(reference + offset, reference).tolist() == pytest.approx([expected] * 3, abs=EXACT)


def test_psnr_is_infinite_when_images_are_equal():
    assert psnr(images(2), images(2)).tolist() == [math.inf] * 2


def test_psnr_is_per_image_when_errors_differ():
    reference = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    changed = reference + torch.tensor([0.2, 0.02], dtype=torch.float64).view(2, 1, 1, 1)
    # 20 dB and 40 dB, mean 30; the error of the whole batch would give 22.97
    assert psnr(changed, reference).tolist() == pytest.approx([20, 40], abs=EXACT)


def test_psnr_follows_the_peak_when_data_range_is_given():
    assert psnr(images(1) + 0.1, images(1), data_range=1.0).item() == pytest.approx(20, abs=EXACT)


def test_masked_psnr_counts_the_region_alone_when_errors_lie_outside():
    reference = images(2, side=4, channels=3)
    changed = reference + 0.2
    changed[..., :2] += 5  # outside of the region
    region = torch.zeros(1, 1, 4, 4)
    region[..., 2:] = 1
    assert masked_psnr(changed, reference, region).tolist() == pytest.approx([20, 20], abs=EXACT)


def test_masked_psnr_equals_psnr_when_the_region_is_everything():
    changed, reference = images(3, seed=1), images(3)
    everything = torch.ones(1, 1, 16, 16)
    assert torch.allclose(masked_psnr(changed, reference, everything), psnr(changed, reference), atol=EXACT, rtol=0)


@pytest.mark.parametrize("side", [3, 7, 8, 10, 11, 16])
def test_ssim_is_one_when_images_are_equal(side):
    assert ssim(images(2, side, 3), images(2, side, 3)).tolist() == pytest.approx([1, 1], abs=EXACT)


@pytest.mark.parametrize("side", [8, 16])  # uniform window, Gaussian window
@pytest.mark.parametrize(("a", "b"), [(0.5, 0.4), (-0.2, 0.3), (0.0, 1.0)])
def test_ssim_is_the_luminance_term_when_images_are_constant(a, b, side):
    c1 = (0.01 * 2) ** 2
    first, second = (torch.full((1, 1, side, side), value, dtype=torch.float64) for value in (a, b))
    assert ssim(first, second).item() == pytest.approx((2 * a * b + c1) / (a**2 + b**2 + c1), abs=EXACT)


def test_ssim_is_the_formula_when_images_are_random():
    changed, reference = images(1, seed=1)[0, 0].numpy(), images(1)[0, 0].numpy()

    def mean(x):  # 11 px: truncated at 3.5 σ = 5.25 px
        return gaussian_filter(x, sigma=1.5, truncate=3.5, mode="reflect")

    mx, my = mean(changed), mean(reference)
    vx, vy, cov = (mean(a * b) - ma * mb for a, b, ma, mb in _pairs(changed, reference, mx, my))
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    expected = ((2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean()
    assert ssim(images(1, seed=1), images(1)).item() == pytest.approx(expected, abs=EXACT)


def _pairs(x, y, mx, my):
    return (x, x, mx, mx), (y, y, my, my), (x, y, mx, my)


# ------------------------------------------------------------------------------------------------------- diversity

HALF = [[1.0, 0.0], [0.5, math.sqrt(0.75)]]


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (torch.eye(4).tolist(), 4.0),
        ([[1.0, 2.0]] * 4, 1.0),
        (HALF, 1.7547653506),
        ([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], 2.0),
    ],
)
def test_vendi_score_equals_the_golden_values(features, expected):
    # flow_diversity, golden 7, given to ten digits
    assert vendi_score(torch.tensor(features, dtype=torch.float64)) == pytest.approx(expected, abs=1e-9)


def test_vendi_score_is_the_same_when_rows_are_scaled():
    scaled = torch.tensor(HALF, dtype=torch.float64) * torch.tensor([[3.0], [0.1]])
    assert vendi_score(scaled) == pytest.approx(1.7547653506, abs=1e-9)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (HALF, 0.5),
        ([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], 1 / 3),  # the pairs give 1, 0 and 0
        ([[1.0, 0.0], [-3.0, 0.0]], -1.0),
    ],
)
def test_mean_pairwise_cosine_is_the_mean_over_pairs_when_rows_differ(features, expected):
    assert mean_pairwise_cosine(torch.tensor(features, dtype=torch.float64)) == pytest.approx(expected, abs=EXACT)


def test_ms_ssim_diversity_is_zero_when_images_are_equal():
    assert ms_ssim_diversity(images(1, 176, 3).expand(3, -1, -1, -1)) == pytest.approx(0, abs=1e-6)  # float32


def test_ms_ssim_diversity_is_the_mean_over_pairs_when_one_image_differs():
    first, second = images(1, 176), images(1, 176) * 0.5
    pair = ms_ssim_diversity(torch.cat([first, second]))
    assert pair > 0.01
    assert ms_ssim_diversity(torch.cat([first, first, second])) == pytest.approx(2 * pair / 3, abs=1e-6)


# ------------------------------------------------------------------------------------------- distances between sets


def with_moments(mean: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """2q rows whose mean is `mean` and whose (unbiased) covariance is root rootᵀ, exactly."""
    q = len(mean)
    rows = torch.cat([torch.eye(q), -torch.eye(q)]).double() * math.sqrt((2 * q - 1) / 2)
    return mean + rows @ root.T.double()


@pytest.mark.parametrize("q", [1, 3])
def test_frechet_distance_is_the_closed_form_when_covariances_are_diagonal(q):
    mean = torch.arange(1.0, q + 1).double()
    std_a, std_b = torch.linspace(0.5, 2, q).double(), torch.linspace(1, 0.1, q).double()
    expected = float(mean.square().sum() + (std_a - std_b).square().sum())
    got = frechet_distance(with_moments(mean, std_a.diag()), with_moments(0 * mean, std_b.diag()))
    assert got == pytest.approx(expected, abs=EXACT)


def test_frechet_distance_is_the_closed_form_when_covariances_do_not_commute():
    root_a = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double()
    root_b = torch.tensor([[1.0, 0.0], [1.0, 0.5]]).double()
    a, b = root_a @ root_a.T, root_b @ root_b.T
    # 2×2: tr √M = √(tr M + 2 √det M)
    trace = torch.sqrt(torch.trace(a @ b) + 2 * torch.sqrt(torch.det(a) * torch.det(b)))
    expected = float(torch.trace(a) + torch.trace(b) - 2 * trace)
    zero = torch.zeros(2).double()
    assert frechet_distance(with_moments(zero, root_a), with_moments(zero, root_b)) == pytest.approx(
        expected, abs=EXACT
    )


def test_frechet_distance_is_zero_when_sets_are_equal_and_smaller_than_their_width():
    features = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-9)


def test_kernel_mmd_is_zero_when_sets_are_equal():
    features = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    assert kernel_mmd(features, features) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("sigma", [10.0, 2.0])
def test_kernel_mmd_is_the_closed_form_when_each_set_is_one_point(sigma):
    expected = 2 - 2 * math.exp(-25 / (2 * sigma**2))  # the points lie 5 apart
    got = kernel_mmd(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), sigma)
    assert got == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        # balls of radius 1 around 0, 1, 2, 3; k = 1
        ([0.5, 2.5, 100, 101], {"precision": 0.5, "recall": 1.0, "density": 1.0, "coverage": 1.0}),
        ([0.5, 100, 101, 102], {"precision": 0.25, "recall": 1.0, "density": 0.5, "coverage": 0.5}),
        ([100, 101, 102, 103], {"precision": 0.0, "recall": 0.0, "density": 0.0, "coverage": 0.0}),
        ([1.4, 1.5, 1.6, 1.7], {"precision": 1.0, "recall": 0.0, "density": 2.0, "coverage": 0.5}),
    ],
)
def test_manifold_metrics_are_the_counted_ones_when_points_lie_on_a_line(fake, expected):
    real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    got = precision_recall_density_coverage(torch.tensor(fake).double().view(-1, 1), real, num_neighbours=1)
    assert got == pytest.approx(expected, abs=EXACT)


@pytest.fixture(scope="module")
def kmeans():
    """Four clusters, at the corners of a square."""
    corners = np.array([[0.0, 0.0], [0.0, 10.0], [10.0, 0.0], [10.0, 10.0]])
    return KMeans(4, n_init=1, random_state=0, init=corners).fit(np.repeat(corners, 3, axis=0))


@pytest.mark.parametrize(
    ("points", "clusters", "entropy"),
    [
        ([[0, 1], [1, 0]], 1, 0.0),
        ([[0, 0], [0, 9]], 2, 0.5),  # log 2 / log 4
        ([[0, 0], [0, 9], [9, 0], [9, 9]], 4, 1.0),
        ([[0, 0], [0, 0], [0, 0], [9, 9]], 2, (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4)),
    ],
)
def test_cluster_coverage_counts_what_is_reached_when_points_lie_at_corners(kmeans, points, clusters, entropy):
    got = cluster_coverage(torch.tensor(points, dtype=torch.float32), kmeans)
    assert got == pytest.approx({"clusters": clusters, "entropy": entropy}, abs=EXACT)


def test_nearest_neighbour_distance_is_the_offset_when_images_are_shifted():
    training = images(40)
    moved = training[:30].clone()
    moved[1] += 0.001
    distance = nearest_neighbour_distance(moved, training)
    assert distance[0] == 0 and distance[2:].max() == 0  # memorised, exactly
    assert distance[1].item() == pytest.approx(0.001, abs=EXACT)


# ----------------------------------------------------------------------------------------------------- learned ones


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A tiny random CLIP with a real processor: letters as tokens."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder = tmp_path_factory.mktemp("clip")
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    processor = CLIPProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=CLIPTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")),
    )
    tower = {
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "projection_dim": 8,
    }
    text = {"vocab_size": len(tokens), "bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    config = CLIPConfig(
        text_config={**tower, **text, "max_position_embeddings": 16},
        vision_config={**tower, "image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    torch.manual_seed(0)
    return CLIPModel(config).eval(), processor


def test_clip_score_is_a_hundred_times_the_cosine_when_it_is_positive(clip):
    model, processor = clip
    pictures = images(3, 32, 3).float()
    prompts = ["a dog", "cats", "a long road"]
    pixels = np.rint((pictures.numpy().transpose(0, 2, 3, 1) + 1) * 127.5).astype("uint8")
    inputs = processor(text=prompts, images=list(pixels), return_tensors="pt", padding=True)
    with torch.no_grad():
        image = model.visual_projection(model.vision_model(inputs["pixel_values"]).pooler_output)
        text = model.text_projection(
            model.text_model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).pooler_output
        )
    cosine = (image * text).sum(1) / (image.norm(dim=1) * text.norm(dim=1))
    score = clip_score(pictures, prompts, model, processor)
    assert torch.allclose(score, (100 * cosine).clamp_min(0), atol=1e-3)  # float32 times 100
    assert score.max() > 1


def test_clip_score_is_zero_when_the_cosine_is_negative(clip):
    model, processor = clip
    pictures, prompts = images(3, 32, 3), ["a dog", "cats", "a long road"]
    before = clip_score(pictures, prompts, model, processor)
    model.text_projection.weight.data.neg_()
    try:
        after = clip_score(pictures, prompts, model, processor)
    finally:
        model.text_projection.weight.data.neg_()
    assert bool(((before > 0) ^ (after > 0)).all())
    assert bool(((before == 0) | (after == 0)).all())


@pytest.mark.skipif(importlib.util.find_spec("lpips") is not None, reason="lpips is installed")
def test_lpips_names_what_to_install_when_it_is_missing():
    with pytest.raises(ImportError, match=r'pip install "closedloop\[metrics\]".*No module named \'lpips\''):
        lpips_distance(images(1), images(1))


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("metric", [psnr, ssim, lpips_distance])
def test_pair_is_refused_when_shapes_disagree(metric):
    with pytest.raises(ValueError, match=r"`images` and `reference` must share a shape .*\(2, 1, 16, 16\) and \(1,"):
        metric(images(2), images(1))
    with pytest.raises(ValueError, match=r"got \(1, 16, 16\)"):
        metric(images(1)[0], images(1)[0])


def test_masked_psnr_is_refused_when_shapes_disagree_or_the_region_is_empty():
    with pytest.raises(ValueError, match="share a shape"):
        masked_psnr(images(2), images(1), torch.ones(1, 1, 16, 16))
    region = torch.ones(2, 1, 16, 16)
    region[1] = 0
    with pytest.raises(ValueError, match="`region` must hold at least one pixel of each image"):
        masked_psnr(images(2), images(2), region)


@pytest.mark.parametrize(
    ("compute", "match"),
    [
        (lambda: ssim(images(1, 2), images(1, 2)), r"at least 3 px, got \(2, 2\)"),
        (lambda: vendi_score(torch.zeros(0, 3)), "`features` must have at least 1 row"),
        (lambda: mean_pairwise_cosine(torch.ones(1, 3)), "`features` must have at least 2 rows, got 1"),
        (lambda: ms_ssim_diversity(images(1, 176)), "`images` must hold at least 2 images, got 1"),
        (lambda: ms_ssim_diversity(images(2, 160)), r"above 160 px, got \(160, 160\)"),
        (lambda: frechet_distance(torch.ones(1, 3), torch.ones(4, 3)), "at least 2 rows, got 1 and 4"),
        (lambda: frechet_distance(torch.ones(4, 3), torch.ones(4, 2)), r"\(4, 3\) and \(4, 2\)"),
        (lambda: precision_recall_density_coverage(torch.ones(5, 2), torch.ones(9, 2)), "more than 5 .*got 5, 9"),
        (lambda: clip_score(images(2, 32, 3), ["one"], None, None), r"one prompt per image \(2\), got 1"),
    ],
)
def test_metric_is_refused_when_the_input_cannot_give_one(compute, match):
    with pytest.raises(ValueError, match=match):
        compute()


def test_cluster_coverage_is_refused_when_the_set_is_empty_or_there_is_one_cluster(kmeans):
    with pytest.raises(ValueError, match="need samples and at least 2 clusters, got 0 and 4"):
        cluster_coverage(torch.zeros(0, 2), kmeans)
    with pytest.raises(ValueError, match="got 3 and 1"):
        cluster_coverage(torch.zeros(3, 2), KMeans(1, n_init=1).fit(np.zeros((2, 2))))


def test_brisque_rises_when_a_photograph_gets_noisy_or_blurred():
    pytest.importorskip("brisque")
    from skimage import data

    photo = torch.from_numpy(data.astronaut()[:256, :256]).permute(2, 0, 1)[None] / 127.5 - 1
    noisy = photo + 0.3 * torch.randn(photo.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.avg_pool2d(photo, 7, stride=1, padding=3)
    clean, worse, soft = brisque_score(torch.cat([photo, noisy, blurred])).tolist()
    assert worse > clean + 20 and soft > clean + 20


@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (1, 3, 16, 64)])
def test_brisque_names_a_wrong_shape(shape):
    with pytest.raises(ValueError, match="RGB"):
        brisque_score(torch.zeros(shape))
