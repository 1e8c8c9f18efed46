"""The parts of an MoE stack that tests need, small enough for a CPU (namesake: ``torchrl.testing``).

It is part of the library, for users' tests as well as ours. Nothing else in the library imports this package.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.testing import conformance as conformance
    from torchrl_moe.testing.byte_tokenizer import ByteTokenizer as ByteTokenizer
    from torchrl_moe.testing.fake_engine import FakeAsyncVLLM as FakeAsyncVLLM
    from torchrl_moe.testing.noise import Noise as Noise
    from torchrl_moe.testing.noise import NoisyModel as NoisyModel
    from torchrl_moe.testing.noise import without_kept_tokens as without_kept_tokens
    from torchrl_moe.testing.tiny_moe import make_tiny_moe as make_tiny_moe
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "": "conformance",
            ".byte_tokenizer": "ByteTokenizer",
            ".fake_engine": "FakeAsyncVLLM",
            ".noise": "Noise NoisyModel without_kept_tokens",
            ".tiny_moe": "make_tiny_moe",
        },
    )
