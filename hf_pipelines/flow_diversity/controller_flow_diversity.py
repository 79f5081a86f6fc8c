"""Diversity control orthogonal to the flow (Wu et al., arXiv 2510.09060).

The m samples of one prompt are coupled during sampling: their predicted clean images are pushed apart in a feature
space,
a little noise is added, and what of both lies along the model's own velocity is removed. One step σ → σ', Δ = σ − σ':

    x̂_i = x_i − σ v_i                                    endpoint
    z_i = φ(D(x̂_i)),  V(Z) = ½ log det(I + τ Z Zᵀ)        log-volume of the set
    g_i = [∂φ(D(x̂_i))/∂x̂_i]ᵀ ∂V/∂z_i                     pulled back, the endpoint's Jacobian taken as identity
    P_λ g = g − λ ⟨g, b⟩/‖b‖² b                           orthogonal to b = −v
    u_i = γ(σ) ρ ‖b_i‖ P g_i/‖P g_i‖                      ("unit"; the paper's "cap" keeps small gradients small)
    n_i = √(2 β(σ) Δ) P ξ_i + β(σ) Δ P s_i                noise and score correction
    x_i ← x_i + Δ (b_i + u_i) + n_i

| paper | argument | default |
| --- | --- | --- |
| τ | `tau` | 10 |
| γ₀, gate | `gamma0`, `gate` | 4, (0.6, 1) |
| ρ | `max_ratio` | 0.3 |
| λ | `ortho` | 1 |
| β₀, gate, ρ_n | `beta0`, `noise_gate`, `noise_ratio` | 0.1, (0, 0.7), 0.25 |
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hf_pipelines.flow_control.controller_flow import FlowControl, FlowController, FlowState, draw_noise

EPSILON = 1e-12
FEATURE_NORMS = ("l2", "none", "global")
SCHEDULES = ("sin2", "t1mt", "const")


def prepare_features(features: torch.Tensor, feature_norm: str = "l2", center: bool = True) -> torch.Tensor:
    """Z (m, q) from raw features: normalise the rows, then subtract their mean.

    Args:
        features (`torch.Tensor` of shape `(m, q)`): Raw features of one set.
        feature_norm (`str`): `"l2"` per row, `"global"` by the mean norm of the rows, held constant, or `"none"`.
        center (`bool`): Subtract the row mean.
    """
    if feature_norm == "l2":
        features = features / features.norm(dim=1, keepdim=True).clamp_min(EPSILON)
    elif feature_norm == "global":
        features = features / features.detach().norm(dim=1).mean().clamp_min(EPSILON)
    return features - features.mean(0, keepdim=True) if center else features


def log_volume(z: torch.Tensor, tau: float) -> torch.Tensor:
    """V(Z) = ½ log det(I_m + τ Z Zᵀ) by Cholesky of the m×m matrix (paper Eq. 3, with E = −V)."""
    gram = torch.eye(z.shape[0], dtype=z.dtype, device=z.device) + tau * z @ z.T
    return torch.linalg.cholesky(gram).diagonal().log().sum()


def project_orthogonal(g: torch.Tensor, b: torch.Tensor, ortho: float = 1.0) -> torch.Tensor:
    """P_λ g = g − λ ⟨g, b⟩/(‖b‖² + 1e-12) b for each sample, over all its elements."""
    inner = (g * b).flatten(1).sum(1)
    scale = ortho * inner / (b.flatten(1).square().sum(1) + EPSILON)
    return g - _rows(scale, g) * b


def limit_ratio(g: torch.Tensor, b: torch.Tensor, max_ratio: float, cap_mode: str = "unit") -> torch.Tensor:
    """Scale each sample of `g` to ρ‖b‖ (`"unit"`) or to at most that (`"cap"`); a vanishing g stays 0."""
    norm, limit = sample_norm(g), max_ratio * sample_norm(b)
    scale = limit / norm.clamp_min(EPSILON)
    if cap_mode == "cap":
        scale = scale.clamp_max(1.0)
    return _rows(torch.where(norm < EPSILON, torch.zeros_like(scale), scale), g) * g


def schedule(sigma: float, kind: str, gate: Sequence[float]) -> float:
    """s(σ): sin²(π(σ−a)/(c−a)) on [a, c] and 0 outside (`"sin2"`), u(1−u) there (`"t1mt"`), or 1 there (`"const"`)."""
    low, high = gate
    if not low <= sigma <= high:
        return 0.0
    position = (sigma - low) / (high - low)
    value = {"sin2": math.sin(math.pi * position) ** 2, "t1mt": position * (1 - position), "const": 1.0}[kind]
    return value if value > EPSILON else 0.0  # sin(π) is not quite 0 in floating point


def sample_norm(x: torch.Tensor) -> torch.Tensor:
    """‖x_i‖ over all elements of each sample, (m,)."""
    return x.flatten(1).norm(dim=1)


def _rows(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


class FlowDiversityController(FlowController):
    """Spread the samples of one prompt in a feature space, orthogonally to the flow.

    Args:
        encoder (`Callable`, *optional*):
            Images (B, C, H, W) in [−1, 1] → features (B, q), differentiable, for example an [`ImageFeatureEncoder`].
            `None` with `feature_space="pixels"` or `"latent"`.
        gamma0 (`float`, defaults to 4.0): γ₀, strength of the spread; 0 turns it off.
        gate (`tuple[float, float]`, defaults to `(0.6, 1.0)`): Noise levels between which γ acts.
        gamma_schedule (`str`, defaults to `"sin2"`): Shape of γ and of β inside their gates.
        tau (`float`, defaults to 10.0): τ of the log-volume.
        feature_norm (`str`, defaults to `"l2"`): See [`prepare_features`].
        center (`bool`, defaults to `True`): Subtract the mean feature of the set.
        feature_space (`str`, defaults to `"encoder"`): `"encoder"`, `"pixels"` (decoded images) or `"latent"`.
        max_ratio (`float`, defaults to 0.3): ρ, size of the control relative to the velocity.
        cap_mode (`str`, defaults to `"unit"`):
            `"unit"` scales the control to ρ‖b‖, whatever the size of the encoder's gradients; `"cap"` (paper) only
            limits it.
        ortho (`float`, defaults to 1.0): λ of the projection; 0 turns it off.
        endpoint (`str`, defaults to `"euler"`): `"euler"`, or `"heun"` (paper) at one more network call a step.
        beta0 (`float`, defaults to 0.1): β₀, strength of the noise; 0 turns it off.
        noise_gate (`tuple[float, float]`, defaults to `(0.0, 0.7)`): Noise levels between which β acts.
        noise_ratio (`float`, defaults to 0.25): ρ_n, size of the noise relative to ‖b‖Δ.
        noise_ortho (`bool`, defaults to `True`): Project the noise too; `False` is i.i.d. noise.
        score_correction (`bool`, defaults to `True`): Add β Δ P s, without which noise inflates the marginal.
        leverage (`float`, defaults to 0.0): α: weigh the samples by diag((K + εI)⁻¹)^α, mean 1.
        init_ortho (`float`, defaults to 0.0):
            a in [0, 1): turn the starting latents of a group towards orthonormal random directions q at step 0,
            √(1−a²) x + a‖x‖q, rescaled to the norm of x.
        decode_size (`float`, defaults to 1.0): Scale of spatial latents before they are decoded for features.
        update_every (`int`, defaults to 1): Steps between new controls; in between a tenth of the last one is used.
        group_size (`int`, *optional*): Samples of one prompt, which stand together; the whole batch when `None`.
        chunk (`int`, defaults to 1): Images per pull-back; bounds the memory, does not change the result.
        seed (`int`, *optional*): Seed of the noise where no generator is given.

    Attributes:
        memory (`torch.Tensor` of shape `(n, q)`, *optional*): Features of images to keep away from.
        features (`torch.Tensor` of shape `(m, q)`, *optional*): Features of the last controlled step.

    Raises:
        ValueError: A setting is out of range; the message names it.
    """

    def __init__(
        self,
        encoder: Callable[[torch.Tensor], torch.Tensor] | None = None,
        gamma0: float = 4.0,
        gate: tuple[float, float] = (0.6, 1.0),
        gamma_schedule: str = "sin2",
        tau: float = 10.0,
        feature_norm: str = "l2",
        center: bool = True,
        feature_space: str = "encoder",
        max_ratio: float = 0.3,
        cap_mode: str = "unit",
        ortho: float = 1.0,
        endpoint: str = "euler",
        beta0: float = 0.1,
        noise_gate: tuple[float, float] = (0.0, 0.7),
        noise_ratio: float = 0.25,
        noise_ortho: bool = True,
        score_correction: bool = True,
        leverage: float = 0.0,
        init_ortho: float = 0.0,
        decode_size: float = 1.0,
        update_every: int = 1,
        group_size: int | None = None,
        chunk: int = 1,
        seed: int | None = None,
    ):
        settings = {name: value for name, value in locals().items() if name not in ("self", "encoder", "__class__")}
        super().__init__()
        # not the decorator of diffusers: it would take the positional encoder for the first setting
        self.register_to_config(**settings)
        check_settings(self.config)
        self.encoder = encoder
        self.memory: torch.Tensor | None = None
        self.features: torch.Tensor | None = None
        self._last_control: torch.Tensor | None = None
        self._acted = False

    @property
    def active(self) -> bool:
        """Whether the controller ever changes anything."""
        return self.config.gamma0 != 0 or self.config.beta0 > 0

    @property
    def requires_velocity(self) -> bool:
        """Only the Heun endpoint evaluates the network again."""
        return self.config.endpoint == "heun" and self.config.gamma0 != 0

    @property
    def requires_decode(self) -> bool:
        """Features of images need the decoder."""
        return self.active and self.config.feature_space != "latent"

    def reset(self, num_steps: int, batch: int, device: torch.device) -> None:
        """Forget the last run; `memory` stays."""
        super().reset(num_steps, batch, device)
        self.features, self._last_control, self._acted = None, None, False
        group = self.config.group_size or batch
        if batch % group:
            raise ValueError(f"`group_size` {group} does not divide the batch of {batch} samples.")
        if self.active and group < 2 and self.memory is None:
            warnings.warn("diversity needs at least two samples of a prompt: sampling plainly.", stacklevel=2)
        if self.config.feature_space == "encoder" and self.encoder is None and self.config.gamma0 != 0:
            raise ValueError("`feature_space='encoder'` needs an `encoder`.")

    def control(self, state: FlowState) -> FlowControl:
        """Spread the groups of this step and add noise, both orthogonal to the flow."""
        group = self.config.group_size or state.x.shape[0]
        if not self.active or (group < 2 and self.memory is None):
            return FlowControl(state.v, state.x)
        sample = state.x
        if state.step == 0:
            self._warn_about_equal_starts(state.x)
            if self.config.init_ortho > 0:
                sample = torch.cat([self._turn_apart(x) for x in state.x.split(group)])
        settings = self.config
        gamma = settings.gamma0 * schedule(state.sigma, settings.gamma_schedule, settings.gate)
        beta = settings.beta0 * schedule(state.sigma, settings.gamma_schedule, settings.noise_gate)
        entry: dict[str, Any] = {"step": state.step, "sigma": state.sigma, "gamma": gamma, "beta": beta, "skipped": 0}
        answer = FlowControl(state.v, sample)
        b = -state.v
        if gamma != 0:
            u = self._spread(state, b, gamma, group, entry)
            entry["orthogonality"] = float(((u * b).flatten(1).sum(1).abs() / _product(u, b)).max())
            answer.velocity = answer.velocity - u
        if beta > 0:
            answer.noise, correction = self._noise(state, b, beta)
            answer.velocity = answer.velocity - correction
        self._acted = self._acted or gamma != 0 or beta > 0
        if state.step == state.num_steps - 1:
            self._finish(state, answer, group, entry)
        self.log.append(entry)
        return answer

    def _spread(self, state: FlowState, b: torch.Tensor, gamma: float, group: int, entry: dict) -> torch.Tensor:
        """u = γ(σ) · P g, capped, for each group on its own."""
        if self._last_control is not None and state.step % self.config.update_every:
            return 0.1 * self._last_control
        endpoint = self._endpoint(state, b)
        raw, g, volumes = self._features_and_gradient(state, endpoint, group)
        g, entry["skipped"] = _drop_nonfinite(g)
        direction = project_orthogonal(g, b, self.config.ortho)
        u = gamma * limit_ratio(direction, b, self.config.max_ratio, self.config.cap_mode)
        self._last_control, self.features = u, raw
        entry["log_volume"] = sum(volumes) / len(volumes)
        entry["control_ratio"] = float((sample_norm(u) / sample_norm(b).clamp_min(EPSILON)).mean())
        return u

    def _endpoint(self, state: FlowState, b: torch.Tensor) -> torch.Tensor:
        """x̂ = x + σ b, or Heun's x + (σ/2)(b + b(x + σ b, σ_min))."""
        euler = state.x + state.sigma * b
        if self.config.endpoint == "euler":
            return euler
        with torch.no_grad():
            return state.x + state.sigma / 2 * (b - state.velocity(euler, state.sigma_min))

    def _encode(self, state: FlowState, z: torch.Tensor) -> torch.Tensor:
        """φ(D(z)), (B, q)."""
        if self.config.feature_space == "latent":
            return z.flatten(1)
        if self.config.decode_size != 1:
            if z.ndim != 4:
                raise ValueError("`decode_size` needs spatial latents (B, C, h, w); this pipeline packs them.")
            z = F.interpolate(z, scale_factor=self.config.decode_size, mode="bilinear", antialias=True)
        images = state.decode(z)
        return images.flatten(1) if self.config.feature_space == "pixels" else self.encoder(images)

    def _turn_apart(self, x: torch.Tensor) -> torch.Tensor:
        """√(1−a²) x + a‖x‖q with orthonormal q, each sample at its old norm."""
        a = self.config.init_ortho
        flat = x.flatten(1)
        q = torch.linalg.qr(draw_noise(flat, _first(self.generator)).T)[0].T[: len(x)]  # (m, d)
        turned = (1 - a**2) ** 0.5 * flat + a * flat.norm(dim=1, keepdim=True) * q
        return (turned * (flat.norm(dim=1) / turned.norm(dim=1))[:, None]).view_as(x)

    def energy(self, z: torch.Tensor) -> torch.Tensor:
        """What the control ascends, a function of one set's prepared features (m, q): the log-volume."""
        return log_volume(z, self.config.tau)

    def _feature_gradient(self, raw: torch.Tensor) -> tuple[torch.Tensor, float]:
        """G = ∂V/∂features of one group, (m, q), and V; memory joins as constants."""
        finite = torch.isfinite(raw).all(1)  # a sample without features takes no part
        gradient = torch.full(raw.shape, float("nan"), dtype=torch.float64, device=raw.device)
        leaf = raw[finite].double().requires_grad_(True)
        rows = leaf if self.memory is None else torch.cat([leaf, self.memory.to(leaf)])
        z = prepare_features(rows, self.config.feature_norm, self.config.center)
        volume = self.energy(z)
        (gradient[finite],) = torch.autograd.grad(volume, [leaf])
        if self.config.leverage > 0:
            z = z.detach()[: len(leaf)]
            inverse = torch.linalg.inv(z @ z.T + 1e-3 * torch.eye(len(z), dtype=z.dtype, device=z.device))
            weight = inverse.diagonal() ** self.config.leverage
            gradient[finite] *= (weight / weight.mean())[:, None]
        return gradient.to(raw.dtype), float(volume.detach())

    def _features_and_gradient(
        self, state: FlowState, endpoint: torch.Tensor, group: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """Features Z of all samples, [∂φ(D(x̂))/∂x̂]ᵀ ∂V/∂Z, and the V of each group.

        The whole group enters one determinant, whatever the chunk: pass A computes all features without a graph, pass
        B pulls back one chunk, and so one decoder graph, at a time. A batch that is one chunk needs a single pass.
        """
        single = len(endpoint) <= self.config.chunk
        leaves = [part.detach().requires_grad_(True) for part in endpoint.split(self.config.chunk)]
        with torch.set_grad_enabled(single):  # pass A
            features = [self._encode(state, leaf) for leaf in leaves]
        raw = torch.cat([part.detach() for part in features])
        gradients, volumes = zip(*[self._feature_gradient(rows) for rows in raw.split(group)], strict=True)
        pulled = []
        for index, weight in enumerate(torch.cat(gradients).split(self.config.chunk)):  # pass B
            output = features[index] if single else self._encode(state, leaves[index])
            pulled.append(torch.autograd.grad(output, [leaves[index]], weight.to(output.dtype))[0])
        return raw, torch.cat(pulled).to(endpoint.dtype), list(volumes)

    def _noise(self, state: FlowState, b: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """n = √(2βΔ) P ξ, at most ρ_n‖b‖Δ long, and the correction β P s that goes into the velocity."""
        delta = state.sigma - state.sigma_next
        ortho = self.config.ortho if self.config.noise_ortho else 0.0
        xi = draw_noise(state.x, self.generator)
        n = math.sqrt(2 * beta * delta) * project_orthogonal(xi, b, ortho)
        n = limit_ratio(n, delta * b, self.config.noise_ratio, "cap")
        if not self.config.score_correction:
            return n, torch.zeros_like(n)
        score = -(state.x + (1 - state.sigma) * state.v) / max(state.sigma, 1e-3)
        return n, beta * project_orthogonal(score, b, ortho)

    def _finish(self, state: FlowState, answer: FlowControl, group: int, entry: dict) -> None:
        """Features and log-volume of the final set, and a warning where no step was controlled."""
        if not self._acted:
            warnings.warn(
                f"`gate` {tuple(self.config.gate)} and `noise_gate` {tuple(self.config.noise_gate)} cover none of the "
                f"{state.num_steps} steps: nothing was controlled.",
                stacklevel=3,
            )
        if self.config.feature_space == "encoder" and self.encoder is None:
            return
        final = state.x - state.sigma * answer.velocity
        with torch.no_grad():
            self.features = torch.cat([self._encode(state, part) for part in final.split(self.config.chunk)])
            sets = [
                prepare_features(rows.double(), self.config.feature_norm, self.config.center)
                for rows in self.features.split(group)
            ]
        entry["log_volume"] = sum(float(log_volume(z, self.config.tau)) for z in sets) / len(sets)

    def _warn_about_equal_starts(self, x: torch.Tensor) -> None:
        if len(x) > 1 and bool((x[1:] == x[:1]).flatten(1).all(1).any()):
            warnings.warn("samples start from identical latents: is the same seed used for all?", stacklevel=3)


def _first(generator: Any) -> torch.Generator | None:
    """One generator for what a whole group shares."""
    return generator[0] if isinstance(generator, list) else generator


def _product(u: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (sample_norm(u) * sample_norm(b)).clamp_min(EPSILON)


def _drop_nonfinite(g: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Zero the samples whose gradient is not finite; how many they are."""
    finite = torch.isfinite(g).flatten(1).all(1)
    skipped = int((~finite).sum())
    if skipped:
        warnings.warn(f"{skipped} samples have a gradient that is not finite and are left alone.", stacklevel=4)
    return torch.where(_rows(finite, g), g, torch.zeros_like(g)), skipped


def check_settings(settings: Any) -> None:
    """Raise `ValueError` for settings of [`FlowDiversityController`] that are out of range."""
    for name, allowed in (
        ("feature_norm", FEATURE_NORMS),
        ("gamma_schedule", SCHEDULES),
        ("feature_space", ("encoder", "pixels", "latent")),
        ("cap_mode", ("unit", "cap")),
        ("endpoint", ("euler", "heun")),
    ):
        if settings[name] not in allowed:
            raise ValueError(f"`{name}` must be one of {allowed}, got {settings[name]!r}.")
    for name in ("gate", "noise_gate"):
        gate = settings[name]
        if len(gate) != 2 or not 0 <= gate[0] < gate[1] <= 1:
            raise ValueError(f"`{name}` must be two rising numbers in [0, 1], got {tuple(gate)!r}.")
    for name in ("tau", "max_ratio", "noise_ratio"):
        if not settings[name] > 0:
            raise ValueError(f"`{name}` must be positive, got {settings[name]!r}.")
    for name in ("beta0", "leverage"):
        if not settings[name] >= 0:
            raise ValueError(f"`{name}` must be at least 0, got {settings[name]!r}.")
    if not math.isfinite(settings["gamma0"]):
        raise ValueError(f"`gamma0` must be finite, got {settings['gamma0']!r}.")
    if not 0 <= settings["init_ortho"] < 1:
        raise ValueError(f"`init_ortho` must lie in [0, 1), got {settings['init_ortho']!r}.")
    if not 0 < settings["decode_size"] <= 1:
        raise ValueError(f"`decode_size` must lie in (0, 1], got {settings['decode_size']!r}.")
    if not 0 <= settings["ortho"] <= 1:
        raise ValueError(f"`ortho` must lie in [0, 1], got {settings['ortho']!r}.")
    for name in ("update_every", "chunk"):
        if not isinstance(settings[name], int) or settings[name] < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {settings[name]!r}.")
    group = settings["group_size"]
    if group is not None and (not isinstance(group, int) or group < 1):
        raise ValueError(f"`group_size` must be a positive integer, got {group!r}.")
