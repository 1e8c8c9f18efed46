"""A byte-level tokenizer with a chat template: 256 bytes and three markers, nothing to download.

The id of byte ``b`` is ``b``, so ids of ASCII text are ``ord`` of its characters, and every Unicode text survives
encode and decode unchanged. Chat turns are ChatML, which TorchRL's ``History.from_text`` reads back by default.

It is not a class of its own: :func:`ByteTokenizer` builds a stock ``PreTrainedTokenizerFast``, so a saved folder loads
in transformers and vLLM where torchrl_moe is not installed. Decoding and encoding again is not an identity: ids
that a random model samples need not be valid UTF-8, and such bytes decode to U+FFFD. Keep the ids.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_BYTES = 256
"""Ids below this are the bytes themselves."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Pad, start of turn (also bos) and end of turn (also eos): ids 256, 257 and 258."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- set body = (message['content'] or '') + '<|im_end|>' %}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- body }}{% endgeneration %}"
    "{%- else %}{{- body }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML without a default system message.

The assistant mask covers the content *and* its ``<|im_end|>``: the policy has to sample that marker to end its turn, so
it is an action like any other. The line break after it belongs to the template.
"""


def ByteTokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: ``len`` 259, pad 256, bos 257, eos 258, padding on the left.

    Markers inside a text are encoded as markers (pass ``split_special_tokens=True`` for untrusted text). No bos is
    added and spaces are never cleaned up. The result pickles, and survives ``save_pretrained`` and ``AutoTokenizer``.

    Choose the folder's name with care: TorchRL uses its own template if the path contains "qwen", "llama", "deepseek",
    "falcon" or "dialogpt", unless it is passed ``chat_template=tokenizer.chat_template``.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("Hi é")
        [72, 105, 32, 195, 169]
        >>> tokenizer.decode([72, 105, 32, 195, 169])
        'Hi é'
        >>> chat = [{"role": "user", "content": "1+1"}]
        >>> tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        '<|im_start|>user\\n1+1<|im_end|>\\n<|im_start|>assistant\\n'
    """
    pad, start, end = SPECIAL_TOKENS
    # BPE without merges keeps each byte a token; ByteLevel writes bytes as printable characters, which BPE needs
    # (GPT-2's table): all others (controls, blanks) get characters behind the first 256, in order
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(NUM_BYTES)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # not normalized: a marker is found exactly as it is written
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
