import time

import pytest
import torch

from lean_laguna.core.errors import DataError
from lean_laguna.train.dataset import load_tokens
from lean_laguna.train.selfgen import choose_prefixes, generate_held_out, generate_text
from lean_laguna.train.target import build_target
from lean_laguna.train.tokenizer import EOS_ID
from support.training import selfgen_recipe, target_recipe


@pytest.fixture(scope="module")
def target():
    recipe = target_recipe(
        init_std=0.3, model=target_recipe().model
    )  # wide weights: greedy text that is not a loop
    return build_target(recipe, torch.device("cpu"), "test").requires_grad_(False)


def logits_of(target, tokens):
    return target.compute_logits(target.forward_dense(tokens.long()).hidden_states.flatten(0, 1)).view(
        *tokens.shape, -1
    )


def test_greedy_text_is_the_targets_argmax(target, data):
    text = generate_held_out(target, load_tokens(data, "val"), selfgen_recipe(), 0.0)
    best = logits_of(target, text.tokens)[:, :-1].argmax(-1)
    written = text.written_mask(slice(None))[:, 1:]
    assert torch.equal(best[written], text.tokens[:, 1:][written].long())


def test_sampled_text_is_the_argmax_with_its_noise(target, data):
    text = generate_held_out(target, load_tokens(data, "val"), selfgen_recipe(), 0.8)
    noise = text.noise(0, len(text.tokens))
    best = (logits_of(target, text.tokens)[:, :-1] + 0.8 * noise[:, 1:]).argmax(-1)
    written = text.written_mask(slice(None))[:, 1:]
    assert torch.equal(best[written], text.tokens[:, 1:][written].long())


def test_training_text_keeps_prefixes_and_is_reproducible(target, data):
    stream, recipe = load_tokens(data, "train"), selfgen_recipe()
    first, second = generate_text(target, stream, recipe), generate_text(target, stream, recipe)
    assert torch.equal(first.tokens, second.tokens)
    assert first.tokens.shape == (8, 24)
    joined = stream.tolist()
    for row, length in zip(first.tokens.tolist(), first.prefix_lengths.tolist(), strict=True):
        prefix = row[:length]
        assert any(joined[i : i + length] == prefix for i in range(len(joined)))


@pytest.mark.parametrize("count", [3, 6, 8])
def test_as_many_sequences_are_written_as_are_wanted(target, data, count):
    text = generate_text(target, load_tokens(data, "train"), selfgen_recipe(num_sequences=count))
    assert text.tokens.shape == (count, 24)
    assert len(text.prefix_lengths) == count


def test_the_clock_stops_generation_after_a_whole_batch(target, data):
    lines = []
    text = generate_text(
        target,
        load_tokens(data, "train"),
        selfgen_recipe(),
        deadline=time.monotonic() - 1,
        report=lines.append,
    )
    assert len(text.tokens) == 4
    assert any("stopped by the clock" in line for line in lines)


def test_prefixes_begin_at_documents_and_end_at_answers_as_asked(data):
    stream = load_tokens(data, "train")
    generator = torch.Generator().manual_seed(0)
    starts, _ = choose_prefixes(stream, selfgen_recipe(start_share=1.0, chat_share=0.0), 16, generator)
    assert (starts[:, 0] == EOS_ID).all()
    chats, lengths = choose_prefixes(
        stream, selfgen_recipe(start_share=0.0, chat_share=1.0, max_prefix=60, length=80), 16, generator
    )
    for row, length in zip(chats.tolist(), lengths.tolist(), strict=True):
        assert row[0] == EOS_ID
        assert row[length - 2 : length] == [23, 19]


def test_a_short_stream_is_an_error():
    with pytest.raises(DataError, match="too few"):
        choose_prefixes(torch.zeros(5, dtype=torch.int32), selfgen_recipe(), 2, torch.Generator())
