import json

import pytest
import torch

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.train.target import build_target, correction_biases, target_loss, train_target
from support.training import TARGET_MODEL, target_recipe

CPU = torch.device("cpu")


def run(data, folder, recipe=None, **budget):
    return train_target(
        recipe or target_recipe(), data=data, work=folder / "work", out=folder / "out", device=CPU, **budget
    )


def test_three_steps_train_validate_and_leave_a_checkpoint_that_loads(data, tmp_path, capsys):
    model, figures = run(data, tmp_path, steps=3)
    assert figures["dead_experts"] >= 0
    assert 0 < figures["val_bits_per_char"] < 20
    loaded = load_laguna(tmp_path / "out", dtype=torch.float32, device="cpu")
    rows = torch.randint(40, 300, (1, 12))
    with torch.no_grad():
        ours = build_target(target_recipe(), CPU, "test")
        ours.load_state_dict(
            {n: t if "correction_bias" in n else t.bfloat16().float() for n, t in model.state_dict().items()}
        )
        expected = ours.forward_dense(rows).hidden_states
        torch.testing.assert_close(loaded.forward_dense(rows).hidden_states, expected)
    events = [
        json.loads(line)["event"] for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()
    ]
    assert events[0] == "start"
    assert events[-1] == "final"


def test_the_loss_falls(data, tmp_path):
    first = run(data, tmp_path / "a", steps=1)[1]["val_loss"]
    assert run(data, tmp_path / "b", steps=40)[1]["val_loss"] < first - 1.0


def test_a_resumed_run_equals_an_uninterrupted_one(data, tmp_path, monkeypatch):
    whole, _ = run(data, tmp_path / "whole", steps=6)
    import lean_laguna.train.loop as loop

    monkeypatch.setattr(loop.Budget, "progress", lambda self, step, elapsed_s: step / 6 if step < 4 else 1.0)
    run(data, tmp_path / "cut", steps=6)
    monkeypatch.undo()
    with (tmp_path / "cut" / "out" / "train_log.jsonl").open("a") as log:  # what a kill may leave
        log.write('{"event": "step", "step": 5, "loss": 0.0}\n{"event": "step", "st')
    resumed, _ = run(data, tmp_path / "cut", steps=6)
    curves = [
        [
            (event["step"], event["loss"])
            for line in (tmp_path / name / "out" / "train_log.jsonl").read_text().splitlines()
            if (event := json.loads(line))["event"] == "step"
        ]
        for name in ("whole", "cut")
    ]
    assert curves[0] == curves[1] != []
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_a_state_of_another_shape_is_refused(data, tmp_path):
    run(data, tmp_path, steps=1)
    other = target_recipe(model=TARGET_MODEL | {"hidden_size": 24})
    with pytest.raises(CheckpointError, match="does not fit this recipe"):
        run(data, tmp_path, other, steps=2)


def test_a_bad_shape_names_the_recipe(data, tmp_path):
    with pytest.raises(ConfigError, match="target recipe"):
        run(data, tmp_path, target_recipe(model=TARGET_MODEL | {"layer_types": ["full_attention"]}), steps=1)


def test_biases_move_until_the_last_part_and_carry_no_gradient(data, tmp_path):
    model, _ = run(data, tmp_path, steps=5)
    biases = correction_biases(model)
    assert len(biases) == 2
    assert any(bias.abs().max() > 0 for bias in biases)
    assert not any(bias.requires_grad for bias in biases)
    still, _ = run(data, tmp_path / "still", target_recipe(bias_stop=0.0), steps=2)
    assert all(bias.abs().max() == 0 for bias in correction_biases(still))


def test_the_loss_is_the_plain_cross_entropy():
    model = build_target(target_recipe(), CPU, "test")
    rows = torch.randint(40, 300, (2, 13))
    nll, loads = target_loss(model, rows)
    logits = model.compute_logits(model.forward_dense(rows[:, :-1]).hidden_states.flatten(0, 1))
    expected = -torch.log_softmax(logits, -1)[torch.arange(24), rows[:, 1:].flatten()]
    torch.testing.assert_close(nll, expected)
    assert loads.sum(1).tolist() == [48, 48]
