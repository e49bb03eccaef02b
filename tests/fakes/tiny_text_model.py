# SPDX-License-Identifier: Apache-2.0
"""A tiny random checkpoint that has a tokenizer: one token a byte, and a chat template that forgets reasoning."""

from pathlib import Path

from fakes.tiny_model import tiny_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<start>", "<end>")  # ids 0, 1, 2; the tiny checkpoints' end of sequence is 2
NUM_TOKENS = len(SPECIAL) + 256

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "<start>{{ m.role }}:{% if m.role == 'assistant' and reasoning is defined and reasoning == 'dropped' %}-"
    "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


def tiny_text_checkpoint(directory: Path, seed: int = 0, *, chat_template: str | None = TEMPLATE) -> Path:
    """A hybrid with `NUM_TOKENS` token ids. `reasoning="dropped"` makes the template rewrite earlier answers."""
    tiny_checkpoint(directory, "qwen3_5_text", seed=seed, vocab_size=NUM_TOKENS, mtp=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: len(SPECIAL) + n for n, letter in enumerate(letters)}
    vocabulary.update({name: n for n, name in enumerate(SPECIAL)})
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
    return directory
