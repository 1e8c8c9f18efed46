"""The private names that generation reaches for are there, and do what is said of them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from transformers import GenerationMixin

from torchrl_moe import _compat_transformers as _compat_generation


def test_importing_it_imports_neither_library() -> None:
    code = "import sys, torchrl_moe._compat_transformers; print({'transformers', 'torchrl'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_torchrls_names_and_checks() -> None:
    given = {"max_tokens": 3, "max_new_tokens": 4, "n": 2}
    assert _compat_generation.standard_names(given) == {"max_new_tokens": 3, "num_return_sequences": 2}
    assert given["max_tokens"] == 3
    with pytest.raises(ValueError, match="top_k must be positive"):
        _compat_generation.standard_names({"top_k": 0})


def test_transformers_loop_takes_what_generate_gives_it() -> None:
    names = ["input_ids", "logits_processor", "stopping_criteria", "generation_config"]
    assert list(inspect.signature(GenerationMixin._sample).parameters)[1:5] == names
    assert "custom_generate" in inspect.signature(GenerationMixin.generate).parameters


def test_the_loop_is_that_of_the_model() -> None:
    class Model:
        def _sample(self, *args: object, **kwargs: object) -> object:
            return args, kwargs

    assert _compat_generation.sample_by(Model(), 1, two=2) == ((1,), {"two": 2})
