import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.proposer import DFlashProposer
from support.engines import make_engine, tiny_drafter, tiny_target, tokens_of


class Watched(DFlashProposer):
    """Notes which positions of which pages it was given context for."""

    def __init__(self):
        super().__init__(tiny_drafter(), tiny_target())
        self.given = []

    def append_context(self, aux_hidden_states, batch, kv_cache):
        assert len(aux_hidden_states) == len(batch.input_ids) == len(batch.positions)
        self.given.append((aux_hidden_states.clone(), batch))
        super().append_context(aux_hidden_states, batch, kv_cache)


def run(num_requests, num_steps, length=3):
    proposer = Watched()
    engine = make_engine(proposer, length)
    params = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True)
    states = [engine.add_request(tokens_of(i, 6 + i), params) for i in range(num_requests)]
    for _ in range(num_steps):
        engine.step()
    return engine, proposer, states


def test_drafter_gets_each_committed_position_once_and_no_rejected_one():
    _, proposer, states = run(3, 12)
    positions = {i: [] for i in range(3)}
    for aux, batch in proposer.given:
        for span in batch.spans:
            owner = next(
                i
                for i in range(3)
                if span.block_tables[0][0] == states[i].sequences[0].tables[0].as_tuple()[0]
            )
            rows = batch.positions[span.start : span.start + span.num_rows].tolist()
            assert rows == list(range(span.first_position, span.first_position + span.num_rows))
            positions[owner] += rows
        assert aux.shape[1:] == (3, 32)
    for i, state in enumerate(states):
        assert positions[i] == list(range(state.sequences[0].num_computed))
        assert state.sequences[0].num_computed == 6 + i + len(state.sequences[0].completion.token_ids) - 1


def test_context_is_that_of_the_committed_tokens():
    _, proposer, states = run(2, 10)
    committed = {i: [*tokens_of(i, 6 + i), *states[i].sequences[0].completion.token_ids] for i in range(2)}
    for _, batch in proposer.given:
        for span in batch.spans:
            owner = next(
                i
                for i in range(2)
                if span.block_tables[0][0] == states[i].sequences[0].tables[0].as_tuple()[0]
            )
            ids = batch.input_ids[span.start : span.start + span.num_rows].tolist()
            assert ids == committed[owner][span.first_position : span.first_position + span.num_rows]


def test_no_taps_are_computed_where_no_drafts_are_wanted(monkeypatch):
    target, asked = tiny_target(), []
    forward = target.forward

    def spy(*args, tap_layer_ids=(), **kwargs):
        asked.append(tap_layer_ids)
        return forward(*args, tap_layer_ids=tap_layer_ids, **kwargs)

    monkeypatch.setattr(target, "forward", spy)
    engine = make_engine(Watched(), 3)
    engine.add_request(
        tokens_of(0, 5), SamplingParams(max_tokens=4, ignore_eos=True), num_speculative_tokens=0
    )
    while engine.has_unfinished:
        engine.step()
    # The prompt's context goes into the prefix cache, for later requests that do draft.
    assert asked == [(0, 2, 3), (), (), ()]


def test_group_without_layers_has_an_empty_table():
    engine, proposer, _ = run(1, 1)
    names = [group.name for group in engine._runner.kv_cache.groups]
    assert names == ["full", "sliding", "draft_full", "draft_sliding"]
    assert all(len(table) == 12 or not table for table in proposer.given[0][1].spans[0].block_tables[::2])
    sliding_only = make_engine(DFlashProposer(tiny_drafter(layers="S"), tiny_target()), 3)
    assert [group.name for group in sliding_only.scheduler.groups] == ["full", "sliding", "draft_sliding"]


def test_rows_are_packed_in_the_order_of_the_sequences():
    _, proposer, _ = run(3, 4)
    for _, batch in proposer.given:
        starts = [span.start for span in batch.spans]
        ends = [span.start + span.num_rows for span in batch.spans]
        assert starts == [0, *ends[:-1]]
        assert ends[-1] == len(batch.input_ids)
        assert batch.input_ids.dtype == torch.int64
