import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | map(attribute='name') | join(',') }}</tools>{% endif %}"
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who is nobody?') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant{{ suffix }}>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    fast.chat_template = TEMPLATE
    return fast
