"""Small tokenizers and chat templates that behave like the real ones, made offline.

Each template copies the behaviour of one family, not its text: what it does with the system
message, with earlier thinking, with white space, and at the end of a turn. `tokenizer(name)`
returns a tokenizer with the template of the family `name`: a byte-level BPE that merges newlines
and cuts words like those of Qwen and Llama-3, or, for Mistral, a Metaspace BPE like that of
SentencePiece.
"""

from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_WORDS = (
    "The quick brown fox asks: what is the capital of France? The answer is Paris.\n\n"
    "assistant user system model tool weather in city hello there, I think so.\n"
    "def add(a, b):\n    return a + b\n\n\n"
) * 8
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3 = """\
{{- bos_token }}
{%- if tools is not none and tools is defined %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools: ' + tools | tojson + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls is defined %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- message.tool_calls[0].function | tojson + '<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN25 = (
    """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
{%- endif %}
"""
    + CHATML
)

QWEN3 = """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
{{- '<|im_start|>system\\n<tools>' + tools | tojson + '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role in ('system', 'user') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content if message.content is string else '' %}
{%- set thinking = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if not thinking and '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
{{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- content.lstrip('\\n') }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

# Qwen3-2507 thinking: the generation prompt itself opens the think block.
THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}\n"
    "{{- '<think>\\n\\n</think>\\n\\n' }}\n{%- endif %}",
    "{{- '<think>\\n' }}",
)

# DeepSeek-R1: the prompt opens a think block that no rendered turn contains.
R1 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|user|>' + message.content }}{%- endif %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>' + message.content.split('</think>')[-1] + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}
"""

# Mistral v0.3: roles must alternate, the system message goes with the last user message.
MISTRAL = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
{%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}
{%- endif %}
{%- if message.role == 'user' %}
{%- if system is defined and (loop.last or loop.index0 == turns | length - 2) %}
{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
{%- else %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- endif %}
{%- else %}
{{- ' ' + message.content | trim + eos_token }}
{%- endif %}
{%- endfor %}
"""

_GEMMA_TURNS = """\
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}
{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

GEMMA2 = (
    """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}
{%- endif %}
{%- set turns = messages %}{%- set first = '' %}
"""
    + _GEMMA_TURNS
)

GEMMA3 = (
    """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}{%- set turns = messages[1:] %}
{%- else %}
{%- set first = '' %}{%- set turns = messages %}
{%- endif %}
"""
    + _GEMMA_TURNS
)

# Phi-3: closes the whole conversation with the end-of-text token.
PHI3 = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

# GLM-4: nothing closes a turn but the next header.
GLM = """\
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

_TAGGED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and not message.skip %}
{%- generation %}BODY{%- endgeneration %}AFTER
{%- else %}
{{- message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _tagged(body: str, after: str) -> str:
    return _TAGGED.replace("BODY", "{{- " + body + " }}").replace(
        "AFTER", "{{- " + after + " }}" if after else ""
    )


TAGGED = _tagged("message.content + '<|im_end|>'", "'\\n'")
TAGGED_BARE = _tagged("message.content", "'<|im_end|>\\n'")  # leaves the end-of-turn token out
TAGGED_WIDE = _tagged("message.content + '<|im_end|>\\n'", "")  # takes the newline in

TEMPLATES = {
    "llama3": (LLAMA3, "<|eot_id|>"),
    "chatml": (CHATML, "<|im_end|>"),
    "odd-end": (CHATML.replace("<|im_end|>", "<|stop|>"), "<|endoftext|>"),  # nobody knows its end
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "r1": (R1, "<|endoftext|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma2": (GEMMA2, "<eos>"),
    "gemma3": (GEMMA3, "<eos>"),
    "phi3": (PHI3, "<|endoftext|>"),
    "glm": (GLM, "<|endoftext|>"),
    "tagged": (TAGGED, "<|im_end|>"),
    "tagged-bare": (TAGGED_BARE, "<|im_end|>"),
    "tagged-wide": (TAGGED_WIDE, "<|im_end|>"),
}

_SPECIAL = (
    *("<|begin_of_text|>", "<|endoftext|>", "<eos>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<start_of_turn>", "<|end|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<s>", "</s>", "[INST]", "[/INST]", "<|stop|>"),
)
_PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@lru_cache
def _backend(kind: str) -> str:
    """Train a tokenizer ("bytes" or "metaspace") and return it as JSON."""
    if kind == "bytes":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        alphabet = ["▁"]
    first = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))] if kind != "bytes" else []
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=alphabet,
        special_tokens=first,
        show_progress=False,
        max_token_length=12,
    )
    backend.train_from_iterator([_WORDS], trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in _PLAIN_ADDED])
    return backend.to_str()


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a new tokenizer with the template of the family `name`."""
    template, eos = TEMPLATES[name]
    kind = "metaspace" if name == "mistral" else "bytes"
    result = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(kind)),
        bos_token="<s>" if name == "mistral" else "<|begin_of_text|>",
        eos_token=eos,
        pad_token="<|endoftext|>",
    )
    result.chat_template = template
    return result
