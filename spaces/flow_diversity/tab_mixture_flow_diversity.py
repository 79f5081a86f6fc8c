"""The second tab: a set of points of a two-dimensional mixture, sampled plainly and kept apart."""

from typing import Any

import gradio as gr
import mixture_flow_diversity as mixture
from checks_flow_diversity import (
    BETA_RANGE,
    GAMMA_RANGE,
    LOG10_TAU_RANGE,
    MAX_IMAGES,
    MAX_SEED,
    STEPS_RANGE,
    check_choice,
    check_control,
    check_sampling,
    choices,
    readable,
)

HEADERS = ["", "Plain", "Controlled"]
ONE_POINT_NOTE = "**One point: there is nothing to spread.** Both panels are the plain one; take two or more."
NO_CONTROL_NOTE = "**Strength 0 and no noise: nothing is controlled.** Both panels are the plain one."
EMPTY_GATE_NOTE = "**The gates cover none of the steps: nothing was controlled.** Widen the gate or take more steps."
GUIDE = f"""
Crosses are the starts, dots the ends; a point has the same colour in both panels. Here the points themselves are the
features, and the flow of the green density is exact. Independent starts often meet in one mode; under control the
points know of each other. What the picture shows for one seed, the last rows average over {mixture.NUM_SETS} others.
"""


@readable
def spread_mixture(
    density: str = "ring",
    num_samples: int = 6,
    steps: int = 30,
    gamma0: float = 8.0,
    gate_low: float = 0.5,
    gate_high: float = 1.0,
    log10_tau: float = 0.0,
    beta0: float = 0.0,
    project: bool = True,
    seed: int = 0,
) -> tuple:
    """Sample points of a two-dimensional mixture twice from the same starts: plainly, and kept apart.

    Args:
        density: The mixture: two_modes or ring.
        num_samples: Points in the set, 1 to 16; one alone cannot be spread.
        steps: Sampling steps, 2 to 60.
        gamma0: Strength of the spread, 0 to 12; 0 turns it off.
        gate_low: Lower end of the noise levels at which the spread acts, 0 to 1.
        gate_high: Upper end of the noise levels at which the spread acts, 0 to 1.
        log10_tau: log10 of tau, the scale of the log-volume, -1 to 3.
        beta0: Strength of the noise, 0 to 1; 0 turns it off.
        project: Whether spread and noise keep at right angles to the flow.
        seed: Seed of starts and noise, 0 to 2147483647.

    Returns:
        The figure, a table of modes reached, a note.
    """
    chosen = check_choice("The mixture", density, mixture.DENSITIES)
    num_samples, steps, seed = check_sampling(num_samples, steps, seed)
    settings = check_control(gamma0, gate_low, gate_high, log10_tau, beta0, project)
    idle = num_samples == 1 or (settings["gamma0"] == 0 and settings["beta0"] == 0)
    plain, _ = mixture.run(density, None, num_samples, steps, seed)
    controlled, acted = mixture.run(density, None if idle else settings, num_samples, steps, seed)
    total = len(chosen.means)
    before, after = (mixture.modes_reached(density, paths.ends) for paths in (plain, controlled))
    if idle:
        note = ONE_POINT_NOTE if num_samples == 1 else NO_CONTROL_NOTE
    elif not acted:
        note = EMPTY_GATE_NOTE
    else:
        note = f"**{before} → {after} of {total} modes** from the same {num_samples} starts."
    others = (seed + 1) % (MAX_SEED + 1)
    columns = [mixture.averages(density, None, num_samples, steps, others)]
    columns.append(mixture.averages(density, settings, num_samples, steps, others) if acted else columns[0])
    inside = [f"{100 * (mixture.assign(density, paths.ends) >= 0).mean():.0f} %" for paths in (plain, controlled)]
    rows = [
        [f"Modes reached, of {total}", str(before), str(after)],
        ["Points in a mode", *inside],
        [f"Modes reached, mean of {mixture.NUM_SETS} other sets", *(f"{reached:.2f}" for reached, _ in columns)],
        [f"Points in a mode, {mixture.NUM_SETS} other sets", *(f"{100 * share:.1f} %" for _, share in columns)],
    ]
    return mixture.draw(density, plain, controlled), rows, note


def build_tab(page: gr.Blocks) -> None:
    """Lay out the tab inside the current `gr.Tab` of `page`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            density = gr.Radio(choices(mixture.DENSITIES), value="ring", label="Data density (green)")
            num_samples = gr.Slider(1, MAX_IMAGES, value=6, step=1, label="Points m")
            gamma0 = gr.Slider(*GAMMA_RANGE, value=8, step=0.5, label="Strength γ₀", info="0 turns the spread off")
            gate_low = gr.Slider(
                0, 1, value=0.5, step=0.05, label="Gate: from σ", info="noise levels at which the spread acts"
            )
            gate_high = gr.Slider(0, 1, value=1, step=0.05, label="Gate: to σ")
            log10_tau = gr.Slider(
                *LOG10_TAU_RANGE, value=0, step=0.5, label="Scale of the volume: log₁₀ τ", info="0 means τ = 1"
            )
            beta0 = gr.Slider(*BETA_RANGE, value=0, step=0.05, label="Noise β₀")
            project = gr.Checkbox(value=True, label="Keep at right angles to the flow (projection)")
            steps = gr.Slider(*STEPS_RANGE, value=30, step=1, label="Steps N")
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            button = gr.Button("Sample points", variant="primary")
        with gr.Column(scale=5, min_width=620):
            note = gr.Markdown(min_height=28)
            figure = gr.Plot(label="Paths", format="png", show_label=False)
            gr.Markdown(GUIDE)
            table = gr.Dataframe(headers=HEADERS, interactive=False, wrap=True, column_widths=["56%", "22%", "22%"])
    inputs = [density, num_samples, steps, gamma0, gate_low, gate_high, log10_tau, beta0, project, seed]
    shown = [figure, table, note]
    processor: dict[str, Any] = {"concurrency_id": "mixture", "concurrency_limit": 1}
    button.click(spread_mixture, inputs, shown, api_name="spread_mixture", show_progress_on=figure, **processor)
    page.load(spread_mixture, inputs, shown, api_visibility="private", show_progress_on=figure, **processor)
