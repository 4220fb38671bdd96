"""The converted catalogue models themselves: known token ids, and an answer taken from a document."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

DOCUMENT = (
    "Inventory report. The north warehouse stores bicycles; its access code is 4471. The south warehouse stores tents; "
    "its access code is 9026. The manager of the north warehouse is Maria Lopez. The manager of the south warehouse is "
    "Peter Hahn. The report was written in Oslo in March 2021."
)
# From the tokenizers as published: "Hello", " world".
KNOWN_IDS = {"smollm2-135m-instruct": [19556, 905], "qwen2.5-coder-0.5b-instruct": [9707, 1879]}


@pytest.mark.parametrize("name", sorted(KNOWN_IDS))
def test_it_answers_from_a_document(users_models: Path, name: str) -> None:
    path = users_models / name
    if not path.is_dir():
        pytest.skip(f"kvferry models add {name}")
    model, tokenizer = load(str(path))[:2]
    assert tokenizer.encode("Hello world") == KNOWN_IDS[name]
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.bfloat16
    model.set_dtype(mx.float32)
    for question, expected in {
        "What is the access code of the north warehouse?": "4471",
        "Who is the manager of the south warehouse?": "Peter Hahn",
    }.items():
        messages = [
            {"role": "system", "content": "Answer from the document, briefly."},
            {"role": "user", "content": f"{DOCUMENT}\n\nQuestion: {question}"},
        ]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = list(stream_generate(model, tokenizer, prompt, max_tokens=48))
        assert expected in "".join(part.text for part in answer)
        # It ended by itself, so the end token is right.
        assert answer[-1].finish_reason == "stop"
