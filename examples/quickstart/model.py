"""The tiny model and its tokenizer, untrained."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML."""

VOCABULARY = 384
"""256 bytes, the special tokens, and merges."""

CONTEXT = 2048
"""Tokens. General English takes one for two or three letters."""

COMMON_WORDS = """
the of and to in is was for on are that with as at be this have from or had by not but what all were we when your can
said there use an each which she do how their if will up other about out many then them these so some her would make
like him into time has look two more write go see number no way could people than first been call who now find long
down day did get come made may part after before much left total altogether cost costs buy buys sell sold price money
dollars cents week weeks hour hours minutes year years month twice half three times every per same remaining average
"""
"""The rest of the vocabulary is merged from them, so that other data takes fewer tokens too."""

INITIAL_STD = 0.08
"""Initial standard deviation of the matrices. At this width training starts several times faster than from the
usual 0.02."""


def build_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges learned from the corpus, then from common words.

    Every digit is a token of its own, and any text can be encoded.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(chain(corpus, COMMON_WORDS.split("\n")), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=IM_END, pad_token=PAD, model_max_length=CONTEXT, padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Any, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 123,000 parameters with random weights, float32."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, INITIAL_STD)
    return model
