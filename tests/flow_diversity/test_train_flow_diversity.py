"""The trainer of the digit encoder: accuracy, reproducibility, arguments."""

import pytest
import torch

from hf_models import ImageFeatureEncoder
from hf_models.flow_diversity import train_flow_diversity as trainer


@pytest.mark.parametrize("extra", [[], ["--convolutional", "--seed", "1"]])
def test_training_learns_the_digits_and_saves_a_loadable_encoder(tmp_path, extra):
    accuracy = trainer.main(["--output_dir", str(tmp_path), "--num_epochs", "12", *extra])
    assert accuracy > 0.9
    encoder = ImageFeatureEncoder.from_pretrained(tmp_path)
    assert encoder(torch.zeros(2, 1, 8, 8)).shape == (2, 32)


def test_same_seed_trains_the_same_encoder(tmp_path):
    states = []
    for name in ("a", "b"):
        trainer.main(["--output_dir", str(tmp_path / name), "--num_epochs", "1"])
        states.append(ImageFeatureEncoder.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_every_argument_is_documented():
    parser_help = {action.dest: action.help for action in trainer.build_parser()._actions}
    assert all(parser_help.values())


@pytest.mark.parametrize("argument", ["--num_epochs", "--train_batch_size"])
def test_count_below_one_is_named(tmp_path, argument, capsys):
    with pytest.raises(SystemExit) as error:
        trainer.parse_args(["--output_dir", str(tmp_path), argument, "0"])
    assert error.value.code == 2 and argument in capsys.readouterr().err
