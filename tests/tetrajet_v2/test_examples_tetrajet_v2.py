"""The examples in the docstrings run, and give what they show."""

import doctest
import importlib
import pkgutil

import pytest

import hf_models.tetrajet_v2 as tj

MODULES = [m.name for m in pkgutil.iter_modules(tj.__path__) if m.name != "triton_quantize"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show_when_run(name):
    assert doctest.testmod(importlib.import_module(f"hf_models.tetrajet_v2.{name}")).failed == 0


def test_every_public_name_resolves_when_asked():
    assert len([getattr(tj, name) for name in tj.__all__]) > 35
