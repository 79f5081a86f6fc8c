"""The second tab: controlled paths of a two-dimensional flow."""

import gradio as gr
import paths_mpc_flow as paths
from checks_mpc_flow import LOG10_LAM_RANGE, check_choice, check_number, choices, readable

PATH_HEADERS = ["Planner", "End point", "∫‖u‖² dt", "Φ", "J = ∫‖u‖² dt + λΦ"]
GUIDE = """
Every path starts at the cross and follows the flow of the green density, plus a control u that shall bring x₁ to the
dotted line. MPC plans K steps to the end, takes the first control, and plans anew. FlowGrad seeks all controls at
once, the least J there is, with 150 iterations of Adam: now and then it stops a little short of it.
"""


@readable
def plan_paths(
    density: str,
    start_1: float,
    start_2: float,
    observed: float,
    log10_lam: float,
    steps: int,
    planners: list[str],
    progress: gr.Progress = gr.Progress(),  # noqa: B008  (gradio finds it by its default)
) -> tuple:
    """Plan paths of a two-dimensional flow whose first coordinate shall end at a measured value.

    Args:
        density: The data: two_modes or hexagon.
        start_1: First coordinate of the start, -3 to 3.
        start_2: Second coordinate of the start, -3 to 3.
        observed: The measured value of the first coordinate, -3 to 3.
        log10_lam: log10 of the weight of the data, -1 to 3.
        steps: Sampling steps, 2 to 12.
        planners: Any of none, global, k1, k2, k3, k4, k5, dt.
        progress: Supplied by gradio.

    Returns:
        The figure, a table of end points and costs.
    """
    check_choice("The density", density, paths.DENSITIES)
    start = tuple(check_number("A coordinate of the start", value, -3, 3) for value in (start_1, start_2))
    observed = check_number("The measured value", observed, -3, 3)
    lam = 10 ** check_number("log₁₀ λ", log10_lam, *LOG10_LAM_RANGE)
    steps = check_number("The number of steps", steps, 2, 12, whole=True)
    if not planners:
        raise ValueError("There is nothing to draw: choose at least one planner.")
    for name in planners:
        check_choice("A planner", name, paths.PLANNERS)
    found = {}
    for name in progress.tqdm([name for name in paths.PLANNERS if name in planners], desc="planning"):
        found[name] = paths.plan(density, start, observed, lam, steps, name)
    return paths.draw(density, observed, found), paths.table(found)


def build_tab() -> None:
    """Lay out the tab inside the current `gr.Tab`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            density = gr.Radio(choices(paths.DENSITIES), value="two_modes", label="Data density (green)")
            start_1 = gr.Slider(-3, 3, value=-0.3, step=0.1, label="Start x₁")
            start_2 = gr.Slider(-3, 3, value=-0.2, step=0.1, label="Start x₂")
            observed = gr.Slider(-3, 3, value=2, step=0.1, label="Measured x₁", info="x₂ is left to the model")
            log10_lam = gr.Slider(
                *LOG10_LAM_RANGE,
                value=1,
                step=0.1,
                label="Weight of the data: log₁₀ λ",
                info="1 means λ = 10",
            )
            steps = gr.Slider(2, 12, value=10, step=1, label="Steps N")
            planners = gr.CheckboxGroup(choices(paths.PLANNERS), value=list(paths.PLANNERS), label="Planners")
            button = gr.Button("Plan", variant="primary")
        with gr.Column(scale=5, min_width=560):
            figure = gr.Plot(label="Paths", format="png", show_label=False)
            gr.Markdown(GUIDE)
            table = gr.Dataframe(headers=PATH_HEADERS, interactive=False, wrap=True)
    inputs = [density, start_1, start_2, observed, log10_lam, steps, planners]
    button.click(
        plan_paths, inputs, [figure, table], api_name="plan_paths", show_progress_on=figure, concurrency_limit=1
    )
