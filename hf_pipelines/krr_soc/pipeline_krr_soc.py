"""`pipeline("optimal-stopping")`: the value of an option in a state, with bounds, and whether to exercise."""

import time
from typing import Any

import torch
from transformers import Pipeline
from transformers.utils import ModelOutput

from hf_models.krr_soc.bounds_krr_soc import interval, is_consistent
from hf_models.krr_soc.modeling_krr_soc import EXERCISE, KrrSocModel

KEYS = ("spot", "strike", "t", "variance")
FAR = 3.0  # standard deviations of the training states beyond which the regression extrapolates


class OptimalStoppingPipeline(Pipeline):
    """Price and decide with a fitted [`KrrSocModel`].

    An input is `{"spot": [S_1, …, S_d], "t": date, "strike": K}`, or a list of such. `t` defaults to 0 and `strike` to
    the model's; another strike is priced by scaling, since these payoffs are homogeneous in prices and strike. Heston
    models also take `"variance"`. States are cheap: `batch_size` changes neither results nor speed and is ignored.

    Example:
        ```python
        from transformers import pipeline

        import hf_pipelines  # registers the task

        pipe = pipeline("optimal-stopping", model="krr-maxcall-5d")
        pipe({"spot": [100.0] * 5}, bounds=True)
        pipe([{"spot": [130.0, 90.0, 90.0, 90.0, 90.0], "t": 4}])
        ```

    Args:
        model ([`KrrSocModel`]): Fitted, of an option.
    """

    _load_tokenizer = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_processor = False
    model: KrrSocModel

    def __call__(self, inputs: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """Price one or more states.

        Args:
            inputs (`dict` or list of them): States.
            batch_size (`int`, *optional*): Ignored.
            bounds (`bool`, defaults to `False`): Also lower and upper bound and the interval of level 1 − alpha.
            alpha (`float`, defaults to 0.05): 1 − confidence.
            n_lower (`int`, defaults to 100,000): Paths of the lower bound.
            n_upper (`int`, defaults to 1,500): Paths of the upper bound.
            n_upper_inner (`int`, defaults to 256): Samples of its inner averages.
            seed (`int`, *optional*): Of the paths; default: the model's.
            kwargs: These arguments.

        Returns:
            `dict` or list of them: `price`, `continuation`, `payoff`, `action` (`"exercise"` or `"hold"`),
            `extrapolates` (whether the state lies beyond three standard deviations of the training states; bounds
            stay valid there), `lower` and `upper` (each with `value`, `standard_error`), `interval`, `consistent`,
            which are `None` without `bounds`, and `seconds`.

        Raises:
            ValueError: A key is unknown, or a value is out of range.
        """
        return super().__call__(inputs, **kwargs)

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
        allowed = ("bounds", "alpha", "n_lower", "n_upper", "n_upper_inner", "seed")
        unknown = sorted(set(kwargs) - set(allowed))
        if unknown:
            raise ValueError(f"{unknown[0]}={kwargs[unknown[0]]!r} is unknown; there is {', '.join(allowed)}.")
        if "alpha" in kwargs and not 0 < kwargs["alpha"] < 1:
            raise ValueError(f"alpha={kwargs['alpha']!r} must be between 0 and 1.")
        return {}, kwargs, {}

    def preprocess(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """One input → state (1, state_dim), date and price scale."""
        if not isinstance(inputs, dict) or "spot" not in inputs:
            raise ValueError(f'input={inputs!r} must be a dict such as {{"spot": [100.0], "t": 0}}.')
        unknown = sorted(set(inputs) - set(KEYS))
        if unknown:
            raise ValueError(f"{unknown[0]}={inputs[unknown[0]]!r} is unknown; an input takes {', '.join(KEYS)}.")
        config, process = self.model.config, self.model.problem.process
        strike = inputs.get("strike", config.strike)
        if not (isinstance(strike, (int, float)) and 0 < strike < float("inf")):
            raise ValueError(f"strike={strike!r} must be positive and finite.")
        if strike != config.strike and config.payoff_params:
            raise ValueError(f"strike={strike!r}: this payoff has parameters and is priced at {config.strike} only.")
        scale = strike / config.strike
        spot = torch.as_tensor(inputs["spot"], dtype=torch.float64).reshape(-1) / scale
        if len(spot) != process.num_assets:
            raise ValueError(f"spot has {len(spot)} values, but the model has {process.num_assets} assets.")
        state = process.initial().cpu().clone()
        state[: len(spot)] = spot
        if "variance" in inputs:
            if process.state_dim == process.num_assets:
                raise ValueError(f"variance={inputs['variance']!r}: this model has no variance.")
            state[-1] = inputs["variance"]
        return {"states": state[None], "t": inputs.get("t", 0), "scale": scale}

    def _forward(self, model_inputs: dict[str, Any], bounds: bool = False, **settings: Any) -> ModelOutput:
        start = time.perf_counter()
        model, t, scale = self.model, model_inputs["t"], model_inputs["scale"]
        x = model_inputs["states"]
        alpha, seed = settings.get("alpha", 0.05), settings.get("seed")
        out = model(x, t)
        x = x.to(out.value.device)
        payoff = float(model.problem.exercise(t, x)[0])
        process = model.problem.process
        spread = process.coordinates(x, process.dt * max(t, 1)) if hasattr(process, "dt") else x.new_zeros(1, 1)
        result: dict[str, Any] = {
            "price": scale * float(out.value[0]),
            "continuation": scale * float(out.continuation[0]),
            "payoff": scale * max(payoff, 0.0),  # −∞ where the date allows no exercise
            "action": "exercise" if int(out.action[0]) == EXERCISE else "hold",
            "extrapolates": bool((spread.abs() > FAR).any()),
            "lower": None,
            "upper": None,
            "interval": None,
            "consistent": None,
        }
        if bounds:
            lower = model.lower_bound(settings.get("n_lower", 100_000), seed, x[0], t)
            upper = model.upper_bound(settings.get("n_upper", 1500), settings.get("n_upper_inner", 256), seed, x[0], t)
            result["lower"], result["upper"] = (
                {"value": scale * b.value, "standard_error": scale * b.standard_error, "skewness": b.skewness}
                for b in (lower, upper)
            )
            result["interval"] = [scale * end for end in interval(lower, upper, alpha)]
            result["consistent"] = is_consistent(lower, upper)
        return ModelOutput(result | {"seconds": time.perf_counter() - start})

    def postprocess(self, model_outputs: ModelOutput) -> dict[str, Any]:
        """Plain values."""
        return dict(model_outputs)
