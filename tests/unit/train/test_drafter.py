import pytest
import torch

from lean_laguna.core.errors import ConfigError
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.train.dataset import load_tokens
from lean_laguna.train.drafter import shared_recipe, train_drafter
from lean_laguna.train.drafter_eval import evaluate, evaluate_kinds
from lean_laguna.train.selfgen import generate_held_out, generate_text
from lean_laguna.train.target import build_target
from support.training import DRAFTER_MODEL, drafter_recipe, selfgen_recipe, target_recipe


@pytest.fixture(scope="module")
def setting(data):
    target = build_target(target_recipe(init_std=0.1), torch.device("cpu"), "test").requires_grad_(False)
    recipe = selfgen_recipe()
    val = load_tokens(data, "val")
    return {
        "target": target,
        "text": generate_text(target, load_tokens(data, "train"), recipe),
        "held_out": {
            kind: generate_held_out(target, val, recipe, temperature)
            for kind, temperature in (("greedy", 0.0), ("sampled", 0.8))
        },
    }


def run(setting, folder, recipe=None, **budget):
    return train_drafter(
        recipe or drafter_recipe(),
        **setting,
        work=folder / "work",
        out=folder / "out",
        provenance={"target": "x"},
        **budget,
    )


@pytest.mark.parametrize("loss", ["dpace", "decay"])
def test_three_steps_train_evaluate_and_leave_a_drafter_that_loads(setting, tmp_path, loss):
    drafter, figures = run(setting, tmp_path, drafter_recipe(loss=loss), steps=3)
    assert 1.0 <= figures["greedy_tau_chain"] <= 4.0
    assert 1.0 <= figures["sampled_tau_chain"] <= 4.0
    loaded = load_drafter(tmp_path / "out", setting["target"].config)
    for (name, ours), theirs in zip(drafter.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name  # what was measured is what was written, rounded
    assert figures == evaluate_kinds(
        loaded, setting["target"], setting["held_out"], drafter_recipe().num_eval_draft_tokens
    )


def test_a_resumed_run_equals_an_uninterrupted_one(setting, tmp_path, monkeypatch):
    run(setting, tmp_path / "whole", steps=5)
    import lean_laguna.train.loop as loop

    monkeypatch.setattr(loop.Budget, "progress", lambda self, step, elapsed_s: step / 5 if step < 3 else 1.0)
    run(setting, tmp_path / "cut", steps=5)
    monkeypatch.undo()
    run(setting, tmp_path / "cut", steps=5)
    whole, resumed = (
        torch.load(tmp_path / name / "work" / "state.pt")["module"] for name in ("whole", "cut")
    )
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_training_raises_acceptance(setting, tmp_path):
    before = run(setting, tmp_path / "a", steps=1)[1]
    after = run(setting, tmp_path / "b", steps=60)[1]
    assert after["greedy_pos_acc_1"] > before["greedy_pos_acc_1"]


def test_a_drafter_for_another_target_is_refused(setting, tmp_path):
    with pytest.raises(ConfigError, match="hidden_size"):
        run(setting, tmp_path, drafter_recipe(model=DRAFTER_MODEL | {"hidden_size": 24}), steps=1)


def test_evaluation_does_not_depend_on_how_rows_are_grouped(setting, tmp_path):
    drafter, _ = run(setting, tmp_path, steps=2)
    for text in setting["held_out"].values():
        one, other = (evaluate(drafter, setting["target"], text, 3, rows=rows) for rows in (1, 16))
        assert one == pytest.approx(other)


@pytest.mark.parametrize(
    ("rows", "accumulate", "processes", "shared"),
    [(1, 8, 1, (1, 8)), (1, 8, 2, (2, 4)), (1, 8, 8, (8, 1)), (4, 3, 6, (12, 1)), (4, 1, 2, (4, 1))],
)
def test_processes_share_a_step_of_the_same_rows(rows, accumulate, processes, shared):
    recipe = shared_recipe(drafter_recipe(batch_rows=rows, accumulate=accumulate), processes, None, "test")
    assert (recipe.batch_rows, recipe.accumulate) == shared


def test_a_step_that_processes_cannot_share_is_refused():
    recipe = drafter_recipe(batch_rows=1, accumulate=4)
    with pytest.raises(ConfigError, match=r"'batch_rows' \(1\) times 'accumulate' \(4\) must be a multiple"):
        shared_recipe(recipe, 3, None, "test")
    with pytest.raises(ConfigError, match="give --steps"):
        shared_recipe(recipe, 2, 60.0, "test")
