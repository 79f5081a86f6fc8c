"""`TetraJetTrainer` and the three callbacks it adds; the callbacks also work with the plain `Trainer`.

on_train_begin   check the weights, make the engines, continue from the checkpoint's `tetrajet_state.safetensors`
on_step_begin    noise key: step = optimizer steps done, micro-step = 0;  OutControl records if it is time
on_substep_end   micro-step + 1
on_step_end      OutControl selects; OsciReset at i = global_step − 1 (not when the optimizer skipped the step)
on_save          write `tetrajet_state.safetensors`
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._checkpoints import last_complete_checkpoint
from .configuration_tetrajet_v2 import OsciResetConfig, TetraJetConfig
from .linear import iter_layers
from .osci_reset import OsciReset
from .out_control import OutControl

__all__ = ["OsciResetCallback", "OutControlCallback", "TetraJetStateCallback", "TetraJetTrainer"]

logger = logging.getLogger(__name__)

STATE_FILE = "tetrajet_state.safetensors"


def _engines(model: nn.Module) -> dict[str, OsciReset | OutControl]:
    """Engines that the callbacks of this training made, by name; on the model, where the state callback finds them."""
    if "_tetrajet_engines" not in model.__dict__:
        model.__dict__["_tetrajet_engines"] = {}
    return model.__dict__["_tetrajet_engines"]


class OsciResetCallback(TrainerCallback):
    """Runs `OsciReset` after every optimizer step.

    Args:
        config (`TetraJetConfig` or `OsciResetConfig`, *optional*): Default: the model's own.
    """

    def __init__(self, config: TetraJetConfig | OsciResetConfig | None = None) -> None:
        self.config = config
        self.engine: OsciReset | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module = None,
        **kwargs: Any,
    ) -> None:
        """Make the engine; a share in `start` refers to `state.max_steps`.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            model (`nn.Module`): The model.
            **kwargs: Ignored.
        """
        self.engine = _engines(model)["osci_reset"] = OsciReset(model, self.config, state.max_steps)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Count one applied optimizer step.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            optimizer (`AcceleratedOptimizer`): Tells whether it skipped the step.
            **kwargs: Ignored.
        """
        if not getattr(optimizer, "step_was_skipped", False):
            self.engine.update(state.global_step - 1)


class OutControlCallback(TrainerCallback):
    """Runs `OutControl` around every optimizer step.

    Args:
        config (`TetraJetConfig`, *optional*): Default: the model's own.
    """

    def __init__(self, config: TetraJetConfig | None = None) -> None:
        self.config = config
        self.engine: OutControl | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module = None,
        **kwargs: Any,
    ) -> None:
        """Make the engine.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            model (`nn.Module`): The model.
            **kwargs: Ignored.
        """
        self.engine = _engines(model)["out_control"] = OutControl(model, self.config)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record during the coming step if it is time.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            **kwargs: Ignored.
        """
        self.engine.begin(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Select the channels once enough steps are recorded.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            **kwargs: Ignored.
        """
        self.engine.step(state.global_step - 1)


class TetraJetStateCallback(TrainerCallback):
    """Keys the noise, checks the weights, saves and restores the engines' state. Add it behind the other callbacks.

    Args:
        resume_from (`str`, *optional*): Checkpoint folder to continue from; default `checkpoint-{global_step}` of the
            output folder.
    """

    def __init__(self, resume_from: str | None = None) -> None:
        self.resume_from = resume_from

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module = None,
        **kwargs: Any,
    ) -> None:
        """Fail on non-finite weights; continue from the checkpoint's state.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            model (`nn.Module`): The model.
            **kwargs: Ignored.

        Raises:
            ValueError: If a trainable weight holds NaN or Inf; the message names the tensors.
        """
        bad = [n for n, p in model.named_parameters() if p.requires_grad and not bool(p.detach().isfinite().all())]
        if bad:
            raise ValueError(f"trainable weights are not finite, training would be dead: {', '.join(bad)}")
        _set_step(model, state.global_step, 0)
        if state.global_step:
            self._restore(args, state, model)

    def _restore(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        folder = Path(self.resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
        own = folder / _file_name(args.process_index)
        path = own if own.is_file() else folder / STATE_FILE
        if not path.is_file():
            logger.warning(
                "%s has no %s: OsciReset starts at its next window, OutControl records again if it had not selected",
                folder,
                STATE_FILE,
            )
            return
        tensors = load_file(path)
        for name, engine in _engines(model).items():
            part = {k.removeprefix(f"{name}//"): v for k, v in tensors.items() if k.startswith(f"{name}//")}
            if path != own and name == "out_control":  # another rank's sums would be counted twice
                part = {k: v for k, v in part.items() if not k.endswith("/norms")}
            if part:
                engine.load_state_dict(part)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module = None,
        **kwargs: Any,
    ) -> None:
        """Key the noise of the coming step.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            model (`nn.Module`): The model.
            **kwargs: Ignored.
        """
        _set_step(model, state.global_step, 0)

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module = None,
        **kwargs: Any,
    ) -> None:
        """Next micro-step of gradient accumulation.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            model (`nn.Module`): The model.
            **kwargs: Ignored.
        """
        counters = next((layer.state for _, layer in iter_layers(model)), None)
        if counters is not None:
            _set_step(model, counters.step, counters.micro_step + 1)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module = None,
        **kwargs: Any,
    ) -> None:
        """Write the open window and the unfinished recording beside the checkpoint.

        Args:
            args (`TrainingArguments`): Of the trainer.
            state (`TrainerState`): Of the trainer.
            control (`TrainerControl`): Of the trainer.
            model (`nn.Module`): The model.
            **kwargs: Ignored.
        """
        tensors = {"global_step": torch.tensor(state.global_step)}
        for name, engine in _engines(model).items():
            tensors.update({f"{name}//{k}": v.detach().cpu() for k, v in engine.state_dict().items()})
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _file_name(args.process_index)
        save_file(tensors, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)  # there is a whole file or none


def _file_name(rank: int) -> str:
    return STATE_FILE if rank == 0 else STATE_FILE.replace(".", f"_rank{rank}.", 1)


def _set_step(model: nn.Module, step: int, micro_step: int) -> None:
    for _, layer in iter_layers(model):
        layer.state.set_step(step, micro_step)


class TetraJetTrainer(Trainer):
    """`Trainer` for a model converted by `prepare_model` or
    `from_pretrained(quantization_config=TetraJetConfig(...))`.

    Adds `OutControlCallback`, `OsciResetCallback` (where the config enables them) and `TetraJetStateCallback`, so that
    training resumes exactly, also inside a window or a recording.

    Args:
        *args: Of `Trainer`.
        callbacks (`list[TrainerCallback]`, *optional*): More callbacks.
        **kwargs: Of `Trainer`.

    Raises:
        ValueError: If the model is not converted, or holds packed weights and no adapter.
    """

    def __init__(self, *args: Any, callbacks: list[TrainerCallback] | None = None, **kwargs: Any) -> None:
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, nn.Module):
            _check_trainable(model)
        super().__init__(*args, callbacks=callbacks, **kwargs)
        layers = list(iter_layers(self.model))
        if not layers:
            _check_trainable(self.model)
        config = layers[0][1].recipe
        present = {type(callback) for callback in self.callback_handler.callbacks}
        if config.out_control.enabled and OutControlCallback not in present:
            self.add_callback(OutControlCallback())
        if config.osci_reset.enabled and OsciResetCallback not in present:
            self.add_callback(OsciResetCallback())
        given = [c for c in self.callback_handler.callbacks if isinstance(c, TetraJetStateCallback)]
        for callback in given:
            self.remove_callback(callback)
        self._state_callback = given[0] if given else TetraJetStateCallback()
        self.add_callback(self._state_callback)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `Trainer.train`.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): Checkpoint folder, or `True` for the last one.
            *args: Of `Trainer.train`.
            **kwargs: Of `Trainer.train`.

        Returns:
            `TrainOutput`: Of `Trainer.train`.
        """
        if resume_from_checkpoint is True:
            # the last that a killed process wrote to its end; without any `Trainer` says so
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir, STATE_FILE) or True
        if isinstance(resume_from_checkpoint, (str, Path)):
            self._state_callback.resume_from = str(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)


def _check_trainable(model: nn.Module) -> None:
    layers = [layer for _, layer in iter_layers(model)]
    if not layers:
        raise ValueError(
            "model has no quantized layers: load it with quantization_config=TetraJetConfig(...) "
            "or call prepare_model(model, config)"
        )
    if all(layer.mode == "packed" for layer in layers) and not hasattr(model, "peft_config"):
        raise ValueError(
            "model holds packed 4-bit weights, which cannot be trained: load the master checkpoint, "
            "or attach adapters (peft)"
        )
